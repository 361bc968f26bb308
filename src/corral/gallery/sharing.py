"""Work that several ask for at once and one of them does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
T = TypeVar("T")


class SharedWork(Generic[Key, T]):
    """Who asks first works, the others wait for what comes of it. If the worker is cancelled, one who waits takes over:
    the work is never lost because of somebody who lost interest."""

    def __init__(self) -> None:
        self._running: dict[Key, asyncio.Future[T]] = {}

    async def do(self, key: Key, work: Callable[[], Awaitable[T]]) -> T:
        while (running := self._running.get(key)) is not None:
            await asyncio.wait([running])  # does not cancel it when we are cancelled
            if not running.cancelled():
                return running.result()
        return await self._work(key, work)

    async def _work(self, key: Key, work: Callable[[], Awaitable[T]]) -> T:
        outcome = self._running[key] = asyncio.get_running_loop().create_future()
        try:
            result = await work()
        except Exception as error:
            outcome.set_exception(error)
            outcome.exception()  # nobody else may be waiting, and then nobody would look at it
            raise
        else:
            outcome.set_result(result)
            return result
        finally:
            outcome.cancel()  # does nothing to what is done
            del self._running[key]
