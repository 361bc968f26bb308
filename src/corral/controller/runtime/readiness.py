"""Can this controller do its work? Without the bus it can: nodes are still heard over HTTP, and people are told.

Anybody may ask, so the reason stays general; the log has the details.
"""

from __future__ import annotations

from corral.kit.errors import CorralError
from corral.kit.log import get_log
from corral.store.engine.transactions import Store

log = get_log(__name__)


class Readiness:
    def __init__(self, store: Store) -> None:
        self._store = store

    async def reasons(self) -> list[str]:
        try:
            await self._store.ping()
        except CorralError as error:
            log.debug("not ready", error=error.message)
            return ["the database does not answer"]
        return []
