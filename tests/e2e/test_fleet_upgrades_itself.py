"""`corral fleet upgrade` from outside: real workers under steady load move to another version of Corral and back, and
stop at the first one on which a bad version does not become ready."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from corral.worker.upgrade.versions import Versions
from tests.support.fleet import Fleet
from tests.support.planted_fleet import NO_INDEX, PlantedFleet, end_workers, planted_fleet, sha256_of
from tests.support.planted_versions import plant_version, write_wheel
from tests.support.uv import path_with_uv
from tests.support.waiting import wait_for

pytestmark = pytest.mark.timeout(240)

WORKERS = ("barn", "byre")
ENV = {"CORRAL_UPGRADE_TIMEOUT": "15s"}
NEVER_READY = {"corral/worker/status.py": "\nWorkerStatus.not_ready_reason = lambda self: 'never'\n"}


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlantedFleet]:
    with planted_fleet(tmp_path_factory.mktemp("versions"), *WORKERS, env=ENV) as planted:
        yield planted


class Load:
    """Clients that ask a model again and again, through the gateway."""

    def __init__(self, fleet: Fleet, model: str) -> None:
        self._fleet = fleet
        self._model = model
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(3)]
        self.answered = 0
        self.failed: list[str] = []

    def _run(self) -> None:
        body = {"model": self._model, "messages": [{"role": "user", "content": "[[piece_delay_s=0.02]] a b c d"}]}
        while not self._over.is_set():
            try:
                answer = self._fleet.api("POST", "/v1/chat/completions", body)
            except OSError as error:
                self.failed.append(repr(error))
                continue
            if answer.status == 200:
                self.answered += 1
            else:
                self.failed.append(f"{answer.status} {answer.body[:200]!r}")

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)


@pytest.fixture(scope="module")
def model(planted: PlantedFleet) -> str:
    """A model with a replica on each worker."""
    fleet = planted.fleet
    for name in WORKERS:
        assert fleet.cli("nodes", "label", name, "kind=farm").returncode == 0
    definition = {"name": "steady", "backend": "mock", "parallel": 16}
    assert fleet.api("POST", "/api/models", {"definition": definition}).status == 201
    schedule = {"model_name": "steady", "min_replicas": len(WORKERS), "node_selector": {"kind": "farm"}}
    answer = fleet.api("POST", "/api/nodes/scheduling", schedule)
    assert answer.status == 200, answer.body

    def ready() -> bool:
        rows = fleet.api("GET", "/api/models/steady/replicas").json()
        return len([row for row in rows if row["process_state"] == "ready"]) == len(WORKERS)

    wait_for(ready, "a replica on each worker", 60)
    return "steady"


def upgrade(fleet: Fleet, *words: str, code: int = 0, timeout_s: float = 180) -> dict[str, Any]:
    """The operation, which has settled."""
    ran = fleet.cli("fleet", "upgrade", *words, "--json", timeout_s=timeout_s)
    assert ran.returncode == code, ran.stdout + ran.stderr
    (operation,) = json.loads(ran.stdout)
    assert isinstance(operation, dict)
    return operation


def rows(operation: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["node_name"]: row for row in operation["nodes"]}


def test_a_worker_moves_to_a_new_version_under_load(planted: PlantedFleet, model: str) -> None:
    fleet, wheel = planted.fleet, planted.make_wheel("9.0.1")
    with Load(fleet, model) as load:
        operation = upgrade(fleet, "--wheel", str(wheel), "--node", "barn")
    assert {name: (row["status"], row["version"]) for name, row in rows(operation).items()} == {
        "barn": ("success", "9.0.1")
    }
    assert planted.program("barn") == sha256_of(wheel)[:16]
    assert (load.failed, load.answered > 20) == ([], True)
    assert fleet.nodes()["barn"]["version"] == "9.0.1"


@pytest.mark.long
def test_a_fleet_moves_to_a_new_version_and_back_under_load(planted: PlantedFleet, model: str) -> None:
    fleet, wheel = planted.fleet, planted.make_wheel("9.1.0")
    own = next(name for name in fleet.nodes() if name not in WORKERS)
    plan = json.loads(fleet.cli("fleet", "upgrade", "--wheel", str(wheel), "--dry-run", "--json").stdout)
    actions = {node["node"]: node["action"] for node in plan["nodes"]}
    assert actions == {own: "skip", "barn": "upgrade", "byre": "upgrade"}, plan
    assert [node["node"] for node in plan["nodes"] if node["is_canary"]] == ["barn"]

    with Load(fleet, model) as load:
        there = upgrade(fleet, "--wheel", str(wheel))
        back = upgrade(fleet, "--wheel", str(planted.first))
    for operation, version, target in ((there, "9.1.0", wheel), (back, "9.0.0", planted.first)):
        found = rows(operation)
        assert {name: found[name]["status"] for name in WORKERS} == dict.fromkeys(WORKERS, "success"), operation
        assert found[own]["status"] == "skipped"
        assert "it runs from a checkout" in found[own]["error"]
        assert {found[name]["version"] for name in WORKERS} == {version}
        assert target is not None
    assert {planted.program(name) for name in WORKERS} == {sha256_of(planted.first)[:16]}
    assert (load.failed, load.answered > 50) == ([], True)
    listed = json.loads(fleet.cli("fleet", "releases", "--json").stdout)
    assert [each["version"] for each in listed["releases"]][:2] == ["9.0.0", "9.1.0"]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("uv", [False, True], ids=["pip", "uv"])
def test_a_version_is_built_from_what_the_controller_serves(tmp_path: Path, uv: bool) -> None:
    """The worker has no package index: all wheels of the dependencies come from the controller."""
    path = path_with_uv() if uv else os.environ["PATH"]
    with planted_fleet(tmp_path, "barn", env=ENV | {"PATH": path}, worker_env=NO_INDEX, index=True) as planted:
        wheel = planted.make_wheel("9.1.0", planted=False)
        operation = upgrade(planted.fleet, "--wheel", str(wheel), "--node", "barn", timeout_s=500)
        (row,) = operation["nodes"]
        assert (row["status"], row["version"]) == ("success", "9.1.0"), operation
        assert row["total_bytes"] > 20 << 20, "the dependencies are some 50 MB"
        folder = planted.versions["barn"].folder(sha256_of(wheel))
        assert planted.program("barn") == folder.name
        assert not (folder.parent.parent / "upgrade-files").exists()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[PlantedFleet]:
    """`corral up` alone, from a folder of versions."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # nats-server is there
    fleet = Fleet(tmp_path, PATH=path, **NO_INDEX, **ENV)
    versions = Versions(fleet.data / "corral")
    first = write_wheel(tmp_path / "first" / "corral-9.0.0-py3-none-any.whl", {}, "9.0.0")
    versions.make_current(plant_version(versions, first, sha256_of(first)))
    fleet.program = (versions.command,)
    try:
        fleet.start()
        own = fleet.own_node()
        fleet.wait_status(own, "healthy")
        yield PlantedFleet(fleet, first, {own: versions})
    finally:
        fleet.close()
        end_workers(versions)


