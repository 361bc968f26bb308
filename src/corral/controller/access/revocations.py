"""Whose bus credentials have ended before their time, and that the bus knows it.

The list is in SQL, so any controller can tell the bus; each looks at it every few seconds and pushes it, whole, when it
differs from what it pushed last, after each reconnect and now and then. So it does not matter which controller ended a
credential, whether it lived to tell the bus, or whose older list arrived there last.

Without the operator's key (an external NATS that gave us only an account seed) nothing can be pushed, and a deleted
node's credential lives until it expires; `corral doctor` says so.
"""

from __future__ import annotations

from datetime import timedelta

from corral.bus.api import Bus, BusTls
from corral.bus.auth import BusKeys, account_jwt, mint_system_credentials
from corral.bus.revocation import push_account
from corral.kit.clock import Clock
from corral.kit.log import get_log
from corral.kit.tasks import Wake, run_every
from corral.store.engine.transactions import Store, Transaction
from corral.store.tables import bus_credentials
from corral.store.tables.bus_credentials import Revoked

log = get_log(__name__)

_SYSTEM_TTL_S = 300.0
_ACCOUNT_NAME = "corral"
_CLOCKS_S = (
    86_400.0  # how far the clocks of controllers, database and bus may be apart without a token outliving its end
)


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
        interval_s: float = 2.0,
        refresh_s: float = 300.0,
    ) -> None:
        """Looked at every `interval_s`; told again after `refresh_s` although nothing changed."""
        self._store = store
        self._bus = bus
        self._clock = clock
        self._keys = keys
        self._urls = urls
        self._tls = tls
        self._ttl_s = ttl_s
        self._interval_s = interval_s
        self._refresh_s = refresh_s
        self._wake = Wake()
        self._pushed: list[Revoked] | None = None
        self._pushed_at = 0.0

    @property
    def possible(self) -> bool:
        return self._keys is not None

    async def add(self, tx: Transaction, user_key: str, node_id: str) -> None:
        """Revoke for good: a node that comes back gets another key. The row stays until the last credential that the
        user can hold has expired."""
        if user_key:
            until = await tx.now() + timedelta(seconds=self._ttl_s + _CLOCKS_S)
            await bus_credentials.revoke(tx, user_key, node_id, expires_at=until)

    def push_soon(self) -> None:
        self._wake.set()

    async def run(self) -> None:
        if self._keys is None:
            return
        self._bus.on_change(self._connection_changed)
        await run_every(
            "bus revocations", self._interval_s, self.run_once, clock=self._clock, wake=self._wake, max_wait_s=2.0
        )

    async def run_once(self) -> None:
        """Tell the bus if it may not know."""
        if self._keys is None or not self._bus.connected:
            return  # the reconnect wakes us
        rows = await self._read()
        now = self._clock.monotonic()
        if rows == self._pushed and now - self._pushed_at < self._refresh_s:
            return
        await self._push(self._keys, rows)
        if self._pushed is not None and rows != self._pushed:
            log.info("bus told whose credentials have ended", users=len(rows))
        self._pushed, self._pushed_at = rows, now
        if await self._read() != rows:  # ours may have overwritten a newer list of another controller's
            self._wake.set()

    def _connection_changed(self, connected: bool) -> None:
        if connected:  # perhaps to a server that has never heard of anybody
            self._pushed = None
            self._wake.set()

    async def _read(self) -> list[Revoked]:
        async with self._store.read() as tx:
            return await bus_credentials.list_revoked(tx)

    async def _push(self, keys: BusKeys, rows: list[Revoked]) -> None:
        now = self._clock.now()
        # The server refuses credentials that were issued up to this moment. The moment is in the future, so that it
        # covers a credential issued while its node was being deleted, and clocks that differ.
        until = int(now.timestamp() + self._ttl_s + _CLOCKS_S)
        token = account_jwt(
            keys.operator_seed,
            keys.account,
            name=_ACCOUNT_NAME,
            now=now,
            revocations={row.user_key: until for row in rows},
        )
        system = mint_system_credentials(keys, now=now, ttl_s=_SYSTEM_TTL_S).credentials()
        await push_account(self._urls, system, token, tls=self._tls)
