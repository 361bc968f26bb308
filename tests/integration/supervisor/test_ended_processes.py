"""A backend that ends by itself is noticed at once and comes back, under another id."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from corral.kit.errors import Failed
from corral.worker.supervisor.readiness import StartFailed
from corral.worker.supervisor.states import NEVER, RestartPolicy
from corral.worker.supervisor.supervisor import Supervisor
from tests.support.processes import alive
from tests.support.supervising import get, identities, mock_grpc, tiny
from tests.support.waiting import promised, until

Open = Callable[..., Any]


async def test_a_backend_killed_behind_the_back_is_noticed_and_restarted(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    first = await supervisor.start(tiny(tmp_path / "b"))
    os.kill(first.pid, signal.SIGKILL)
    killed_at = time.monotonic()
    await until(lambda: supervisor.find(first.process_id) is None)
    assert time.monotonic() - killed_at < promised(1)
    await until(lambda: supervisor.find_key("m#0"))
    second = supervisor.find_key("m#0")
    assert second is not None
    assert second.process_id != first.process_id
    assert second.port != first.port, "a port that was just released rests"
    assert second.token != first.token
    (row,) = supervisor.list_processes()
    assert (row.state, row.restarts) == ("ready", 1)


async def test_a_stale_process_never_answers_a_start(supervisor: Supervisor, tmp_path: Path) -> None:
    """Seed 004: a dead process must not trap the controller; the next load gets a fresh one, without the back-off."""
    spec = tiny(tmp_path / "b", restart=RestartPolicy(first_s=3600, cap_s=3600))
    first = await supervisor.start(spec)
    os.kill(first.pid, signal.SIGKILL)
    await until(lambda: [row.state for row in supervisor.list_processes()] == ["restarting"])
    second = await supervisor.start(spec)
    assert second.process_id != first.process_id
    assert (await asyncio.to_thread(get, second.port))["pid"] == second.pid


async def test_a_start_right_after_the_kill_never_returns_the_dead_one(supervisor: Supervisor, tmp_path: Path) -> None:
    spec = tiny(tmp_path / "b")
    first = await supervisor.start(spec)
    os.kill(first.pid, signal.SIGKILL)
    await until(lambda: not alive(first.pid))
    assert (await supervisor.start(spec)).pid != first.pid


async def test_a_start_after_a_kill_waits_for_a_shim_that_has_not_noticed(
    opened: Open, folder: Path, tmp_path: Path
) -> None:
    """A busy machine may not let the shim run for a while: what it will say is known from the kernel."""
    supervisor = await opened(shim_timeout_s=4.0)
    spec = tiny(tmp_path / "b")
    first = await supervisor.start(spec)
    (identity,) = identities(folder)
    os.kill(identity.shim_pid, signal.SIGSTOP)
    try:
        os.kill(first.pid, signal.SIGKILL)
        await until(lambda: not alive(first.pid))
        assert supervisor.find_key("m#0") is None
        with pytest.raises(Failed, match="its shim does not report how"):
            await supervisor.start(spec)
        waiting = asyncio.create_task(supervisor.start(spec))
        await asyncio.sleep(0)
    finally:
        os.kill(identity.shim_pid, signal.SIGCONT)
    second = await waiting
    assert second.process_id != first.process_id
    assert (await asyncio.to_thread(get, second.port))["pid"] == second.pid


async def test_the_kill_of_the_shim_takes_the_backend_along(
    supervisor: Supervisor, folder: Path, tmp_path: Path
) -> None:
    """Nobody would watch it any more: it and its children go, and a fresh one comes."""
    first = await supervisor.start(tiny(tmp_path / "b", "children=1"))
    (identity,) = identities(folder)
    os.kill(identity.shim_pid, signal.SIGKILL)
    await until(lambda: not alive(first.pid))
    await until(lambda: supervisor.find_key("m#0") and supervisor.find_key("m#0") != first)
    (row,) = supervisor.list_processes()
    assert row.restarts == 1


async def test_without_a_policy_it_stays_away_and_says_why(supervisor: Supervisor, tmp_path: Path) -> None:
    spec = tiny(tmp_path / "b", "lines=1", restart=NEVER)
    first = await supervisor.start(spec)
    with pytest.raises(ConnectionError):
        await asyncio.to_thread(get, first.port, "/exit")
    await until(lambda: [row.state for row in supervisor.list_processes()] == ["failed"])
    (row,) = supervisor.list_processes()
    assert "tiny ended with code 7" in row.error
    assert "tiny line 1" in row.error
    assert supervisor.serving() == ()
    again = await supervisor.start(spec)
    assert again.process_id != first.process_id
    assert [row.state for row in supervisor.list_processes()] == ["ready"]


async def test_a_backend_that_cannot_come_back_is_given_up_after_some_tries(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    folder = tmp_path / "b"
    policy = RestartPolicy(first_s=0.01, cap_s=0.02, most=3)
    first = await supervisor.start(tiny(folder, restart=policy))
    (folder / "tiny.py").write_text("raise SystemExit('its files are broken')")
    os.kill(first.pid, signal.SIGKILL)
    await until(lambda: [row.state for row in supervisor.list_processes()] == ["failed"])
    (row,) = supervisor.list_processes()
    assert row.restarts == 3
    assert "its files are broken" in row.error


async def test_whoever_waits_for_a_restart_that_fails_is_told(supervisor: Supervisor, tmp_path: Path) -> None:
    folder = tmp_path / "b"
    spec = tiny(folder, restart=RestartPolicy(first_s=3600, cap_s=3600))
    first = await supervisor.start(spec)
    (folder / "tiny.py").write_text("raise SystemExit('its files are broken')")
    os.kill(first.pid, signal.SIGKILL)
    await until(lambda: [row.state for row in supervisor.list_processes()] == ["restarting"])
    with pytest.raises(StartFailed, match="its files are broken"):
        await supervisor.start(spec)


async def test_a_process_that_waits_for_its_restart_can_be_stopped(supervisor: Supervisor, tmp_path: Path) -> None:
    first = await supervisor.start(tiny(tmp_path / "b", restart=RestartPolicy(first_s=3600, cap_s=3600)))
    os.kill(first.pid, signal.SIGKILL)
    await until(lambda: [row.state for row in supervisor.list_processes()] == ["restarting"])
    (stopped,) = await supervisor.stop_key("m#0")
    assert stopped.terminated
    assert supervisor.list_processes() == ()


async def test_folders_of_ended_processes_do_not_pile_up(supervisor: Supervisor, folder: Path, tmp_path: Path) -> None:
    for _ in range(6):
        running = await supervisor.start(tiny(tmp_path / "b"))
        await supervisor.stop(running.process_id, force=True)
    assert len(os.listdir(folder)) == 4, "the last three, and one that ended since the last sweep"


async def test_one_that_is_killed_while_it_loads_says_that_memory_may_have_run_out(
    supervisor: Supervisor, folder: Path, tmp_path: Path
) -> None:
    starting = asyncio.create_task(supervisor.start(tiny(tmp_path / "b", "lines=2 silent=1", restart=NEVER)))
    await until(lambda: identities(folder))
    os.kill(identities(folder)[0].pid, signal.SIGKILL)
    with pytest.raises(StartFailed, match="was killed by SIGKILL, as the system does when memory runs out"):
        await starting


async def test_one_that_is_killed_within_load_model_says_so_too(supervisor: Supervisor, folder: Path) -> None:
    """Its connection breaks before its end is heard of; the end is what people have to know."""
    slow = mock_grpc(load='{"Model": "m"}', env={"MOCK_LOAD_DELAY_S": "60"}, restart=NEVER)
    starting = asyncio.create_task(supervisor.start(slow))
    (identity,) = await until(lambda: identities(folder))
    written = folder / identity.process_id / "log"
    await until(lambda: any(b"loading" in file.read_bytes() for file in written.glob("*")))
    os.kill(identity.pid, signal.SIGKILL)
    with pytest.raises(StartFailed, match=r"was killed by SIGKILL, .* while it loaded the model"):
        await starting
