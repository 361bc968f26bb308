"""Running somebody else's program: with a deadline, and never left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from corral.kit.errors import Failed

_SECRET_PREFIXES = ("CORRAL_", "LOCALAI_")


@dataclass(frozen=True, slots=True)
class Ran:
    status: int
    stdout: str
    stderr: str


async def run_tool(
    words: Sequence[str], *, env: Mapping[str, str], folder: Path, timeout_s: float, stdin: str = ""
) -> Ran:
    """Raises Failed if it cannot be started or does not end. Its whole group is killed if we do not wait for it."""
    try:
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=dict(env),
            cwd=folder,
            start_new_session=True,
        )
    except OSError as error:
        raise Failed(f"{words[0]} cannot be started: {error}") from error
    try:
        async with asyncio.timeout(timeout_s):
            out, err = await process.communicate(stdin.encode())
    except TimeoutError as error:
        raise Failed(f"{words[0]} did not end within {timeout_s:g} s") from error
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    return Ran(process.returncode or 0, out.decode(errors="replace"), err.decode(errors="replace"))


def tool_environment(env: Mapping[str, str]) -> dict[str, str]:
    """A package tool is told everything it may be configured by, and none of our secrets."""
    return {key: value for key, value in env.items() if not key.startswith(_SECRET_PREFIXES)}
