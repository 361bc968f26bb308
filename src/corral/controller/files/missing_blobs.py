"""Fetches blobs again that should be here and are not: a user emptied the folder, or another controller fetched them.

A worker that requests such a blob is told to come back, and the file is fetched meanwhile from its source.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from corral.kit.errors import CorralError
from corral.kit.log import get_log

log = get_log(__name__)

MAX_PENDING = 1000  # digests remembered


class MissingBlobs:
    """`is_expected` is called in the listener's threads; `run` fetches in the event loop."""

    name = "missing model files"

    def __init__(self, refetch: Callable[[str], Awaitable[bool]], *, forget_after_s: float = 60.0) -> None:
        """`refetch` fetches the blob with that digest; False: no model needs it. After a failure the digest is refused
        for `forget_after_s`."""
        self._bring_back = refetch
        self._forget_after_s = forget_after_s
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[str] = asyncio.Queue()
        self._pending: set[str] = set()
        self._unavailable: set[str] = set()

    def is_expected(self, digest: str) -> bool:
        """Whether the worker should ask again soon."""
        if digest in self._unavailable:
            return False
        if digest not in self._pending:
            if len(self._pending) >= MAX_PENDING:
                return False
            self._pending.add(digest)
            try:
                self._loop.call_soon_threadsafe(self._queue.put_nowait, digest)
            except RuntimeError:  # the event loop has ended
                return False
        return True

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                tasks.create_task(self._fetch(await self._queue.get()))

    async def _fetch(self, digest: str) -> None:
        try:
            found = await self._bring_back(digest)
        except CorralError as error:
            log.warning("a lost model file cannot be fetched again", digest=digest, reason=error.message)
            found = False
        except Exception:
            log.exception("a lost model file cannot be fetched again", digest=digest)
            found = False
        if not found:
            self._unavailable.add(digest)
            self._loop.call_later(self._forget_after_s, self._unavailable.discard, digest)
        self._pending.discard(digest)
