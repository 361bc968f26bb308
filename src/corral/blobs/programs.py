"""Running somebody else's program as a step of ours: bounded, its last words kept, gone when we are."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from corral.kit.errors import Failed

LAST_LINES = 20
END_S = 5.0
PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PYENV_ROOT", "PYENV_VERSION")

# Runs the rest of its arguments as a program that dies with us: after a kill -9 nobody must go on writing into a folder
# that the next start sweeps away. (PR_SET_PDEATHSIG = 1; it survives exec.)
_TIED = """
import ctypes, os, signal, sys
parent = int(sys.argv[1])
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != parent: sys.exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


async def run_program(
    command: Sequence[str], *, env: Mapping[str, str], folder: Path, timeout_s: float, what: str
) -> None:
    """Wait for its end. Raises Failed with its last lines. Cancelled or too slow: it and its children are killed."""
    if sys.platform.startswith("linux"):
        command = (sys.executable, "-I", "-S", "-c", _TIED, str(os.getpid()), *command)
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=dict(env),
        cwd=folder,
        start_new_session=True,
    )
    said: deque[str] = deque(maxlen=LAST_LINES)
    try:
        async with asyncio.timeout(timeout_s):
            await _listen(process, said)
            status = await process.wait()
    except TimeoutError as error:
        raise Failed(f"{what} took longer than {timeout_s:.0f} s; it said last: {_last(said)}") from error
    finally:
        await _end(process)
    if status != 0:
        raise Failed(f"{what} failed ({status}): {_last(said)}")


async def ask_program(
    command: Sequence[str], question: str, *, env: Mapping[str, str], timeout_s: float
) -> bytes | None:
    """What it prints when it is given one line. None where it is not there, fails, or does not answer in time."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=dict(env),
            start_new_session=True,
        )
    except OSError:
        return None
    try:
        async with asyncio.timeout(timeout_s):
            out, _ = await process.communicate(question.encode())
    except TimeoutError:
        return None
    finally:
        await _end(process)
    return out if process.returncode == 0 else None


async def _end(process: asyncio.subprocess.Process) -> None:
    """It and whatever it started: a child that keeps the pipe open would keep us waiting."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await process.wait()


def plain_environment(env: Mapping[str, str], **more: str) -> dict[str, str]:
    """What a tool needs to run; no secret of ours, and no setting of somebody's shell that would change its doings."""
    return {name: env[name] for name in PASSED_ON if name in env} | more


async def _listen(process: asyncio.subprocess.Process, said: deque[str]) -> None:
    assert process.stdout is not None
    rest = b""
    while piece := await process.stdout.read(65536):
        *lines, rest = (rest + piece).split(b"\n")
        rest = rest[-65536:]
        said.extend(line.decode(errors="replace").rstrip()[:500] for line in lines)
    if rest:
        said.append(rest.decode(errors="replace").rstrip()[:500])


def _last(said: deque[str]) -> str:
    return "\n".join(line for line in said if line) or "nothing"
