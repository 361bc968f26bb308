"""A fleet whose workers were installed as a join line does it, each in a folder of versions of its own, so that
`corral fleet upgrade` can replace them. The dependencies are those of the tests' own environment.

with planted_fleet(tmp_path, "barn", "byre") as fleet:
    wheel = fleet.make_wheel("9.1.0")
    fleet.cli("fleet", "upgrade", "--wheel", str(wheel))
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from corral.worker.agent.join.identity import holder_of
from corral.worker.upgrade.trial import program_of
from corral.worker.upgrade.versions import Versions
from tests.support.fleet import Fleet
from tests.support.grown_fleet import grown_fleet
from tests.support.planted_versions import plant_version, write_wheel
from tests.support.processes import Process
from tests.support.supervising import swept

# No package index: the controller cannot list the dependencies, and the versions are installed already.
NO_INDEX = {
    "PIP_INDEX_URL": "http://127.0.0.1:9/",
    "PIP_RETRIES": "0",
    "UV_INDEX_URL": "http://127.0.0.1:9/",
    "UV_HTTP_RETRIES": "0",
}


@dataclass
class PlantedFleet:
    fleet: Fleet
    first: Path  # the wheel of the version with which the workers begin
    versions: dict[str, Versions] = field(default_factory=dict)  # by worker

    def make_wheel(self, version: str, edits: Mapping[str, str] | None = None, *, planted: bool = True) -> Path:
        """A wheel of a version; `planted`: it is built on each worker already."""
        name = f"corral-{version}-py3-none-any.whl"
        wheel = write_wheel(self.fleet.root / version / name, edits or {}, version)
        if planted:
            for versions in self.versions.values():
                plant_version(versions, wheel, sha256_of(wheel))
        return wheel

    def program(self, worker: str) -> str:
        """The name of the version that runs."""
        holder = holder_of(self.data(worker))
        found = None if holder is None else program_of(holder)
        return "" if found is None else found.name

    def data(self, worker: str) -> Path:
        return self.fleet.root / f"worker-{worker}"


def sha256_of(wheel: Path) -> str:
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


@contextlib.contextmanager
def planted_fleet(
    root: Path,
    *names: str,
    options: Mapping[str, tuple[str, ...]] | None = None,
    env: Mapping[str, str] | None = None,
    worker_env: Mapping[str, str] | None = None,
    index: bool = False,
) -> Iterator[PlantedFleet]:
    """`up`'s own node, which runs from a checkout, and one worker per name, all healthy. `options`: more ones of a
    worker. `index`: the package index of this machine may be asked."""
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(swept(root / f"worker-{name}" / "processes"))
        fleet = stack.enter_context(grown_fleet(root, env=({} if index else NO_INDEX) | dict(env or {})))
        planted = PlantedFleet(fleet, write_wheel(root / "first" / "corral-9.0.0-py3-none-any.whl", {}, "9.0.0"))
        token = fleet.token("--pre-approved", "--uses", str(len(names)))
        for name in names:
            versions = planted.versions[name] = Versions(root / f"corral-{name}")
            versions.make_current(plant_version(versions, planted.first, sha256_of(planted.first)))
            stack.callback(end_workers, versions)
            words = [versions.command, "join", fleet.url, "--name", name, "--data", str(planted.data(name))]
            words += ["--port", "0", *(options or {}).get(name, ()), "--token", token]
            fleet.workers[name] = Process(tuple(words), fleet.env | dict(worker_env or {}), root / f"worker-{name}.log")
        for name in names:
            fleet.wait_status(name, "healthy", 60)
        yield planted


def end_workers(versions: Versions) -> None:
    """Workers that took over are not children of the test."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if len(words) > 1 and words[1].startswith(str(versions.root)) and Path(words[1]).name == "corral":
                process.kill()
                process.wait(10)
