"""Blobs that should be here and are not: somebody emptied the folder, or another controller ordered them fetched.

A worker that asks for one is told to come back, and the file is brought back meanwhile, from where it came.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from corral.kit.errors import CorralError
from corral.kit.log import get_log

log = get_log(__name__)

_MOST = 1000  # digests remembered


class Missing:
    """`coming` is asked in the listener's threads; `run` does the rest in the loop."""

    name = "missing model files"

    def __init__(self, bring_back: Callable[[str], Awaitable[bool]], *, forget_after_s: float = 60.0) -> None:
        """`bring_back` fetches the blob of that digest; False when no model needs it. What failed, or is nobody's, is
        asked for again after a while."""
        self._bring_back = bring_back
        self._forget_after_s = forget_after_s
        self._loop = asyncio.get_running_loop()
        self._asked: asyncio.Queue[str] = asyncio.Queue()
        self._under_way: set[str] = set()
        self._hopeless: set[str] = set()

    def coming(self, digest: str) -> bool:
        """Whether it is worth asking again soon."""
        if digest in self._hopeless:
            return False
        if digest not in self._under_way:
            if len(self._under_way) >= _MOST:
                return False
            self._under_way.add(digest)
            try:
                self._loop.call_soon_threadsafe(self._asked.put_nowait, digest)
            except RuntimeError:  # the loop is over, and so are we
                return False
        return True

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                tasks.create_task(self._fetch(await self._asked.get()))

    async def _fetch(self, digest: str) -> None:
        try:
            came = await self._bring_back(digest)
        except CorralError as error:
            log.warning("a model file that was lost cannot be brought back", digest=digest, reason=error.message)
            came = False
        except Exception:
            log.exception("a model file that was lost cannot be brought back", digest=digest)
            came = False
        if not came:
            self._hopeless.add(digest)
            self._loop.call_later(self._forget_after_s, self._hopeless.discard, digest)
        self._under_way.discard(digest)
