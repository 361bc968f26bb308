"""Running another program as a step of our own work: with a deadline, with its last output kept, and never left behind.

A program runs in a process group of its own, and the whole group is killed when the caller stops waiting: a child that
keeps the pipe open would keep the caller waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from corral.kit.errors import Failed

MAX_LAST_LINES = 20
KILL_WAIT_S = 5.0
_PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PYENV_ROOT", "PYENV_VERSION")
_SECRET_PREFIXES = ("CORRAL_", "LOCALAI_")
_CHUNK_BYTES = 65536
_MAX_LINE = 500

# Runs the rest of its arguments as a program that the kernel kills when this process ends: after our own kill -9 no
# program may continue to write into a folder that the next start removes. (PR_SET_PDEATHSIG = 1; it survives exec.)
_KILLED_WITH_PARENT = """
import ctypes, os, signal, sys
parent = int(sys.argv[1])
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != parent: sys.exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True, slots=True)
class CapturedOutput:
    status: int
    stdout: str
    stderr: str


async def run_program(
    command: Sequence[str], *, env: Mapping[str, str], folder: Path, timeout_s: float, what: str
) -> None:
    """Run the program until it ends. Raises `Failed` with its last lines when it fails or takes longer than
    `timeout_s`. The program does not outlive this process."""
    if sys.platform.startswith("linux"):
        command = (sys.executable, "-I", "-S", "-c", _KILLED_WITH_PARENT, str(os.getpid()), *command)
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=dict(env),
        cwd=folder,
        start_new_session=True,
    )
    lines: deque[str] = deque(maxlen=MAX_LAST_LINES)
    try:
        async with asyncio.timeout(timeout_s):
            await _read_lines(process, lines)
            status = await process.wait()
    except TimeoutError as error:
        raise Failed(f"{what} took longer than {timeout_s:.0f} s; its last output: {_joined(lines)}") from error
    finally:
        await _kill_group(process)
    if status != 0:
        raise Failed(f"{what} failed ({status}): {_joined(lines)}")


async def capture_program(
    command: Sequence[str], *, env: Mapping[str, str], timeout_s: float, folder: Path | None = None, stdin: str = ""
) -> CapturedOutput:
    """Run the program and return its whole output and status. Raises `Failed` when it cannot be started or does not
    end within `timeout_s`."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=dict(env),
            cwd=folder,
            start_new_session=True,
        )
    except OSError as error:
        raise Failed(f"{command[0]} cannot be started: {error}") from error
    try:
        async with asyncio.timeout(timeout_s):
            out, err = await process.communicate(stdin.encode())
    except TimeoutError as error:
        raise Failed(f"{command[0]} did not end within {timeout_s:g} s") from error
    finally:
        await _kill_group(process)
    return CapturedOutput(process.returncode or 0, out.decode(errors="replace"), err.decode(errors="replace"))


def capture_blocking(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, timeout_s: float
) -> CapturedOutput:
    """The same for threads. Raises `OSError` or `subprocess.TimeoutExpired`."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=None if env is None else dict(env),
        start_new_session=True,
    )
    with process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return CapturedOutput(process.returncode, out.decode(errors="replace"), err.decode(errors="replace"))


def minimal_environment(env: Mapping[str, str], **more: str) -> dict[str, str]:
    """The variables that a tool needs to run: without our secrets, and without settings that would change its work."""
    return {name: env[name] for name in _PASSED_ON if name in env} | more


def environment_without_secrets(env: Mapping[str, str]) -> dict[str, str]:
    """All variables except our own: a package tool may be configured by any of the others."""
    return {key: value for key, value in env.items() if not key.startswith(_SECRET_PREFIXES)}


async def _kill_group(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_WAIT_S):
                await process.wait()


async def _read_lines(process: asyncio.subprocess.Process, lines: deque[str]) -> None:
    assert process.stdout is not None
    rest = b""
    while chunk := await process.stdout.read(_CHUNK_BYTES):
        *whole, rest = (rest + chunk).split(b"\n")
        rest = rest[-_CHUNK_BYTES:]
        lines.extend(line.decode(errors="replace").rstrip()[:_MAX_LINE] for line in whole)
    if rest:
        lines.append(rest.decode(errors="replace").rstrip()[:_MAX_LINE])


def _joined(lines: deque[str]) -> str:
    return "\n".join(line for line in lines if line) or "none"
