"""Two shapes of waiting that the worker needs: work until told to stop, and work beside other work."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def unless_set(event: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """The work's result, or None when the event comes first: the work is then cancelled and has ended."""
    if event.is_set():
        work.close()
        return None
    working = asyncio.ensure_future(work)
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        await _end(working, waiting)


@contextlib.asynccontextmanager
async def alongside(*loops: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run loops that answer their own errors while the block runs; they have ended when it is left. What the block
    raises comes out as it is: a `TaskGroup` would wrap it."""
    running = [asyncio.ensure_future(loop) for loop in loops]
    try:
        yield
    finally:
        await _end(*running)


async def _end(*tasks: asyncio.Future[Any]) -> None:
    unfinished = set(tasks)
    while unfinished:
        for task in unfinished:
            task.cancel()
        # Asked again after a while: `asyncio.wait_for` of Python 3.11, in some library, can swallow a cancellation.
        _, unfinished = await asyncio.wait(unfinished, timeout=1.0)
    await asyncio.gather(*tasks, return_exceptions=True)
