"""Nodes hear which models there are, so that files of deleted ones need not wait until nobody has used them for long.

Told when one went, and now and then anyway: whoever was off hears it the next time. A word that is lost costs room on
a disk for a while, no more.
"""

from __future__ import annotations

from corral.bus.api import Bus
from corral.contract.codec import encode
from corral.contract.messages.models import KEEP_MODELS, KeepModels
from corral.controller.runtime.leadership import Leadership
from corral.kit.clock import Clock
from corral.kit.errors import CorralError
from corral.kit.log import get_log
from corral.kit.tasks import run_every
from corral.store.engine.transactions import Store
from corral.store.tables import models, nodes

log = get_log(__name__)

_LEASE = "model files"
_MOST_BYTES = 512 * 1024  # of one message on the bus


class Deleted:
    name = "deleted models"

    def __init__(
        self,
        store: Store,
        bus: Bus,
        leadership: Leadership,
        clock: Clock,
        *,
        every_s: float = 30.0,
        tell_all_every_s: float = 3600.0,
    ) -> None:
        self._store = store
        self._bus = bus
        self._leadership = leadership
        self._clock = clock
        self._every_s = every_s
        self._tell_all_every_s = tell_all_every_s
        self._told: frozenset[str] | None = None
        self._told_at = 0.0

    async def run(self) -> None:
        await run_every("deleted models", self._every_s, self.look, clock=self._clock)

    async def look(self) -> None:
        if not await self._leadership.lead(_LEASE, every_s=self._every_s):
            self._told = None
            return
        async with self._store.read() as tx:
            present = frozenset(await models.list_ids(tx))
            # A LocalAI worker would not know what is meant.
            listening = [node.id for node in await nodes.list_(tx) if node.approved and node.protocol > 0]
        now = self._clock.monotonic()
        gone = self._told is None or self._told - present
        if gone or now - self._told_at >= self._tell_all_every_s:
            if not await self._tell(present, listening):
                return
            self._told_at = now
        self._told = present

    async def _tell(self, present: frozenset[str], listening: list[str]) -> bool:
        """False: there is no bus now; the next look tells."""
        message = KeepModels(models=tuple(sorted(present)))
        if len(encode(message)) > _MOST_BYTES:
            log.info("too many models to tell nodes of; files of deleted ones go when nobody uses them")
            return True
        for node_id in listening:
            try:
                await self._bus.publish(KEEP_MODELS, message, node=node_id)
            except CorralError as error:
                log.debug("a node was not told of deleted models", node_id=node_id, reason=error.message)
                return False
        return True
