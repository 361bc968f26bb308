"""Throws away what nobody needs any more: tombstones, ended sessions, revocations that outlived every credential."""

from __future__ import annotations

from corral.controller.leadership import Leadership
from corral.kit.clock import Clock
from corral.kit.tasks import run_every
from corral.store import bus_credentials, node_tombstones, web_sessions
from corral.store.api import Store

_LEASE = "housekeeping"
_KEEP_TOMBSTONES_S = 90 * 86400.0


class Housekeeping:
    name = "housekeeping"

    def __init__(self, store: Store, leadership: Leadership, clock: Clock, *, interval_s: float = 3600.0) -> None:
        self._store = store
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
