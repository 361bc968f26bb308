"""Publishes to workers which models exist, so that they delete files of deleted models before these are long unused.

Published when a model was deleted; again after a while, because workers keep files that were used a moment ago or that
an ending process still reads; and now and then anyway for workers that were offline. A lost message costs disk space
for a while, no more.
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
MAX_MESSAGE_BYTES = 512 * 1024  # of one message on the bus


class KeptModelsPublisher:
    name = "deleted models"

    def __init__(
        self,
        store: Store,
        bus: Bus,
        leadership: Leadership,
        clock: Clock,
        *,
        every_s: float = 30.0,
        repeat_every_s: float = 3600.0,
    ) -> None:
        self._store = store
        self._bus = bus
        self._leadership = leadership
        self._clock = clock
        self._every_s = every_s
        self._repeat_every_s = repeat_every_s
        self._announced: frozenset[str] | None = None
        self._announced_at = 0.0
        self._pause_s = every_s  # until the list is published again; doubles up to `repeat_every_s`

    async def run(self) -> None:
        await run_every(self.name, self._every_s, self.run_once, clock=self._clock)

    async def run_once(self) -> None:
        if not await self._leadership.lead(_LEASE, every_s=self._every_s):
            self._announced = None
            return
        async with self._store.read() as tx:
            present = frozenset(await models.list_ids(tx))
            # A LocalAI worker does not know this message.
            node_ids = [node.id for node in await nodes.list_(tx) if node.approved and node.protocol > 0]
        now = self._clock.monotonic()
        is_shorter = self._announced is None or bool(self._announced - present)
        if is_shorter or now - self._announced_at >= self._pause_s:
            if not await self._publish(present, node_ids):
                return
            self._announced_at = now
            self._pause_s = self._every_s if is_shorter else min(2 * self._pause_s, self._repeat_every_s)
        self._announced = present

    async def _publish(self, present: frozenset[str], node_ids: list[str]) -> bool:
        """False: the bus is away; the next pass tries again."""
        message = KeepModels(models=tuple(sorted(present)))
        if len(encode(message)) > MAX_MESSAGE_BYTES:
            log.info(
                "too many models for one message; workers delete files of deleted models when they are long unused"
            )
            return True
        for node_id in node_ids:
            try:
                await self._bus.publish(KEEP_MODELS, message, node=node_id)
            except CorralError as error:
                log.debug("deleted models could not be published to a node", node_id=node_id, reason=error.message)
                return False
        return True
