"""Opens the database, waiting for it where it starts later than the controller, and hides its errors from strangers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

from corral.kit.errors import CorralError, Unavailable
from corral.kit.log import get_log
from corral.kit.retry import Backoff
from corral.store import Store, open_store

log = get_log(__name__)


@contextlib.asynccontextmanager
async def open_store_when_there(
    url: str, stopped: asyncio.Event, *, first_s: float = 0.5, cap_s: float = 5.0
) -> AsyncIterator[Store | None]:
    """The store, or None when we were told to stop before it could be opened. What waiting cannot cure is raised."""
    backoff = Backoff(first_s, cap_s)
    async with contextlib.AsyncExitStack() as stack:
        store = None
        while store is None and not stopped.is_set():
            try:
                store = await stack.enter_async_context(open_store(url))
            except Unavailable as error:
                wait_s = backoff.next_s()
                log.warning("waiting for the database", error=error.message, wait_s=round(wait_s, 1))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await stopped.wait()
        yield store


@contextlib.contextmanager
def hide_database_errors() -> Iterator[None]:
    """A database error names hosts, users and files: a caller that has not shown a key only learns that the database is
    unavailable."""
    try:
        yield
    except Unavailable as error:
        log.debug("database away", error=error.message)  # the loops that need it say so louder, once
        raise Unavailable("the database cannot be used right now; try again shortly") from error


class Readiness:
    """Whether this controller can work. Without the bus it can: nodes report over HTTP, and users are told.

    Any caller may ask, so the reason stays general; the log has the details."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def reasons(self) -> list[str]:
        try:
            await self._store.ping()
        except CorralError as error:
            log.debug("not ready", error=error.message)
            return ["the database does not answer"]
        return []
