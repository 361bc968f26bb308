"""Stop: Free, SIGTERM, SIGKILL, all of it; ports rest only when the process is gone."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from corral.kit.errors import Conflict, NotFound
from corral.worker.supervisor.supervisor import Supervisor
from tests.support.processes import alive
from tests.support.supervising import identities, listens, mock_grpc, tiny
from tests.support.waiting import promised, until

Open = Callable[..., Any]


async def test_a_stopped_process_is_gone_when_stop_returns(
    supervisor: Supervisor, folder: Path, tmp_path: Path
) -> None:
    running = await supervisor.start(tiny(tmp_path / "b"))
    stopped = await supervisor.stop(running.process_id)
    assert (stopped.terminated, stopped.freed, stopped.error) == (True, False, "")
    assert stopped.address == running.address
    assert not alive(running.pid)
    assert not listens(running.port)
    assert supervisor.find(running.process_id) is None
    (identity,) = identities(folder)
    assert not psutil.pid_exists(identity.shim_pid), "no remains of the shim either"


async def test_an_unknown_process_is_told(supervisor: Supervisor) -> None:
    with pytest.raises(NotFound, match="no process nobody"):
        await supervisor.stop("nobody")
    assert await supervisor.stop_key("m#0") == []


async def test_stop_escalates_to_sigkill_and_kills_grandchildren(supervisor: Supervisor, tmp_path: Path) -> None:
    """One child in the backend's group, one in a session of its own; the backend ignores SIGTERM."""
    running = await supervisor.start(tiny(tmp_path / "b", "deaf=1 children=2"))
    family = [child.pid for child in psutil.Process(running.pid).children()]
    assert len(family) == 2
    began = time.monotonic()
    stopped = await supervisor.stop(running.process_id, grace_s=0.4)
    assert stopped.terminated
    assert 0.4 <= time.monotonic() - began < promised(5)
    assert not any(alive(pid) for pid in (running.pid, *family))


async def test_children_of_a_backend_that_goes_willingly_go_too(supervisor: Supervisor, tmp_path: Path) -> None:
    running = await supervisor.start(tiny(tmp_path / "b", "children=2"))
    family = [child.pid for child in psutil.Process(running.pid).children()]
    began = time.monotonic()
    await supervisor.stop(running.process_id, grace_s=30)
    assert time.monotonic() - began < 25, "nobody waits for the grace when all have gone"
    assert not any(alive(pid) for pid in (running.pid, *family))


async def test_children_of_a_backend_that_died_go_too(supervisor: Supervisor, tmp_path: Path) -> None:
    running = await supervisor.start(tiny(tmp_path / "b", "children=2"))
    family = [child.pid for child in psutil.Process(running.pid).children()]
    os.kill(running.pid, 9)
    await until(lambda: not any(alive(pid) for pid in family))


async def test_free_is_asked_first_and_bounded(opened: Open) -> None:
    supervisor = await opened(free_timeout_s=30.0)
    spec = mock_grpc(load=json.dumps({"Model": "m"}))
    running = await supervisor.start(spec)
    stopped = await supervisor.stop(running.process_id)
    assert (stopped.freed, stopped.terminated, stopped.error) == (True, True, "")

    supervisor = await opened(free_timeout_s=0.3)
    running = await supervisor.start(mock_grpc(load=json.dumps({"Model": "m", "Options": ["free_hangs:1"]})))
    began = time.monotonic()
    stopped = await supervisor.stop(running.process_id, grace_s=1)
    assert (stopped.freed, stopped.terminated) == (False, True)
    assert "DEADLINE_EXCEEDED" in stopped.error
    assert time.monotonic() - began < 25

    running = await supervisor.start(mock_grpc(load=json.dumps({"Model": "m", "Options": ["free_hangs:1"]})))
    stopped = await supervisor.stop(running.process_id, force=True)
    assert (stopped.freed, stopped.error) == (False, ""), "force leaves Free out"


async def test_a_process_that_starts_can_be_stopped(supervisor: Supervisor, folder: Path, tmp_path: Path) -> None:
    starting = asyncio.create_task(supervisor.start(tiny(tmp_path / "b", "silent=1", process_id="p")))
    await until(lambda: identities(folder))
    stopped = await supervisor.stop("p")
    assert stopped.terminated
    with pytest.raises(Conflict, match="stopped while it started"):
        await starting
    (identity,) = identities(folder)
    assert not alive(identity.pid)


async def test_a_stop_at_any_moment_of_a_start_leaves_nothing(
    supervisor: Supervisor, folder: Path, tmp_path: Path
) -> None:
    for moment in range(12):
        starting = asyncio.create_task(supervisor.start(tiny(tmp_path / "b")))
        for _ in range(moment):
            await asyncio.sleep(0.01)
        await supervisor.stop_all()
        if not (await asyncio.gather(starting, return_exceptions=True))[0]:
            pytest.fail("a start must end in a process or an error")
        await supervisor.stop_all()
        assert supervisor.list_processes() == ()
        assert not any(alive(identity.pid) or alive(identity.shim_pid) for identity in identities(folder))


