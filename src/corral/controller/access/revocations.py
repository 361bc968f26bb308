"""Whose bus credentials have ended before their time, and that the bus knows it.

The list is in SQL, so any controller can tell the bus; it is pushed at each change, after each reconnect and now and
then, whole. Without the operator's key (an external NATS that gave us only an account seed) nothing can be pushed, and
a deleted node's credential lives until it expires; `corral doctor` says so.
"""

from __future__ import annotations

from datetime import timedelta

from corral.bus.api import Bus, BusTls
from corral.bus.auth import BusKeys, account_jwt, mint_system_credentials
from corral.bus.revocation import push_account
from corral.kit.clock import Clock
from corral.kit.tasks import Wake, run_every
from corral.store import bus_credentials, nodes
from corral.store.api import Store, Transaction
from corral.store.bus_credentials import Revoked

_SYSTEM_TTL_S = 300.0
_ACCOUNT_NAME = "corral"


class Revocations:
    name = "bus revocations"

    def __init__(
        self,
        store: Store,
        bus: Bus,
        clock: Clock,
        *,
        keys: BusKeys | None,
        urls: tuple[str, ...],
        tls: BusTls | None,
        ttl_s: float,
        interval_s: float = 300.0,
    ) -> None:
        self._store = store
        self._bus = bus
        self._clock = clock
        self._keys = keys
        self._urls = urls
        self._tls = tls
        self._ttl_s = ttl_s
        self._interval_s = interval_s
        self._wake = Wake()

    @property
    def possible(self) -> bool:
        return self._keys is not None

    async def add(self, tx: Transaction, user_key: str, node_id: str) -> None:
        """Remembered until the last credential the user can hold has expired by itself."""
        if user_key:
            until = await tx.now() + timedelta(seconds=self._ttl_s + 60)
            await bus_credentials.revoke(tx, user_key, node_id, expires_at=until)

    def push_soon(self) -> None:
        self._wake.set()

    async def run(self) -> None:
        if self._keys is None:
            return
        self._bus.on_change(lambda connected: self._wake.set() if connected else None)
        await run_every(
            "bus revocations", self._interval_s, self.push, clock=self._clock, wake=self._wake, worst_wait_s=2.0
        )

    async def push(self) -> None:
        if self._keys is None:
            return
        async with self._store.read() as tx:
            rows = await bus_credentials.list_revoked(tx)
            replaced = {row.user_key for row in rows if await nodes.find(tx, row.node_id) is not None}
        now = self._clock.now()
        token = account_jwt(
            self._keys.operator_seed,
            self._keys.account,
            name=_ACCOUNT_NAME,
            now=now,
            revocations={row.user_key: self._refused_until(row, row.user_key in replaced) for row in rows},
        )
        system = mint_system_credentials(self._keys, now=now, ttl_s=_SYSTEM_TTL_S).credentials()
        await push_account(self._urls, system, token, tls=self._tls)

    def _refused_until(self, row: Revoked, replaced: bool) -> int:
        """The server refuses what was issued up to this moment. A deleted node never comes back under its key, so
        that moment lies ahead: a credential minted while it was being deleted dies too. A replaced one does."""
        if replaced:
            return int(row.revoked_at.timestamp())
        return int(self._clock.now().timestamp() + self._ttl_s)
