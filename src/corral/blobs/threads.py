"""Blocking work that can be given up: a thread cannot be cancelled, so it asks often whether somebody still waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


class Stopped(Exception):
    """Nobody waits for this work any more."""


class Stop:
    """Handed to the work. `check()` is cheap: call it for every file and every block."""

    def __init__(self) -> None:
        self._stopped = False

    def set(self) -> None:
        self._stopped = True

    def check(self) -> None:
        if self._stopped:
            raise Stopped


async def in_thread(work: Callable[[Stop], T]) -> T:
    """Run `work` in a thread. When the waiter is cancelled the work is told, and has ended when this raises: what
    follows may remove the folder it was writing to."""
    stop = Stop()
    running = asyncio.get_running_loop().run_in_executor(None, work, stop)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        stop.set()
        await until_done(running)
        raise


async def to_the_end(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Short work in a thread that is over when this returns or raises, cancelled or not. (With `asyncio.to_thread`
    a cancelled waiter goes on while the thread still writes.)"""
    return await in_thread(lambda _stop: work(*args, **kwargs))


async def until_done(work: asyncio.Future[T]) -> None:
    """Wait for the end of something that was told to end, whatever it ends with. A second cancel does not cut it
    short; whoever cancelled is told once it is over."""
    cancelled = False
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            cancelled = True
    if not work.cancelled():
        work.exception()  # seen: it was told to end, and how it ended interests nobody
    if cancelled:
        raise asyncio.CancelledError