async def test_a_process_that_will_not_go_keeps_its_row_and_its_port_and_serves_nobody(
    opened: Open, folder: Path, tmp_path: Path
) -> None:
    """Its shim is stopped by SIGSTOP, so that no signal gets through: to us, as good as stuck in the kernel."""
    supervisor = await opened(kill_wait_s=0.3)
    running = await supervisor.start(tiny(tmp_path / "b"))
    (identity,) = identities(folder)
    os.kill(identity.shim_pid, signal.SIGSTOP)
    try:
        for _ in range(2):
            stopped = await supervisor.stop(running.process_id, grace_s=0.1)
            assert not stopped.terminated
            assert "still runs" in stopped.error
        assert supervisor.find(running.process_id) is None
        assert [row.state for row in supervisor.list_processes()] == ["stopping"]
        with pytest.raises(Conflict, match="still stopping"):
            await supervisor.start(tiny(tmp_path / "b"))
    finally:
        os.kill(identity.shim_pid, signal.SIGCONT)
    await until(lambda: supervisor.list_processes() == ())
    assert not alive(running.pid)
    assert (await supervisor.start(tiny(tmp_path / "b"))).port != running.port


async def test_two_stops_share_one_end(supervisor: Supervisor, tmp_path: Path) -> None:
    running = await supervisor.start(tiny(tmp_path / "b", "deaf=1"))
    first, second = await asyncio.gather(
        supervisor.stop(running.process_id, grace_s=0.2), supervisor.stop(running.process_id, grace_s=0.2)
    )
    assert first == second
    assert first.terminated


async def test_the_key_of_a_process_that_is_stopping_cannot_be_started(supervisor: Supervisor, tmp_path: Path) -> None:
    running = await supervisor.start(tiny(tmp_path / "b", "deaf=1"))
    stopping = asyncio.create_task(supervisor.stop(running.process_id, grace_s=0.5))
    await asyncio.sleep(0)
    assert supervisor.find(running.process_id) is None, "nothing is relayed to it any more"
    assert [row.state for row in supervisor.list_processes()] == ["stopping"]
    with pytest.raises(Conflict, match="still stopping"):
        await supervisor.start(tiny(tmp_path / "b"))
    assert (await stopping).terminated


async def test_stop_by_name_means_what_the_contract_says(supervisor: Supervisor, tmp_path: Path) -> None:
    started = [
        await supervisor.start(tiny(tmp_path / "b", model="qwen", replica=0)),
        await supervisor.start(tiny(tmp_path / "b", model="qwen", replica=1)),
        await supervisor.start(tiny(tmp_path / "b", model="llama", backend="other")),
    ]
    assert [each.key for each in await supervisor.stop_named("qwen#1")] == ["qwen#1"]
    assert [each.key for each in await supervisor.stop_named("qwen")] == ["qwen#0"]
    assert await supervisor.stop_named("qwen") == []
    assert [each.key for each in await supervisor.stop_named("alias", {"other"})] == ["llama#0"]
    assert not any(alive(running.pid) for running in started)


async def test_stop_all_is_over_a_snapshot_and_at_once(supervisor: Supervisor, folder: Path, tmp_path: Path) -> None:
    for replica in range(4):
        await supervisor.start(tiny(tmp_path / "b", "deaf=1", replica=replica))
    began = time.monotonic()
    stopped = await supervisor.stop_all(grace_s=2.0)
    assert time.monotonic() - began < 7.9, "one after the other would take eight seconds"
    assert sorted(each.key for each in stopped) == ["m#0", "m#1", "m#2", "m#3"]
    assert not any(alive(identity.pid) for identity in identities(folder))


async def test_a_released_port_rests_and_then_returns_to_its_key(opened: Open, tmp_path: Path) -> None:
    supervisor = await opened(port_rest_s=4.0, ports="25050-25059")
    first = await supervisor.start(tiny(tmp_path / "b"))
    await supervisor.stop(first.process_id)
    released_at = time.monotonic()
    second = await supervisor.start(tiny(tmp_path / "b"))
    assert second.port != first.port
    other = await supervisor.start(tiny(tmp_path / "b", model="other"))
    await supervisor.stop(second.process_id)
    await until(lambda: time.monotonic() - released_at > 4.2)
    third = await supervisor.start(tiny(tmp_path / "b"))
    assert third.port in (first.port, second.port)
    assert other.port not in (first.port, second.port)


async def test_starting_and_stopping_leaks_nothing(supervisor: Supervisor, tmp_path: Path) -> None:
    async def once() -> None:
        running = await supervisor.start(tiny(tmp_path / "b"))
        await supervisor.stop(running.process_id, force=True)

    await once()
    await asyncio.sleep(0)
    files, tasks = len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())
    for _ in range(8):
        await once()
    await until(lambda: len(os.listdir("/proc/self/fd")) <= files and len(asyncio.all_tasks()) <= tasks)
    assert not [child for child in psutil.Process().children() if child.status() == psutil.STATUS_ZOMBIE]
