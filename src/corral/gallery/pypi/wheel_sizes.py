"""The sizes of locked wheels that the package index does not state: users see them before they install."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import aiohttp
import msgspec

from corral.contract.sources import Wheel


class WheelSizes:
    """Queries the server of each file. An unknown size stays 0: nothing depends on it."""

    def __init__(self, session: aiohttp.ClientSession, *, at_once: int = 16, timeout_s: float = 20.0) -> None:
        self._session = session
        self._at_once = at_once
        self._timeout_s = timeout_s

    async def fill(self, wheels: Sequence[Wheel]) -> tuple[Wheel, ...]:
        turn = asyncio.Semaphore(self._at_once)
        sizes: dict[str, int] = {}

        async def query(wheel: Wheel) -> None:
            async with turn:
                sizes[wheel.name] = await self._size(wheel.url)

        try:
            async with asyncio.timeout(self._timeout_s), asyncio.TaskGroup() as tasks:
                for wheel in wheels:
                    if not wheel.size:
                        tasks.create_task(query(wheel))
        except TimeoutError:
            pass  # the sizes received so far are used
        return tuple(msgspec.structs.replace(each, size=each.size or sizes.get(each.name, 0)) for each in wheels)

    async def _size(self, url: str) -> int:
        try:
            async with self._session.head(url, allow_redirects=True) as answer:
                return answer.content_length or 0 if answer.status == 200 else 0
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return 0
