"""kill -9 of the worker leaves the backend answering; the next worker adopts it, and nothing that is not ours."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from corral.contract.codec import encode
from corral.worker.supervisor.folders import locked_if_ended
from corral.worker.supervisor.identity import Identity
from corral.worker.supervisor.shim import boot_id, start_time
from corral.worker.supervisor.spec import ProcessSpec, Record, ShimRun
from tests.support.processes import Process, alive
from tests.support.supervising import ROOT, get, identities, listens, mock_grpc, tiny
from tests.support.waiting import until, wait_for

Open = Callable[..., Any]
Drive = Callable[..., tuple[Process, dict[str, Any]]]


@pytest.fixture
def drive(folder: Path, tmp_path: Path) -> Iterator[Drive]:
    """A worker in a process of its own, and what it says once its backends run."""
    drivers: list[Process] = []

    def start(*specs: ProcessSpec) -> tuple[Process, dict[str, Any]]:
        files = []
        for number, spec in enumerate(specs):
            files.append(tmp_path / f"spec-{number}.json")
            files[-1].write_bytes(encode(spec))
        command = [sys.executable, "-m", "tests.support.supervisor_driver", str(folder), *map(str, files)]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        driver = Process(command, env, tmp_path / f"driver-{len(drivers)}.log")
        drivers.append(driver)

        def said() -> dict[str, Any] | None:
            assert driver.running, driver.output()
            lines = [line for line in driver.output().splitlines() if line.startswith("{")]
            return dict(json.loads(lines[-1])) if lines else None

        told = wait_for(said, "word from the driver")
        assert told is not None
        return driver, told

    yield start
    for driver in drivers:
        driver.close()


async def test_kill_9_of_the_worker_leaves_the_backend_answering_and_the_next_adopts_it(
    opened: Open, drive: Drive, tmp_path: Path
) -> None:
    spec = tiny(tmp_path / "b", process_id="first")
    driver, told = await asyncio.to_thread(drive, spec)
    (started,) = told["started"]
    driver.kill()
    assert (await asyncio.to_thread(get, started["port"]))["pid"] == started["pid"]

    supervisor = await opened()
    (adopted,) = await supervisor.adopt()
    assert (adopted.process_id, adopted.port, adopted.pid) == ("first", started["port"], started["pid"])
    assert supervisor.find("first") == adopted
    assert await supervisor.start(spec) == adopted
    assert (await asyncio.to_thread(get, adopted.port))["pid"] == started["pid"]

    await supervisor.stop("first")
    assert not alive(started["pid"])
    assert not listens(started["port"])


async def test_an_adopted_backend_is_watched_and_restarted_like_any_other(
    opened: Open, drive: Drive, tmp_path: Path
) -> None:
    driver, told = await asyncio.to_thread(drive, tiny(tmp_path / "b"))
    (started,) = told["started"]
    driver.kill()
    supervisor = await opened()
    await supervisor.adopt()
    os.kill(started["pid"], signal.SIGKILL)
    await until(lambda: supervisor.find_key("m#0") and supervisor.find_key("m#0").process_id != started["process_id"])
    assert supervisor.find_key("m#0").port != started["port"], "a port that was just released rests"


async def test_a_grpc_backend_survives_and_keeps_its_token(opened: Open, drive: Drive) -> None:
    spec = mock_grpc(load=json.dumps({"Model": "m"}))
    driver, told = await asyncio.to_thread(drive, spec)
    driver.kill()
    supervisor = await opened()
    (adopted,) = await supervisor.adopt()
    assert adopted.pid == told["started"][0]["pid"]
    assert await supervisor.free(adopted.process_id) is None, "the token of the first worker's making still fits"


async def test_what_the_backend_said_meanwhile_is_not_lost(opened: Open, drive: Drive, tmp_path: Path) -> None:
    driver, told = await asyncio.to_thread(drive, tiny(tmp_path / "b", "lines=2"))
    driver.kill()
    await asyncio.to_thread(get, told["started"][0]["port"], "/say/alone")
    supervisor = await opened()
    await supervisor.adopt()
    await until(lambda: "alone" in [line.text for line in supervisor.logs.read("m#0")])
    assert [line.text for line in supervisor.logs.read("m#0")] == ["tiny line 1", "tiny line 2", "alone"]


async def test_a_worker_that_leaves_in_order_leaves_nothing(drive: Drive, folder: Path, tmp_path: Path) -> None:
    driver, told = await asyncio.to_thread(drive, tiny(tmp_path / "b", "children=2"))
    (identity,) = identities(folder)
    assert await asyncio.to_thread(driver.stop) == 0
    assert not alive(told["started"][0]["pid"])
    assert not alive(identity.shim_pid)


async def test_a_backend_that_ended_while_nobody_watched_is_not_adopted(
    opened: Open, drive: Drive, folder: Path, tmp_path: Path
) -> None:
    driver, told = await asyncio.to_thread(drive, tiny(tmp_path / "b", "lines=1"))
    driver.kill()
    os.kill(told["started"][0]["pid"], signal.SIGKILL)
    (identity,) = identities(folder)
    await until(lambda: not alive(identity.shim_pid))
    supervisor = await opened()
    assert await supervisor.adopt() == ()
    assert supervisor.list_processes() == ()
    assert [line.text for line in supervisor.logs.read("m")] == ["tiny line 1"], "its last words are kept"


async def test_a_start_that_its_worker_did_not_live_to_see_is_ended(opened: Open, folder: Path, tmp_path: Path) -> None:
    first = await opened()
    starting = asyncio.create_task(first.start(tiny(tmp_path / "b", "silent=1")))
    await until(lambda: identities(folder))
    await first.release_all()  # as after kill -9
    starting.cancel()
    (identity,) = identities(folder)
    assert alive(identity.pid)
    supervisor = await opened()
    assert await supervisor.adopt() == ()
    assert supervisor.list_processes() == ()
    assert not alive(identity.pid)


def write_state(folder: Path, name: str, **changed: Any) -> Path:
    """A process folder as a shim leaves it."""
    place = folder / name
    place.mkdir(parents=True, mode=0o700)
    folder.chmod(0o700)
    spec = ProcessSpec(backend="tiny", model=name, directory="/")
    Record(run=ShimRun(process_id=name), process=spec, port=20001, token="t").write(place)
    told = {"process_id": name, "boot_id": boot_id(), "pid": 0, "start": "", "shim_pid": 0, "shim_start": ""} | changed
    (place / "state.json").write_text(json.dumps(told))
    (place / "ready.json").write_text('{"ready_at":"2026-01-01T00:00:00Z"}')
    return place


@pytest.fixture
def bystander() -> Iterator[int]:
    """A process of somebody else, which has nothing to do with us."""
    with subprocess.Popen(["sleep", "3600"], start_new_session=True) as process:
        yield process.pid
        process.kill()


async def test_recycled_pids_are_neither_adopted_nor_harmed(opened: Open, folder: Path, bystander: int) -> None:
    """The numbers are those of a living process, but it started at another time."""
    write_state(folder, "recycled", pid=bystander, start="1", shim_pid=bystander, shim_start="1")
    supervisor = await opened()
    assert await supervisor.adopt() == ()
    assert alive(bystander)


async def test_state_of_another_boot_is_not_adopted(opened: Open, folder: Path, bystander: int) -> None:
    started = start_time(bystander)
    numbers = {"pid": bystander, "start": started, "shim_pid": bystander, "shim_start": started}
    write_state(folder, "rebooted", boot_id="of another boot", **numbers)
    supervisor = await opened()
    assert await supervisor.adopt() == ()
    assert alive(bystander)


class FakeShim:
    """Holds the lock and answers on the socket, as a shim does; says what it is told to say."""

    def __init__(self, place: Path, hello: dict[str, Any]) -> None:
        self._lock = (place / "lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._door = socket.socket(socket.AF_UNIX)
        self._door.bind(str(place / "socket"))
        self._door.listen()
        self._hello = json.dumps({"hello": hello}).encode() + b"\n"
        self.heard = b""
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        try:
            sock, _ = self._door.accept()
        except OSError:
            return
        with sock, contextlib.suppress(ConnectionError):  # whoever has seen enough may leave in the middle of it
            sock.sendall(self._hello)
            while data := sock.recv(1000):
                self.heard += data

    def close(self) -> None:
        self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()
        self._lock.close()
        self._thread.join()


def me(name: str, **changed: Any) -> dict[str, Any]:
    mine = start_time(os.getpid())
    numbers = {"pid": os.getpid(), "start": mine, "shim_pid": os.getpid(), "shim_start": mine}
    return {"process_id": name, "boot_id": boot_id()} | numbers | changed


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({"start": "1"}, {"start": "1"}),
        ({"shim_start": "1"}, {"shim_start": "1"}),
        ({}, {"process_id": "another"}),
        ({}, {"pid": 1}),
        ({"shim_pid": os.getppid(), "shim_start": start_time(os.getppid())},) * 2,
        ({"process_id": "another"}, {"process_id": "another"}),
    ],
)
async def test_whoever_answers_without_proof_is_not_adopted(
    opened: Open, folder: Path, written: dict[str, Any], said: dict[str, Any]
) -> None:
    place = write_state(folder, "foreign", **me("foreign", **written))
    fake = FakeShim(place, me("foreign", **said))
    try:
        supervisor = await opened(shim_timeout_s=2.0)
        assert await supervisor.adopt() == ()
        assert supervisor.list_processes() == ()
    finally:
        await asyncio.to_thread(fake.close)
    assert fake.heard == b"", "nobody is told to stop who is not ours"


async def test_the_fake_with_the_right_proof_would_be_adopted(opened: Open, folder: Path) -> None:
    """So that the refusals above are refused for the reason they name."""
    place = write_state(folder, "ours", **me("ours"))
    fake = FakeShim(place, me("ours"))
    supervisor = await opened()
    adopted = await supervisor.adopt()
    await supervisor.release_all()
    await asyncio.to_thread(fake.close)
    assert [running.process_id for running in adopted] == ["ours"]


async def test_folders_of_others_are_not_even_looked_at(opened: Open, folder: Path, tmp_path: Path) -> None:
    place = write_state(folder, "open", **me("open"))
    place.chmod(0o755)
    (folder / "link").symlink_to(tmp_path)
    supervisor = await opened()
    assert await supervisor.adopt() == ()
    assert not (place / "exit.json").exists()


async def test_a_shim_that_comes_too_late_does_not_begin(opened: Open, folder: Path, tmp_path: Path) -> None:
    """The worker died right after it started the shim; the next one has already given the process up."""
    place = folder / "late"
    for private in (folder, place):
        private.mkdir(mode=0o700)
    touched = tmp_path / "touched"
    run = ShimRun(
        process_id="late", command=("/bin/sh", "-c", f"touch {touched}"), directory="/", log_bytes=1000, log_files=1
    )
    Record(run=run, process=tiny(tmp_path / "b"), port=20001, token="t").write(place)
    supervisor = await opened()
    assert await supervisor.adopt() == ()
    shim = ROOT / "src" / "corral" / "worker" / "supervisor" / "shim.py"
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-I", "-S", str(shim), str(place), "2"], timeout=60, check=False
    )
    assert done.returncode == 0
    assert not touched.exists()
    with locked_if_ended(place) as empty:
        assert empty
    assert Identity.read(place) is None
