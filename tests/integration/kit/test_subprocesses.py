"""Programs started as a step of our own work: their output, their deadline, and that none is left behind."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from corral.kit.errors import Failed
from corral.kit.subprocesses import (
    capture_blocking,
    capture_program,
    environment_without_secrets,
    minimal_environment,
    run_program,
)
from tests.support.waiting import until

SLEEP = "import time; time.sleep(60)"
WITH_A_CHILD = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
with open(sys.argv[2] + ".new", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.rename(sys.argv[2] + ".new", sys.argv[2])
time.sleep(60)
"""


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_a_program_that_fails_is_reported_with_its_last_lines(tmp_path: Path) -> None:
    words = (sys.executable, "-c", "print('first'); raise SystemExit('last')")
    with pytest.raises(Failed, match=r"^the step failed \(1\): first\nlast$"):
        await run_program(words, env=os.environ, folder=tmp_path, timeout_s=60, what="the step")


async def test_output_and_status_are_captured(tmp_path: Path) -> None:
    words = (sys.executable, "-c", "import sys; print(input()); sys.stderr.write('no'); sys.exit(3)")
    ran = await capture_program(words, env=os.environ, folder=tmp_path, timeout_s=60, stdin="yes")
    assert (ran.status, ran.stdout, ran.stderr) == (3, "yes\n", "no")


async def test_a_program_that_hangs_is_killed(tmp_path: Path) -> None:
    words = (sys.executable, "-c", SLEEP)
    with pytest.raises(Failed, match="did not end"):
        await capture_program(words, env=os.environ, folder=tmp_path, timeout_s=0.2)
    with pytest.raises(Failed, match="the step took longer than 0 s; its last output: none"):
        await run_program(words, env=os.environ, folder=tmp_path, timeout_s=0.2, what="the step")
    with pytest.raises(subprocess.TimeoutExpired):
        await asyncio.to_thread(capture_blocking, words, timeout_s=0.2)


async def test_a_program_is_killed_with_its_children_when_the_caller_is_cancelled(tmp_path: Path) -> None:
    reported = tmp_path / "pids"
    words = [sys.executable, "-c", WITH_A_CHILD, SLEEP, str(reported)]
    waiting = asyncio.create_task(capture_program(words, env=os.environ, folder=tmp_path, timeout_s=60))
    await until(reported.exists)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    pids = [int(pid) for pid in reported.read_text().split()]
    await until(lambda: not any(_is_running(pid) for pid in pids))


async def test_a_program_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(Failed, match="cannot be started"):
        await capture_program(["/nonexistent"], env={}, folder=tmp_path, timeout_s=1)


def test_programs_receive_none_of_our_secrets() -> None:
    env = {"PATH": "/bin", "UV_DEFAULT_INDEX": "x", "CORRAL_ADMIN_KEY": "s", "LOCALAI_REGISTRATION_TOKEN": "s"}
    assert environment_without_secrets(env) == {"PATH": "/bin", "UV_DEFAULT_INDEX": "x"}
    assert minimal_environment(env, LC_ALL="C") == {"PATH": "/bin", "LC_ALL": "C"}
