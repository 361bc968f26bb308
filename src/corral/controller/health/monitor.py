"""Looks at every node's pulse and carries out the verdict. One controller does it at a time, under a lease."""

from __future__ import annotations

from datetime import datetime

from corral.contract.ids import NodeId
from corral.contract.messages.nodes import NodeStatus
from corral.controller.health.classify import Guard, Pulse, judge
from corral.controller.health.listening import Listening
from corral.controller.leadership import Leadership
from corral.controller.registry.changes import NodeChanges
from corral.kit.clock import Clock
from corral.kit.errors import Conflict, NotFound
from corral.kit.log import get_log
from corral.kit.tasks import Wake, run_every
from corral.store import nodes
from corral.store.api import Store
from corral.store.nodes import NodePulse

log = get_log(__name__)


class HealthMonitor:
    name = "health"

    def __init__(
        self,
        store: Store,
        changes: NodeChanges,
        listening: Listening,
        leadership: Leadership,
        clock: Clock,
        *,
        interval_s: float,
        stale_after_s: float,
        guard: Guard,
    ) -> None:
        self._store = store
        self._changes = changes
        self._listening = listening
        self._leadership = leadership
        self._clock = clock
        self._interval_s = interval_s
        self._stale_after_s = stale_after_s
        self._guard = guard
        self.wake = Wake()
        self.held = 0  # silent nodes the guard leaves alone; the page tells people

    async def run(self) -> None:
        await run_every("health", self._interval_s, self.look, clock=self._clock, wake=self.wake, worst_wait_s=10.0)

    async def look(self) -> None:
        if not await self._leadership.lead("health"):
            self.held = 0
            return
        async with self._store.read() as tx:
            now = await tx.now()
            pulses = [_pulse(row, now) for row in await nodes.list_pulses(tx)]
        verdict = judge(
            pulses,
            listening_s=self._listening.seconds(),
            stale_after_s=self._stale_after_s,
            guard=self._guard,
        )
        if verdict.held and not self.held:
            log.error("many nodes fell silent at once: none is taken offline", silent=verdict.held, nodes=len(pulses))
        self.held = verdict.held
        for node, event in verdict.events:
            try:
                await self._changes.apply(node, event)
            except (Conflict, NotFound):
                continue  # it changed or went while we judged: the next look sees it as it is


def _pulse(row: NodePulse, now: datetime) -> Pulse:
    return Pulse(
        node=NodeId(row.id),
        status=NodeStatus(row.status),
        status_age_s=(now - row.status_changed_at).total_seconds(),
        heartbeat_age_s=(now - row.last_heartbeat).total_seconds() if row.last_heartbeat else None,
        left=row.left,
    )
