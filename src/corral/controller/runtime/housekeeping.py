"""Deletes old rows: tombstones, ended sessions, revocations that outlived every credential, ended operations, receipts,
samples, changes of nodes, withdrawn rules and their targets."""

from __future__ import annotations

from datetime import timedelta

from corral.controller.runtime.change_feed import RULES
from corral.controller.runtime.leadership import Leadership
from corral.controller.settings.nodes import RuntimeSettings
from corral.kit.clock import Clock
from corral.kit.tasks import run_every
from corral.store.engine.transactions import Store, Transaction
from corral.store.tables import (
    backend_rules,
    backend_targets,
    bus_credentials,
    node_events,
    node_tombstones,
    operations,
    receipts,
    revisions,
    samples,
    web_sessions,
)

_LEASE = "housekeeping"
_KEEP_TOMBSTONES_S = 90 * 86400.0
_KEEP_NODE_EVENTS = timedelta(days=90)


class Housekeeping:
    name = "housekeeping"

    def __init__(
        self,
        store: Store,
        leadership: Leadership,
        clock: Clock,
        settings: RuntimeSettings,
        *,
        interval_s: float = 3600.0,
    ) -> None:
        self._store = store
        self._keep_receipts = timedelta(seconds=settings.keep_receipts_s)
        self._keep_operations = timedelta(seconds=settings.keep_operations_s)
        self._leadership = leadership
        self._clock = clock
        self._interval_s = interval_s

    async def run(self) -> None:
        await run_every("housekeeping", self._interval_s, self.tidy, clock=self._clock)

    async def tidy(self) -> None:
        if not await self._leadership.lead(_LEASE, every_s=self._interval_s):
            return
        async with self._store.write() as tx:
            await self._leadership.require(tx, _LEASE)
            await node_tombstones.prune(tx, older_than_s=_KEEP_TOMBSTONES_S)
            await web_sessions.prune_expired(tx, await tx.now())
            await bus_credentials.prune_expired(tx)
            await receipts.prune(tx, await tx.now() - self._keep_receipts)
            await samples.prune(tx, await tx.now())
            await node_events.prune(tx, await tx.now() - _KEEP_NODE_EVENTS)
            await self._forget_operations(tx)

    async def _forget_operations(self, tx: Transaction) -> None:
        """Only ended operations and withdrawn rules: a rule that holds is needed, however old it is."""
        await revisions.hold(tx, RULES)
        before = await tx.now() - self._keep_operations
        await operations.prune(tx, before)
        await backend_rules.prune(tx, before)
        await backend_targets.prune(tx)
