"""Telling gateways how many requests each process has under way (docs/reference/wire/replicas.md#in-flight-report):
soon after a change, never too often."""

from __future__ import annotations

import asyncio
import itertools

from corral.bus.api import Bus
from corral.contract.messages.replicas import NODE_LOAD, NodeLoad
from corral.kit.errors import CorralError
from corral.kit.log import get_log
from corral.kit.tasks import Wake
from corral.worker.ingress.inflight import InFlight

log = get_log(__name__)
# What was told last is told once more: messages get lost, and no other may follow for a long time. And as long as there
# are requests under way: a controller that begins to listen must not take silence for idleness.
AGAIN_S = 2.0


class LoadReports:
    def __init__(
        self, in_flight: InFlight, *, boot_id: str, interval_s: float = 0.25, again_s: float = AGAIN_S
    ) -> None:
        self._in_flight = in_flight
        self._boot_id = boot_id
        self._interval_s = interval_s
        self._again_s = max(again_s, interval_s)
        self._numbers = itertools.count(1)
        self._wake = Wake()
        in_flight.changed = self._wake.set

    async def run(self, bus: Bus, node: str) -> None:
        """For as long as the bus is there; one at a time."""
        due = True  # whoever listens has not heard since the last time
        while True:
            changed = await self._wake.wait(self._again_s)
            if not (changed or due):
                continue
            due = changed or bool(self._in_flight.counts())
            try:
                await bus.publish(NODE_LOAD, self._report(), node=node)
            except CorralError as error:
                due = True
                log.debug("load not told", reason=error.message)
            # Changes in between count as one.
            await asyncio.sleep(self._interval_s)

    def _report(self) -> NodeLoad:
        return NodeLoad(boot_id=self._boot_id, seq=next(self._numbers), in_flight=self._in_flight.counts())
