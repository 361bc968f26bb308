"""Wait for a condition with a deadline, never a bare sleep. A slow machine is no failure, so deadlines are generous:
only what hangs reaches them. Where the promise itself is that something is quick, the deadline is `promised`.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar, overload

T = TypeVar("T")

DEADLINE_S = 30.0
NOT_YET = (AssertionError, OSError, LookupError, ValueError)


def promised(seconds: float) -> float:
    """What we promise about time holds on a machine with nothing else to do; a busy one gets longer as it is busier.
    The system tells late how busy it is, so other tests beside this one count in any case."""
    beside = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return seconds * max(1.0, beside, os.getloadavg()[0] / (os.cpu_count() or 1))


def wait_for(look: Callable[[], T], what: str = "such state", timeout_s: float = DEADLINE_S) -> T:
    """The first truthy answer. An exception counts as "not yet"; the last one is told when the time is over."""
    last: object = None
    for pause_s in _pauses(timeout_s, longest_s=0.1):  # often a request to another process, which takes from its time
        try:
            last = look()
            if last:
                return last
        except NOT_YET as error:
            last = error
        time.sleep(pause_s)
    raise _too_late(what, timeout_s, last)


@overload
async def until(look: Callable[[], Awaitable[T]], what: str = ..., timeout_s: float = ...) -> T: ...
@overload
async def until(look: Callable[[], T], what: str = ..., timeout_s: float = ...) -> T: ...
async def until(look: Callable[[], Any], what: str = "such state", timeout_s: float = DEADLINE_S) -> Any:
    """`wait_for` inside a running loop; what looks may be a coroutine function."""
    last: object = None
    for pause_s in _pauses(timeout_s, longest_s=0.01):
        try:
            last = look()
            if inspect.isawaitable(last):
                last = await last
            if last:
                return last
        except NOT_YET as error:
            last = error
        await asyncio.sleep(pause_s)
    raise _too_late(what, timeout_s, last)


def _pauses(timeout_s: float, *, longest_s: float) -> Iterator[float]:
    """How long to rest between looks: hardly at all at first; one more look after the time is over."""
    deadline = time.monotonic() + timeout_s
    pause_s = 0.002
    while time.monotonic() < deadline:
        yield pause_s
        pause_s = min(longest_s, pause_s * 1.5)
    yield 0.0


def _too_late(what: str, timeout_s: float, last: object) -> AssertionError:
    return AssertionError(f"no {what} within {timeout_s:g} s; last seen: {last!r}")
