"""`corral worker upgrade`: a real worker process is replaced by another version of Corral, and returns to the old one
when the new one does not start, hangs, or does not become ready. Its backend serves all the time."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from corral.worker.agent.join.identity import holder_of
from corral.worker.supervisor.table import Running
from corral.worker.upgrade import readiness
from corral.worker.upgrade.trial import TrialState, program_of, read_trial
from corral.worker.upgrade.upgrade import upgrade
from corral.worker.upgrade.versions import Versions
from tests.integration.worker.test_backends_outlive_the_worker import client, plant, serves
from tests.support.nats import NatsServer, nats_server
from tests.support.planted_versions import plant_version, write_wheel
from tests.support.processes import Process, alive, clean_env, free_port
from tests.support.running_worker import worker_env
from tests.support.scripted_controller import ScriptedController
from tests.support.supervising import swept, tiny
from tests.support.waiting import until

__all__ = ["nats_server"]

pytestmark = pytest.mark.timeout(180)

NOT_STARTING = {"corral/worker/main.py": "\nraise RuntimeError('this version is broken')\n"}
# After the self-check, which loads the code in a process without a keeper.
ENDING = {
    "corral/worker/main.py": "\nimport os\nif 'CORRAL_INTERNAL_SUCCEED' in os.environ: raise SystemExit('broken')\n"
}
HANGING = {"corral/worker/main.py": "\nimport os, time\nif 'CORRAL_INTERNAL_SUCCEED' in os.environ: time.sleep(3600)\n"}
NEVER_READY = {"corral/worker/status.py": "\nWorkerStatus.not_ready_reason = lambda self: 'never'\n"}
ENDING_LATER = {
    "corral/worker/reload/handover.py": "\nimport os\nInherited.confirm_serving = lambda self: os._exit(9)\n"
}


@dataclass
class Site:
    """A machine with a worker that a join line has installed."""

    controller: ScriptedController
    versions: Versions
    old: Path
    data: Path
    backend: Running
    port: int
    worker: Process
    folder: Path

    def wheel(self, version: str, edits: dict[str, str] | None = None) -> tuple[Path, Path]:
        """A wheel, and the folder of its version, where it is installed already."""
        wheel = write_wheel(self.folder / version / f"corral-{version}-py3-none-any.whl", edits or {}, version)
        return wheel, plant_version(self.versions, wheel, hashlib.sha256(wheel.read_bytes()).hexdigest())

    async def command(self, wheel: Path) -> tuple[int, str]:
        words = (str(self.old / "bin" / "corral"), "worker", "upgrade", "--wheel", str(wheel), "--data", str(self.data))
        command = Process(words, clean_env(self.folder), self.folder / "upgrade.log")
        try:
            return await asyncio.to_thread(command.wait, 120.0), command.output()
        finally:
            command.close()

    def program(self) -> Path | None:
        holder = holder_of(self.data)
        return None if holder is None else program_of(holder)


@pytest.fixture
async def site(nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[Site]:
    versions, data, port = Versions(tmp_path / "corral"), tmp_path / "w", free_port()
    wheel = write_wheel(tmp_path / "old" / "corral.whl", {})
    old = plant_version(versions, wheel, hashlib.sha256(wheel.read_bytes()).hexdigest())
    versions.make_current(old)
    async with ScriptedController(nats_server) as controller:
        with swept(data / "processes"), ended_workers(versions):
            env = clean_env(tmp_path) | worker_env(
                controller.url, data, port=str(port), token=controller.token(uses=9), backend_grace="5s"
            )
            backend = await plant(data, tiny(tmp_path / "tiny"))
            worker = Process((versions.command, "worker"), env, tmp_path / "worker.log")
            try:
                await until(lambda: readiness.read(data) is not None, "the worker is ready")
                yield Site(controller, versions, old, data, backend, port, worker, tmp_path)
            finally:
                await asyncio.to_thread(worker.close)


class ended_workers:
    """Workers that a trial has started are not children of the test."""

    def __init__(self, versions: Versions) -> None:
        self._root = str(versions.root)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        for process in list(self._left()):
            process.kill()
            process.wait(10)

    def _left(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            try:
                words = process.cmdline()
            except psutil.Error:
                continue
            if len(words) > 1 and words[1].startswith(self._root) and Path(words[1]).name == "corral":
                yield process


async def test_a_worker_is_upgraded_while_its_backend_serves(site: Site) -> None:
    wheel, new = site.wheel("9.1.0")
    before = holder_of(site.data)
    async with client(site.controller, site.port) as session:
        await serves(session, site.backend)
        failed: list[object] = []
        answered = 0

        async def ask() -> None:
            nonlocal answered
            while True:
                try:
                    async with session.get(f"/replicas/{site.backend.process_id}/who") as answer:
                        assert answer.status == 200
                        answered += 1
                except Exception as error:
                    failed.append(error)
                await asyncio.sleep(0.01)

        asking = asyncio.ensure_future(ask())
        code, said = await site.command(wheel)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    assert (code, str(new) in said) == (0, True), said
    assert site.program() == new.resolve()
    assert site.versions.current == new.resolve()
    assert (failed, answered > 10) == ([], True)
    ready = readiness.read(site.data)
    assert ready is not None
    assert (ready.version, ready.pid) == ("9.1.0", holder_of(site.data))
    assert alive(site.worker.pid), "the process that a service manager knows"
    assert before != holder_of(site.data)
    await until(lambda: site.controller.named("w1").registrations[-1]["version"] == "9.1.0", "the controller knows")

    code, said = await site.command(wheel)
    assert code == 1
    assert "runs this version already" in said

    # The worker has a keeper of the first version by now, and the versions change under it.
    wheel, later = site.wheel("9.2.0", NEVER_READY)
    ended = await asyncio.to_thread(upgrade, site.data, wheel, print, take_over_s=40.0, ready_s=8.0)
    assert (ended.state, "was not ready within 8 s" in ended.reason) == (TrialState.RETURNED, True), ended
    await returned(site, later, to=new)
    wheel, _ = site.wheel("9.3.0")
    ended = await asyncio.to_thread(upgrade, site.data, wheel, print, take_over_s=40.0, ready_s=20.0)
    assert ended.state is TrialState.DONE
    assert alive(site.worker.pid)


@pytest.mark.parametrize(
    ("edits", "reason"),
    [
        pytest.param(NEVER_READY, "was not ready within 8 s", marks=pytest.mark.long),
        pytest.param(ENDING, "did not take over", marks=pytest.mark.long),
        pytest.param(ENDING_LATER, "or ended", marks=pytest.mark.long),
    ],
)
async def test_a_worker_returns_to_the_old_version(site: Site, edits: dict[str, str], reason: str) -> None:
    wheel, new = site.wheel("9.2.0", edits)
    ended = await asyncio.to_thread(upgrade, site.data, wheel, print, take_over_s=40.0, ready_s=8.0)
    assert (ended.state, reason in ended.reason) == (TrialState.RETURNED, True), ended
    await returned(site, new)


@pytest.mark.long
async def test_a_version_that_hangs_is_ended(site: Site) -> None:
    wheel, new = site.wheel("9.3.0", HANGING)
    before = holder_of(site.data)
    ended = await asyncio.to_thread(upgrade, site.data, wheel, print, take_over_s=4.0, ready_s=20.0)
    assert ended.state is TrialState.RETURNED, ended
    assert "did not take over within 4 s" in ended.reason
    await returned(site, new)
    assert holder_of(site.data) == before, "the old worker never stopped"


async def test_a_version_that_fails_its_own_check_is_not_tried(site: Site) -> None:
    wheel, _ = site.wheel("9.4.0", NOT_STARTING)
    before = holder_of(site.data)
    code, said = await site.command(wheel)
    assert code == 1
    assert "does not work here: RuntimeError: this version is broken; nothing was changed" in said
    assert (holder_of(site.data), site.versions.current) == (before, site.old.resolve())
    assert read_trial(site.data) is None


async def returned(site: Site, new: Path, *, to: Path | None = None) -> None:
    before = (to or site.old).resolve()
    assert (site.versions.current, site.program()) == (before, before)
    async with client(site.controller, site.port) as session:
        assert await serves(session, site.backend) == site.backend.pid, "the backend was kept"
    assert processes_of(new) == []


def processes_of(version: Path) -> list[psutil.Process]:
    return [each for each in psutil.process_iter() if program_of(each.pid) == version.resolve()]
