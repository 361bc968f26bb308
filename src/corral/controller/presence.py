"""Which controllers are alive: each writes its own row."""

from __future__ import annotations

import socket
from datetime import timedelta

from corral import __version__
from corral.kit.clock import Clock
from corral.kit.errors import CorralError
from corral.kit.log import get_log
from corral.kit.tasks import run_every
from corral.store import controllers
from corral.store.api import Store

log = get_log(__name__)

_FORGET_AFTER = timedelta(days=7)


class Presence:
    name = "presence"

    def __init__(self, store: Store, instance: str, clock: Clock, *, interval_s: float, blob_url: str = "") -> None:
        self._store = store
        self._instance = instance
        self._clock = clock
        self._interval_s = interval_s
        self._blob_url = blob_url

    async def run(self) -> None:
        await run_every("presence", self._interval_s, self.tell, clock=self._clock, worst_wait_s=self._interval_s)

    async def tell(self) -> None:
        async with self._store.write() as tx:
            await controllers.seen(
                tx, self._instance, host=socket.gethostname(), version=__version__, blob_url=self._blob_url
            )
            await controllers.prune(tx, await tx.now() - _FORGET_AFTER)

    async def leave(self) -> None:
        try:
            async with self._store.write() as tx:
                await controllers.delete(tx, self._instance)
        except CorralError as error:
            log.warning("not signed off; it will show", error=error.message)
