"""Where the other controllers serve their copies of model files: a node may fetch from any of them."""

from __future__ import annotations

from corral.kit.clock import Clock
from corral.kit.tasks import run_every
from corral.store.engine.transactions import Store
from corral.store.tables import controllers


class Neighbours:
    name = "neighbours"

    def __init__(self, store: Store, clock: Clock, *, own: str, live_for_s: float, every_s: float) -> None:
        """`own` is the URL of this controller's. Others count as alive for so long after they were seen."""
        self._store = store
        self._clock = clock
        self._live_for_s = live_for_s
        self._every_s = every_s
        self.own = own
        self.others: tuple[str, ...] = ()

    async def run(self) -> None:
        await run_every("neighbours", self._every_s, self.look, clock=self._clock)

    async def look(self) -> None:
        async with self._store.read() as tx:
            live = await controllers.list_live(tx, within_s=self._live_for_s)
        self.others = tuple(dict.fromkeys(each.blob_url for each in live if each.blob_url not in ("", self.own)))
