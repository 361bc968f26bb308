"""Can this controller do its work? Without the bus it can: nodes are still heard over HTTP, and people are told."""

from __future__ import annotations

from corral.kit.errors import CorralError
from corral.store.api import Store


class Readiness:
    def __init__(self, store: Store) -> None:
        self._store = store

    async def reasons(self) -> list[str]:
        try:
            await self._store.ping()
        except CorralError as error:
            return [f"database: {error.message}"]
        return []
