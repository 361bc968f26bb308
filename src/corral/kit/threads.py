"""Blocking work in threads for asyncio callers that may be cancelled. A thread cannot be cancelled from outside, so the
work checks a `StopToken` often."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


class Stopped(Exception):
    """The caller was cancelled, so the work ended early."""


class StopToken:
    """Passed to the work. `check()` is cheap: call it for every file and every block."""

    def __init__(self) -> None:
        self._stopped = False

    def set(self) -> None:
        self._stopped = True

    def check(self) -> None:
        if self._stopped:
            raise Stopped


async def run_in_thread(work: Callable[[StopToken], T]) -> T:
    """Run `work` in a thread. When the caller is cancelled, the token is set and this function raises only after the
    work has ended: the caller may then remove the folder that the work was writing to."""
    stop = StopToken()
    running = asyncio.get_running_loop().run_in_executor(None, work, stop)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        stop.set()
        await wait_until_done(running)
        raise


async def run_uncancelled(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run short work in a thread; the work has ended when this function returns or raises, even if the caller was
    cancelled. (After a cancelled `asyncio.to_thread` the thread still writes while the caller goes on.)"""
    return await run_in_thread(lambda _stop: work(*args, **kwargs))


async def wait_until_done(work: asyncio.Future[T]) -> None:
    """Wait until work that was asked to stop has ended, and ignore its result and its error. A second cancellation of
    the caller does not end the wait; it is raised afterwards."""
    cancelled = False
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            cancelled = True
    if not work.cancelled():
        work.exception()  # retrieved, so that asyncio does not log it
    if cancelled:
        raise asyncio.CancelledError


async def in_daemon_thread(work: Callable[[], T], *, name: str = "daemon") -> T:
    """Run a blocking call that may hang. `asyncio.to_thread` would keep the process from ending while the call hangs; a
    daemon thread does not."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.done():  # the caller was cancelled
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as failure:  # the caller gets every kind of error
            error = failure
        with contextlib.suppress(RuntimeError):  # the loop was closed in the meantime: no caller is left
            loop.call_soon_threadsafe(settle, result, error)

    context = contextvars.copy_context()  # log lines of the thread carry the caller's fields
    threading.Thread(target=context.run, args=(run,), name=name, daemon=True).start()
    return await done
