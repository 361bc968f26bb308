"""Looks at every node's pulse and carries out the verdict. One controller does it at a time, under a lease."""

from __future__ import annotations

from datetime import datetime

from corral.contract.messages.nodes import NodeId, NodeStatus
from corral.controller.health.classify import Guard, Pulse, classify, is_still_true
from corral.controller.health.observation_window import ObservationWindow
from corral.controller.registry.changes import NodeChanges
from corral.controller.registry.transitions import NodeEvent
from corral.controller.runtime.leadership import Leadership
from corral.kit.clock import Clock
from corral.kit.errors import Conflict, NotFound
from corral.kit.log import get_log
from corral.kit.tasks import Wake, run_every
from corral.store.engine.transactions import Store, Transaction
from corral.store.tables import controllers, nodes
from corral.store.tables.nodes import Node, NodePulse

log = get_log(__name__)

_LEASE = "health"


class HealthMonitor:
    name = "health"

    def __init__(
        self,
        store: Store,
        changes: NodeChanges,
        window: ObservationWindow,
        leadership: Leadership,
        clock: Clock,
        *,
        interval_s: float,
        stale_after_s: float,
        guard: Guard,
        live_for_s: float,
    ) -> None:
        """`live_for_s`: a controller not seen for so long is no successor."""
        self._store = store
        self._changes = changes
        self._window = window
        self._leadership = leadership
        self._clock = clock
        self._interval_s = interval_s
        self._stale_after_s = stale_after_s
        self._guard = guard
        self._live_for_s = live_for_s
        self.wake = Wake()
        self.held = 0  # silent nodes the guard leaves alone; the page shows them
        self._outage_at: float | None = None  # our second of the last verdict that was a mass outage

    async def run(self) -> None:
        await run_every("health", self._interval_s, self.run_once, clock=self._clock, wake=self.wake, max_wait_s=10.0)

    async def run_once(self) -> None:
        if not await self._leadership.lead(_LEASE, every_s=self._interval_s):
            self.held = 0
            return
        async with self._store.read() as tx:
            now = await tx.now()
            pulses = [_pulse(row, now) for row in await nodes.list_pulses(tx)]
            others = len(await controllers.list_live(tx, within_s=self._live_for_s)) > 1
        verdict = classify(
            pulses,
            observed_s=self._window.seconds(now),
            stale_after_s=self._stale_after_s,
            guard=self._guard,
            outage_ago_s=None if self._outage_at is None else self._clock.monotonic() - self._outage_at,
        )
        if verdict.is_mass_outage:
            self._outage_at = self._clock.monotonic()
        if verdict.held and not self.held:
            log.error("many nodes fell silent at once: none is taken offline", silent=verdict.held, nodes=len(pulses))
        self.held = verdict.held
        for node, event in verdict.events:
            await self._carry_out(node, event)
        if others and self._window.is_deaf:  # who cannot hear must not stand in the way of who can
            await self._leadership.resign(_LEASE)

    async def _carry_out(self, node_id: NodeId, event: NodeEvent) -> None:
        async def is_still_so(tx: Transaction, node: Node) -> bool:
            await self._leadership.require(tx, _LEASE)
            now = await tx.now()
            # In this order: a pause after the row was read shows up in `seconds`, one before it in the row.
            return is_still_true(
                _pulse(node, now),
                event,
                observed_s=self._window.seconds(now),
                stale_after_s=self._stale_after_s,
            )

        try:
            await self._changes.apply(node_id, event, check=is_still_so)
        except NotFound:
            pass  # deleted while we judged
        except Conflict as refusal:
            log.info("verdict not carried out", node_id=node_id, verdict=event.value, reason=refusal.message)


def _pulse(row: NodePulse | Node, now: datetime) -> Pulse:
    return Pulse(
        node=NodeId(row.id),
        status=NodeStatus(row.status),
        status_age_s=(now - row.status_changed_at).total_seconds(),
        heartbeat_age_s=(now - row.last_heartbeat).total_seconds() if row.last_heartbeat else None,
        left=row.left,
    )