@pytest.mark.long
def test_a_whole_machine_moves_under_load_and_stays_when_a_role_does_not_start(machine: PlantedFleet) -> None:
    fleet, wheel = machine.fleet, machine.make_wheel("9.1.0")
    assert fleet.api("POST", "/api/models", {"definition": {"name": "steady", "backend": "mock"}}).status == 201
    body = {"model": "steady", "messages": [{"role": "user", "content": "hello"}]}
    assert wait_for(lambda: fleet.api("POST", "/v1/chat/completions", body).status == 200, "an answer", 60)
    with Load(fleet, "steady") as load:
        operation = upgrade(fleet, "--wheel", str(wheel))
        assert [row["status"] for row in operation["nodes"]] == ["success"], operation
        wait_for(lambda: controller_versions(fleet) == ["9.1.0"], "the controller follows", 90)
        wait_for(lambda: "gateway and controller run the version" in output(fleet), "the end", 60)
    assert (load.failed, load.answered > 50) == ([], True)
    assert f"/{sha256_of(wheel)[:16]}/" in command_of(fleet.child_pid("gateway"))

    broken = machine.make_wheel("9.2.0", {"corral/controller/main.py": "\nraise RuntimeError('no controller')\n"})
    operation = upgrade(fleet, "--wheel", str(broken))
    assert [row["status"] for row in operation["nodes"]] == ["success"], "the worker is fine"
    wait_for(lambda: "no controller" in output(fleet), "the check", 60)
    assert controller_versions(fleet) == ["9.1.0"]
    assert f"/{sha256_of(wheel)[:16]}/" in command_of(fleet.child_pid("gateway"))


def controller_versions(fleet: Fleet) -> list[str]:
    cluster = fleet.api("GET", "/api/cluster")
    assert cluster.status == 200, cluster.body
    return [each["version"] for each in cluster.json()["controllers"] if each["live"]]


def output(fleet: Fleet) -> str:
    assert fleet.up is not None
    return fleet.up.output()


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


@pytest.mark.long
def test_a_version_that_is_never_ready_stays_on_one_node(planted: PlantedFleet, model: str) -> None:
    fleet, wheel = planted.fleet, planted.make_wheel("9.2.0", NEVER_READY)
    before = {name: planted.program(name) for name in WORKERS}
    operation = upgrade(fleet, "--wheel", str(wheel), code=1)
    found = rows(operation)
    assert found["barn"]["status"] == "error", operation
    assert "the old version serves again" in found["barn"]["error"]
    assert found["byre"]["status"] == "queued"
    assert "stopped: barn failed" in found["byre"]["error"]
    assert {name: planted.program(name) for name in WORKERS} == before
