"""Loops that survive errors, tasks by key, locks by name, and other asyncio tools."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Hashable
from functools import partial
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from corral.kit.clock import Clock
from corral.kit.errors import CorralError
from corral.kit.log import get_log
from corral.kit.retry import Backoff

log = get_log(__name__)
K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class Wake:
    """An edge that makes a level-triggered loop run sooner. Several wakes before a run count as one."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def set(self) -> None:
        self._event.set()

    async def wait(self, timeout_s: float) -> bool:
        """True if woken, False after `timeout_s`. In both cases the next run is due."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        woken = self._event.is_set()
        self._event.clear()
        return woken


class KeyedTasks(Generic[K]):
    """Background tasks, at most one per key. `async with` it: leaving the block cancels the running tasks. The work
    handles its own errors; an error that escapes cancels all other tasks."""

    def __init__(self) -> None:
        self._running: dict[K, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None

    async def __aenter__(self) -> Self:
        self._group = await asyncio.TaskGroup().__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        group, self._group = self._group, None
        for task in list(self._running.values()):
            task.cancel()
        if group is not None:
            await _leave(group, kind, error, trace)

    def start(self, key: K, work: Callable[[], Coroutine[Any, Any, None]], *, name: str) -> None:
        """Start the work, unless the key has a running task or the block has been left."""
        if self._group is not None and key not in self._running:
            task = self._running[key] = self._group.create_task(work(), name=name)
            task.add_done_callback(partial(self._on_done, key))

    def running(self) -> tuple[K, ...]:
        return tuple(self._running)

    def cancel(self, key: K) -> None:
        """Cancel the task; the key counts as running until the task has ended."""
        self._running[key].cancel()

    def _on_done(self, key: K, _task: asyncio.Task[None]) -> None:
        del self._running[key]


class BackgroundTasks:
    """Independent tasks without a result. `async with` it: leaving cancels the unfinished ones. An error of
    one is logged and ends only that one."""

    def __init__(self) -> None:
        self._group: asyncio.TaskGroup | None = None
        self._running: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._group = await asyncio.TaskGroup().__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        group, self._group = self._group, None
        for task in list(self._running):
            task.cancel()
        if group is not None:
            await _leave(group, kind, error, trace)

    def __len__(self) -> int:
        return len(self._running)

    def start(self, work: Coroutine[Any, Any, None], *, name: str) -> None:
        """Outside the `async with` block the work is dropped."""
        if self._group is None:
            work.close()
            return
        task = self._group.create_task(log_errors(work, name), name=name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(lambda _: work.close())  # a task cancelled before its first step never awaits the work


async def _leave(
    group: asyncio.TaskGroup,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
) -> None:
    """An error of the block comes out as it is: the group would wrap it."""
    if error is None or isinstance(error, asyncio.CancelledError):
        await group.__aexit__(kind, error, trace)
    else:
        await group.__aexit__(None, None, None)


async def log_errors(work: Coroutine[Any, Any, None], name: str) -> None:
    """Await the work; an error is logged and goes no further."""
    try:
        await work
    except CorralError as error:
        log.warning("background task failed", task=name, error=error.message, code=error.code)
    except Exception:
        log.exception("background task failed", task=name)


async def run_every(
    name: str,
    interval_s: float,
    step: Callable[[], Awaitable[None]],
    *,
    clock: Clock,
    wake: Wake | None = None,
    max_wait_s: float = 60.0,
) -> None:
    """Call `step` for ever. This is the one catch-all of a loop: it logs an error, backs off and continues. A lasting
    failure is logged when it begins and when it ends, not at every attempt."""
    # A loop that runs once an hour still tries again soon after a failure.
    backoff = Backoff(first_s=min(interval_s, 1.0), cap_s=max_wait_s)
    failing = ""
    while True:
        try:
            await step()
            backoff.reset()
            wait_s = interval_s
            if failing:
                log.info("loop works again", loop=name)
            failing = ""
        except CorralError as error:
            wait_s = backoff.next_s()
            log_line = log.debug if error.code == failing else log.warning
            failing = error.code
            log_line(
                "loop will try again",
                loop=name,
                error=error.message,
                code=error.code,
                wait_s=round(wait_s, 2),
            )
        except Exception:
            wait_s = backoff.next_s()
            failing = "unexpected"
            log.exception("loop failed and will try again", loop=name, wait_s=round(wait_s, 2))
        if wake is not None:
            await wake.wait(wait_s)
        else:
            await clock.sleep(wait_s)


def flatten_errors(error: BaseException) -> list[BaseException]:
    """The single errors inside a group."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in flatten_errors(inner)]
    return [error]


async def run_until(event: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """Run the work until it ends or the event is set: its result, or None when the event comes first. The work is then
    cancelled, and has ended when this returns."""
    if event.is_set():
        work.close()
        return None
    working = asyncio.ensure_future(work)
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        await _cancel_all(working, waiting)


@contextlib.asynccontextmanager
async def background(*loops: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run loops that handle their own errors while the block runs; they have ended when the block is left. An error of
    the block comes out as it is: a `TaskGroup` would wrap it."""
    running = [asyncio.ensure_future(loop) for loop in loops]
    try:
        yield
    finally:
        await _cancel_all(*running)


async def run_until_first_ends(*works: Coroutine[Any, Any, None]) -> None:
    """Run them at once, and cancel the others when the first one ends. Their errors are dropped: for both directions of
    a connection, which is useless when one of them has ended."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await _cancel_all(*tasks)


async def wait_readable(descriptor: int) -> None:
    """Wait until the descriptor has data, or its other end is closed."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(descriptor, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(descriptor)


async def _cancel_all(*tasks: asyncio.Future[Any]) -> None:
    unfinished = set(tasks)
    while unfinished:
        for task in unfinished:
            task.cancel()
        # Cancelled again after a while: `asyncio.wait_for` of Python 3.11, in some library, can swallow a cancellation.
        _, unfinished = await asyncio.wait(unfinished, timeout=1.0)
    await asyncio.gather(*tasks, return_exceptions=True)


class NameLocks:
    """Locks by name, for objects with several names: work that shares a name is serial, first come, first served; other
    work is parallel."""

    def __init__(self) -> None:
        self._queue: list[tuple[frozenset[str], asyncio.Event]] = []

    @contextlib.asynccontextmanager
    async def hold(self, names: frozenset[str]) -> AsyncIterator[None]:
        """Hold these names: other holders that share a name wait until the block ends."""
        place = (names, asyncio.Event())
        self._queue.append(place)
        try:
            self._admit()
            await place[1].wait()
            yield
        finally:
            self._queue.remove(place)
            self._admit()

    def _admit(self) -> None:
        """Admit every waiter that shares no name with one further ahead in the queue."""
        ahead: set[str] = set()
        for names, turn in self._queue:
            if ahead.isdisjoint(names):
                turn.set()
            ahead |= names
