"""Leadership of loops that only one controller may run: the holder of a lease runs the loop. Leases use the database's
clock, and an epoch fences the writes (docs/explanation/design.md#leases)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from corral.kit.errors import Conflict, CorralError, OutcomeUnknown
from corral.kit.log import get_log
from corral.store.engine import leases
from corral.store.engine.leases import Lease
from corral.store.engine.transactions import Store, Transaction

log = get_log(__name__)


class Leadership:
    def __init__(self, store: Store, holder: str, *, ttl_s: float) -> None:
        self._store = store
        self._holder = holder
        self._ttl_s = ttl_s
        self._held: dict[str, Lease] = {}
        self._doubtful: set[str] = set()

    async def lead(self, name: str, *, every_s: float = 0.0) -> bool:
        """Claim or renew the lease; True if this controller holds it. Cheap enough for every pass of a loop.

        `every_s` is how far apart the passes are: the lease outlives the pause between two of them, or it would wander
        from controller to controller and each would run the loop in turn."""
        if name in self._doubtful:
            await self.resign(name)
            self._doubtful.discard(name)
        async with self._store.write() as tx:
            lease = await leases.claim_lease(tx, name, self._holder, max(self._ttl_s, 2 * every_s))
        before = self._held.get(name)
        if lease is None:
            self._held.pop(name, None)
            return False
        self._held[name] = lease
        if before is None or before.epoch != lease.epoch:
            log.info("lease taken", lease=name, epoch=lease.epoch)
        return True

    async def require(self, tx: Transaction, name: str) -> None:
        """Call it in every transaction that writes under the lease. Raises `Conflict` if another controller holds it:
        the operating system can stop a process for a minute between two lines."""
        lease = self._held.get(name)
        if lease is None:
            raise Conflict(f"the lease {name!r} is not ours")
        await leases.require(tx, lease)

    @contextlib.contextmanager
    def resign_if_unknown(self, name: str) -> Iterator[None]:
        """Around a transaction that claims orders. If the outcome of its commit is unknown, the claims may be stored
        although this process never sends the orders: `lead` then resigns first and leads under a new epoch, because the
        orders of an older epoch are sent again."""
        try:
            yield
        except OutcomeUnknown:
            self._doubtful.add(name)
            raise

    def epoch(self, name: str) -> int:
        """The epoch of the lease as last claimed; 0 if another controller holds it. Orders of another epoch were sent
        by another leader."""
        lease = self._held.get(name)
        return lease.epoch if lease is not None else 0

    async def resign(self, name: str) -> None:
        """Release the lease: any controller can claim it at once, under a new epoch. After an error, call it again."""
        lease = self._held.get(name)
        if lease is not None:
            async with self._store.write() as tx:
                await leases.release(tx, lease)
            self._held.pop(name, None)
            log.info("lease released", lease=name)

    async def release_all(self) -> None:
        """At shutdown, so that another controller need not wait until the leases expire."""
        for name in list(self._held):
            try:
                await self.resign(name)
            except CorralError as error:
                log.warning("lease not released; it will expire", lease=name, error=error.message)
