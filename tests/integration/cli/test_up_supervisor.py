"""The supervisor with real child processes: restarts, order of stopping, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from corral.cli.up.children import ChildSpec
from corral.cli.up.supervisor import Supervisor, Timing
from corral.kit.clock import SystemClock
from tests.support.processes import alive
from tests.support.waiting import until, wait_for

QUICK = Timing(restart_first_s=0.02, restart_cap_s=0.1, steady_after_s=300.0)  # nobody is steady by being slow
ENV = {"PATH": os.environ["PATH"]}
# Says when it starts, and when it is asked to stop.
POLITE = """
import signal, sys, time
def leave(*_):
    open(sys.argv[1], "a").write("stopped " + sys.argv[2] + "\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
open(sys.argv[1], "a").write("started " + sys.argv[2] + "\\n")
print("hello from", sys.argv[2], flush=True)
time.sleep(600)
"""
STUBBORN = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1], "a").write("started " + sys.argv[2] + "\\n")
time.sleep(600)
"""


def child(name: str, program: str, journal: Path, *, stop_timeout_s: float = 10.0) -> ChildSpec:
    return ChildSpec(name, (sys.executable, "-I", "-c", program, str(journal), name), ENV, stop_timeout_s)


def lines_of(journal: Path) -> list[str]:
    return journal.read_text().splitlines() if journal.exists() else []


def make(tmp_path: Path, reported: list[str], **more: object) -> Supervisor:
    given: dict[str, Any] = {"timing": QUICK} | more
    return Supervisor(tmp_path, clock=SystemClock(), report=reported.append, **given)


async def test_a_killed_child_is_started_again_and_the_others_are_left_alone(tmp_path: Path) -> None:
    journal, reported = tmp_path / "journal", list[str]()
    async with make(tmp_path, reported) as supervisor:
        one = supervisor.start(child("one", POLITE, journal))
        two = supervisor.start(child("two", POLITE, journal))
        await until(lambda: sorted(lines_of(journal)) == ["started one", "started two"])
        first, untouched = one.pid, two.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(lambda: lines_of(journal).count("started one") == 2)
        assert one.pid != first
        assert two.pid == untouched
        assert two.starts == 1
    assert any("one ended (killed by SIGKILL)" in line for line in reported)


async def test_children_stop_in_the_given_order_each_before_the_next(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    async with make(tmp_path, [], stop_order=("worker", "gateway", "controller", "bus")) as supervisor:
        for name in ("bus", "controller", "gateway", "worker"):
            supervisor.start(child(name, POLITE, journal))
        await until(lambda: len(lines_of(journal)) == 4)
    assert lines_of(journal)[4:] == ["stopped worker", "stopped gateway", "stopped controller", "stopped bus"]


async def test_one_that_does_not_stop_in_time_is_killed_and_that_is_told(tmp_path: Path) -> None:
    journal, reported = tmp_path / "journal", list[str]()
    async with make(tmp_path, reported) as supervisor:
        one = supervisor.start(child("stubborn", STUBBORN, journal, stop_timeout_s=0.2))
        await until(lambda: lines_of(journal))
        pid = one.pid
        assert pid is not None
    assert reported == ["stubborn did not stop within 0.2 s; killing it"]
    assert not psutil.pid_exists(pid)


async def test_hurry_ends_everybody_at_once(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    async with make(tmp_path, []) as supervisor:
        one = supervisor.start(child("stubborn", STUBBORN, journal, stop_timeout_s=600.0))
        await until(lambda: lines_of(journal))
        pid = one.pid
        assert pid is not None
        began = time.monotonic()
        supervisor.kill()
    assert time.monotonic() - began < 60
    assert not psutil.pid_exists(pid)


async def test_a_child_that_keeps_ending_is_tried_less_and_less_often_and_its_last_words_are_told(
    tmp_path: Path,
) -> None:
    reported: list[str] = []
    dying = ChildSpec("dying", (sys.executable, "-I", "-c", "raise SystemExit('the sky fell')"), ENV, 1.0)
    async with make(tmp_path, reported) as supervisor:
        one = supervisor.start(dying)
        await until(lambda: one.failed_starts >= 4)
    assert "  the sky fell" in reported
    waits = [float(line.rpartition("in ")[2].removesuffix(" s")) for line in reported if "restarting" in line]
    assert waits[0] < waits[3]
    assert "the sky fell" in (tmp_path / "dying.log").read_text()


async def test_a_steady_run_forgives_earlier_ends(tmp_path: Path) -> None:
    # Ends at once twice, then runs longer than `steady_after_s`, then ends again.
    program = """
import sys, time
with open(sys.argv[1], "a+") as journal:
    journal.seek(0)
    count = len(journal.readlines())
    journal.write("started\\n")
if count == 2:
    time.sleep(0.8)
if count > 2:
    time.sleep(600)
"""
    journal = tmp_path / "journal"
    async with make(tmp_path, [], timing=replace(QUICK, steady_after_s=0.5)) as supervisor:
        one = supervisor.start(child("moody", program, journal))
        await until(lambda: len(lines_of(journal)) == 4)
        assert one.failed_starts == 0
        one.kill()


async def test_a_command_that_does_not_exist_is_told_like_any_other_end(tmp_path: Path) -> None:
    reported: list[str] = []
    async with make(tmp_path, reported) as supervisor:
        one = supervisor.start(ChildSpec("ghost", ("/no/such/program",), ENV, 1.0))
        await until(lambda: one.failed_starts >= 3)
    assert any("cannot start /no/such/program: No such file or directory" in line for line in reported)


async def test_a_grandchild_that_holds_the_pipe_does_not_hide_the_childs_end(tmp_path: Path) -> None:
    program = """
import subprocess, sys
kept = subprocess.Popen([sys.executable, "-I", "-c", "import time; time.sleep(600)"], start_new_session=True)
open(sys.argv[1], "a").write(str(kept.pid) + "\\n")
"""
    journal = tmp_path / "journal"
    async with make(tmp_path, []) as supervisor:
        one = supervisor.start(child("parent", program, journal))
        await until(lambda: one.failed_starts >= 2)
        one.kill()
    for pid in lines_of(journal):
        os.kill(int(pid), signal.SIGKILL)


async def test_a_stop_while_waiting_to_start_again_is_heard_at_once(tmp_path: Path) -> None:
    slow = Timing(restart_first_s=300.0, restart_cap_s=300.0)
    supervisor = Supervisor(tmp_path, clock=SystemClock(), report=lambda _: None, timing=slow)
    async with asyncio.timeout(60), supervisor:
        one = supervisor.start(ChildSpec("brief", (sys.executable, "-I", "-c", ""), ENV, 1.0))
        await until(lambda: one.failed_starts == 1)


SUPERVISOR = """
import asyncio, os, sys
from pathlib import Path
from corral.cli.up.children import ChildSpec
from corral.cli.up.supervisor import Supervisor, Timing
from corral.kit.clock import SystemClock

async def main():
    supervisor = Supervisor(Path(sys.argv[1]), clock=SystemClock(), report=print, timing=Timing())
    async with supervisor:
        for name in ("one", "two"):
            supervisor.start(ChildSpec(name, ("sleep", "600"), dict(os.environ), 5.0))
        while not all(child.pid for child in supervisor.children.values()):
            await asyncio.sleep(0.01)
        print(*(child.pid for child in supervisor.children.values()), flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends children with their parent")
def test_none_is_left_behind_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    supervisor = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    try:
        assert supervisor.stdout is not None
        line = supervisor.stdout.readline()
        children = [int(pid) for pid in line.split()]
        assert len(children) == 2
        # They must have become `sleep`: then the death signal is known to have survived the exec.
        wait_for(lambda: all(psutil.Process(pid).name() == "sleep" for pid in children))
        supervisor.send_signal(signal.SIGKILL)
        wait_for(lambda: not any(alive(pid) for pid in children))
    finally:
        supervisor.kill()
        supervisor.communicate()


def test_the_guard_refuses_to_outlive_a_parent_that_is_already_gone(tmp_path: Path) -> None:
    guard = Path(__file__).parents[3] / "src" / "corral" / "cli" / "up" / "guard.py"
    mark = tmp_path / "mark"
    stranger = os.getppid()  # alive, but not the guard's parent
    done = subprocess.run([sys.executable, "-I", "-S", guard, str(stranger), "touch", str(mark)], timeout=60)
    assert done.returncode == 1
    assert not mark.exists()


def test_the_guard_gives_its_command_ordinary_signals(tmp_path: Path) -> None:
    guard = Path(__file__).parents[3] / "src" / "corral" / "cli" / "up" / "guard.py"
    ask = "import signal; print(signal.getsignal(signal.SIGHUP) is signal.SIG_DFL)"
    done = subprocess.run(
        [sys.executable, "-I", "-S", guard, str(os.getpid()), sys.executable, "-I", "-c", ask],
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    assert done.stdout == "True\n"


async def test_a_restart_is_in_order_and_no_crash(tmp_path: Path) -> None:
    journal, reported = tmp_path / "journal", list[str]()
    async with make(tmp_path, reported) as supervisor:
        one = supervisor.start(child("one", POLITE, journal))
        await until(lambda: lines_of(journal) == ["started one"])
        one.restart()
        await until(lambda: lines_of(journal) == ["started one", "stopped one", "started one"])
        assert (one.failed_starts, reported) == (0, [])


async def test_a_restart_ends_the_wait_of_one_that_crashed(tmp_path: Path) -> None:
    slow = Timing(restart_first_s=300.0, restart_cap_s=300.0)
    supervisor = Supervisor(tmp_path, clock=SystemClock(), report=lambda _: None, timing=slow)
    async with asyncio.timeout(60), supervisor:
        one = supervisor.start(ChildSpec("brief", (sys.executable, "-I", "-c", ""), ENV, 1.0))
        await until(lambda: one.failed_starts == 1)
        one.restart()
        await until(lambda: one.starts == 2)


# Reports that it is ready, and serves the socket it was handed. Told to stop, it ends when its last client has gone.
SERVER = """
import os, signal, socket, sys
assert os.environ["LISTEN_PID"] == str(os.getpid()), os.environ["LISTEN_PID"]
assert (os.environ["LISTEN_FDS"], os.environ["LISTEN_FDNAMES"]) == ("1", "server")
listener = socket.socket(fileno=3)
os.write(int(os.environ["CORRAL_INTERNAL_READY_FD"]), b"\\n")
signal.signal(signal.SIGTERM, lambda *_: listener.close())
while True:
    try:
        client, _ = listener.accept()
    except OSError:
        sys.exit(0)
    client.sendall(str(os.getpid()).encode())
    if client.recv(1) == b"k":
        listener.close()
        client.recv(1)
        sys.exit(0)
"""


def server(listener: socket.socket) -> ChildSpec:
    return ChildSpec("server", (sys.executable, "-I", "-c", SERVER), ENV, 60.0, (listener,))


def answer_of(port: int) -> int:
    """The process id of the one that accepts."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.settimeout(60)
        return int(client.recv(16))


async def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    await until(lambda: not alive(pid))


async def test_a_child_that_was_ready_is_started_again_at_once_however_often_it_is_killed(tmp_path: Path) -> None:
    reported: list[str] = []
    slow = Timing(restart_first_s=300.0, restart_cap_s=300.0, steady_after_s=300.0, restart_every_s=0.01)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        async with make(tmp_path, reported, timing=slow) as supervisor:
            one = supervisor.start(server(listener))
            for _ in range(10):
                pid = await asyncio.to_thread(answer_of, port)
                assert pid == one.pid
                await kill(pid)
                assert await asyncio.to_thread(answer_of, port) != pid  # it waited, and was not refused
            assert (one.starts, one.failed_starts) == (11, 0)
    assert reported == ["server ended (killed by SIGKILL); restarting now"] * 10


async def test_a_restart_with_sockets_starts_the_successor_before_the_old_one_has_ended(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        async with make(tmp_path, []) as supervisor:
            one = supervisor.start(server(listener))
            with await asyncio.to_thread(socket.create_connection, ("127.0.0.1", port), 60) as kept:
                old = int(await asyncio.to_thread(kept.recv, 16))
                kept.sendall(b"k")  # from here on it serves this client alone
                one.restart()
                successor = await asyncio.to_thread(answer_of, port)
                assert successor != old
                assert psutil.pid_exists(old)
            await until(lambda: not alive(old))
            assert one.pid == successor
            one.stop()
            await until(lambda: not alive(successor))
            with pytest.raises(ConnectionRefusedError):
                answer_of(port)


async def test_a_stop_waits_for_the_one_that_still_drains(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        async with make(tmp_path, []) as supervisor:
            one = supervisor.start(server(listener))
            kept = await asyncio.to_thread(socket.create_connection, ("127.0.0.1", port), 60)
            old = int(await asyncio.to_thread(kept.recv, 16))
            kept.sendall(b"k")
            one.restart()
            successor = await asyncio.to_thread(answer_of, port)
            one.kill()
            kept.close()
        assert not alive(old)
        assert not alive(successor)
