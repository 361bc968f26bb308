"""A process is started once, answers under its own token, and says why when it cannot."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from corral.contract.manifest import Manifest, Ready
from corral.kit.errors import Conflict, Failed, Invalid, Unavailable
from corral.worker.supervisor import identity
from corral.worker.supervisor.ports import NoFreePort
from corral.worker.supervisor.readiness import StartFailed
from corral.worker.supervisor.spec import ProcessSpec
from corral.worker.supervisor.supervisor import Supervisor
from tests.support.processes import alive
from tests.support.supervising import get, identities, listens, tiny
from tests.support.waiting import until


async def test_a_process_is_ready_when_start_returns(supervisor: Supervisor, tmp_path: Path) -> None:
    running = await supervisor.start(tiny(tmp_path / "b", model="qwen#3", replica=1))
    assert running.key == "qwen#3#1"
    assert running.address == f"127.0.0.1:{running.port}"
    answer = await asyncio.to_thread(get, running.port)
    assert answer["pid"] == running.pid
    assert supervisor.find(running.process_id) == running
    (row,) = supervisor.list_processes()
    assert (row.state, row.model, row.replica, row.backend, row.restarts) == ("ready", "qwen#3", 1, "tiny", 0)


async def test_a_second_start_of_a_running_key_is_the_same_process(supervisor: Supervisor, tmp_path: Path) -> None:
    spec = tiny(tmp_path / "b")
    first = await supervisor.start(spec)
    assert await supervisor.start(spec) == first
    assert len(identities(tmp_path / "processes")) == 1


async def test_two_starts_of_one_key_race_and_share_one_process(supervisor: Supervisor, tmp_path: Path) -> None:
    spec = tiny(tmp_path / "b", "slow=2")
    started = await asyncio.gather(*(supervisor.start(spec) for _ in range(5)))
    assert len(set(started)) == 1
    assert len(identities(tmp_path / "processes")) == 1


async def test_a_start_that_is_given_up_by_its_caller_goes_on(supervisor: Supervisor, tmp_path: Path) -> None:
    spec = tiny(tmp_path / "b", "slow=3")
    impatient = asyncio.create_task(supervisor.start(spec))
    await asyncio.sleep(0)
    impatient.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await impatient
    assert (await supervisor.start(spec)).key == "m#0"
    assert len(identities(tmp_path / "processes")) == 1


async def test_another_backend_under_the_same_key_is_refused(supervisor: Supervisor, tmp_path: Path) -> None:
    await supervisor.start(tiny(tmp_path / "b", digest="sha256:old"))
    with pytest.raises(Conflict, match="sha256:old"):
        await supervisor.start(tiny(tmp_path / "b", digest="sha256:new"))


async def test_a_replacement_runs_beside_the_old_one(supervisor: Supervisor, tmp_path: Path) -> None:
    old = await supervisor.start(tiny(tmp_path / "b", digest="sha256:old"))
    new = await supervisor.start(tiny(tmp_path / "b", digest="sha256:new"), beside=True)
    assert old.port != new.port
    assert supervisor.find(old.process_id) == old
    assert supervisor.find_key("m#0") == new
    await supervisor.stop(old.process_id)
    assert supervisor.find_key("m#0") == new
    assert supervisor.find(old.process_id) is None


async def test_a_crash_at_start_shows_the_last_twenty_lines(supervisor: Supervisor, tmp_path: Path) -> None:
    with pytest.raises(StartFailed) as failed:
        await supervisor.start(tiny(tmp_path / "b", "lines=30 crash=9"))
    message = failed.value.message
    assert "tiny ended with code 9 while it started" in message
    assert "tiny line 30" in message
    assert "tiny line 11\n" in message
    assert "tiny line 10\n" not in message
    assert supervisor.list_processes() == ()


async def test_a_process_that_shows_no_progress_is_given_up(supervisor: Supervisor, tmp_path: Path) -> None:
    with pytest.raises(StartFailed, match=r"no sign of progress for 3 s.*\n?tiny line 1"):
        await supervisor.start(tiny(tmp_path / "b", "lines=1 silent=1", patience_s=3.0))
    (identity,) = identities(tmp_path / "processes")
    assert not alive(identity.pid)


async def test_output_counts_as_progress(supervisor: Supervisor, tmp_path: Path) -> None:
    running = await supervisor.start(tiny(tmp_path / "b", "slow=35", patience_s=3.0))
    assert running.pid


async def test_a_limit_in_all_counts_even_with_progress(supervisor: Supervisor, tmp_path: Path) -> None:
    with pytest.raises(StartFailed, match=r"not ready within 0\.5 s"):
        await supervisor.start(tiny(tmp_path / "b", "slow=100", start_timeout_s=0.5))


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (("no-such-program", "{port}"), "there is no no-such-program"),
        (("./run.sh", "{port}"), "there is no ./run.sh"),
        (("./broken", "{port}"), "could not be run: .*broken: No such file"),
    ],
)
async def test_a_command_that_is_not_there_is_told(
    supervisor: Supervisor, tmp_path: Path, command: tuple[str, ...], told: str
) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "broken").write_text("#!/no/such/interpreter\n")
    spec = ProcessSpec(
        backend="x", directory=str(tmp_path / "b"), manifest=Manifest(protocol="openai", command=command, ready=Ready())
    )
    with pytest.raises(Failed, match=told):
        await supervisor.start(spec)
    assert supervisor.list_processes() == ()


async def test_a_backend_whose_folder_is_gone_is_told(supervisor: Supervisor, tmp_path: Path) -> None:
    spec = tiny(tmp_path / "b")
    (tmp_path / "b" / "tiny.py").unlink()
    (tmp_path / "b").rmdir()
    with pytest.raises(Failed, match="not installed any more"):
        await supervisor.start(spec)


async def test_an_ordered_process_id_is_used_once(supervisor: Supervisor, tmp_path: Path) -> None:
    spec = tiny(tmp_path / "b", process_id="ordered-1")
    first = await supervisor.start(spec)
    assert first.process_id == "ordered-1"
    assert (await supervisor.start(spec)).process_id == "ordered-1"
    await supervisor.stop("ordered-1")
    again = await supervisor.start(spec)
    assert again.process_id not in ("", "ordered-1")
    assert supervisor.find("ordered-1") is None


async def test_a_process_id_that_leaves_the_folder_is_refused(supervisor: Supervisor, tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="cannot name a process"):
        await supervisor.start(tiny(tmp_path / "b", process_id="../../etc"))
    assert supervisor.list_processes() == ()


async def test_a_port_somebody_listens_on_is_passed_over(opened: Callable[..., Any], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        supervisor = await opened(ports=f"{port}-{port}")
        with pytest.raises(NoFreePort, match="no free gRPC port in range"):
            await supervisor.start(tiny(tmp_path / "b"))


async def test_another_program_on_the_port_is_not_taken_for_ours(supervisor: Supervisor, tmp_path: Path) -> None:
    """The backend never listens; somebody else, who came in between, answers every probe."""
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "impostor.py").write_text(
        "import os, sys, time\nopen(sys.argv[1], 'w').write(sys.argv[2])\ntime.sleep(3600)\n"
    )
    told = tmp_path / "port"
    manifest = Manifest(
        protocol="openai",
        command=(sys.executable, "-I", "-S", "impostor.py", str(told), "{port}"),
        ready=Ready(timeout_s=20.0),
    )

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    starting = asyncio.create_task(
        supervisor.start(ProcessSpec(backend="x", directory=str(tmp_path / "b"), manifest=manifest))
    )
    await until(lambda: told.exists() and told.read_text())
    async with await asyncio.start_server(answer, "127.0.0.1", int(told.read_text())):
        with pytest.raises(StartFailed, match="another program answers on port"):
            await starting


async def test_a_worker_that_may_not_look_at_a_backend_says_what_it_lacks(
    supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As root in a container without CAP_SYS_PTRACE, where the backend is another user."""

    def refuse(pid: int, inodes: set[str]) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(identity, "_holds", refuse)
    with pytest.raises(StartFailed, match=r"may not see which program answers on port \d+: .* SYS_PTRACE"):
        await supervisor.start(tiny(tmp_path / "b"))


async def test_nothing_is_started_once_the_worker_leaves(supervisor: Supervisor, tmp_path: Path) -> None:
    running = await supervisor.start(tiny(tmp_path / "b"))
    await supervisor.stop_all(closing=True)
    assert not listens(running.port)
    with pytest.raises(Unavailable, match="leaving"):
        await supervisor.start(tiny(tmp_path / "b"))
