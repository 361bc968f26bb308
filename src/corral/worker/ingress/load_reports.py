"""Publishes how many requests each process has in flight (docs/reference/wire/replicas.md#in-flight-report): soon after
a change, at most once per interval."""

from __future__ import annotations

import asyncio
import itertools

from corral.bus.api import Bus
from corral.contract.messages.replicas import NODE_LOAD, NodeLoad
from corral.kit.errors import CorralError
from corral.kit.log import get_log
from corral.kit.tasks import Wake
from corral.worker.ingress.in_flight import InFlight

log = get_log(__name__)
# The last report is repeated once, as messages get lost and the next change may be far away; while there are requests,
# it is repeated all the time: a controller that has just subscribed must not believe that the node is idle.
REPEAT_S = 2.0


class LoadReports:
    def __init__(
        self, in_flight: InFlight, *, boot_id: str, interval_s: float = 0.25, repeat_s: float = REPEAT_S
    ) -> None:
        self._in_flight = in_flight
        self._boot_id = boot_id
        self._interval_s = interval_s
        self._repeat_s = max(repeat_s, interval_s)
        self._numbers = itertools.count(1)
        self._wake = Wake()
        in_flight.on_change = self._wake.set

    async def run(self, bus: Bus, node: str) -> None:
        """Publish reports until cancelled. Only one call may run at a time."""
        due = True  # a new session: the subscribers know nothing yet
        while True:
            changed = await self._wake.wait(self._repeat_s)
            if not (changed or due):
                continue
            due = changed or bool(self._in_flight.counts())
            try:
                await bus.publish(NODE_LOAD, self._report(), node=node)
            except CorralError as error:
                due = True
                log.debug("load not published", reason=error.message)
            # One report covers all changes of an interval.
            await asyncio.sleep(self._interval_s)

    def _report(self) -> NodeLoad:
        return NodeLoad(boot_id=self._boot_id, seq=next(self._numbers), in_flight=self._in_flight.counts())
