"""Wait for a condition with a deadline, in tests that talk to real processes. Never a bare sleep."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


async def until(condition: Callable[[], object], deadline_s: float = 20.0) -> None:
    async with asyncio.timeout(deadline_s):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in another process
            await asyncio.sleep(0.01)


def wait_until(condition: Callable[[], object], deadline_s: float = 20.0) -> None:
    """The same where no loop runs."""
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {deadline_s} s")
        time.sleep(0.01)
