"""Loops that must run once: whoever holds the lease runs them. Database time, fenced by an epoch (DESIGN §8)."""

from __future__ import annotations

from corral.kit.errors import CorralError
from corral.kit.log import get_log
from corral.store import leases
from corral.store.api import Store
from corral.store.leases import Lease

log = get_log(__name__)


class Leadership:
    def __init__(self, store: Store, holder: str, *, ttl_s: float) -> None:
        self._store = store
        self._holder = holder
        self._ttl_s = ttl_s
        self._held: dict[str, Lease] = {}

    async def lead(self, name: str) -> bool:
        """Claim or renew; True while it is ours. Cheap enough to ask before every pass of a loop."""
        async with self._store.write() as tx:
            lease = await leases.claim_lease(tx, name, self._holder, self._ttl_s)
        before = self._held.get(name)
        if lease is None:
            self._held.pop(name, None)
            return False
        self._held[name] = lease
        if before is None or before.epoch != lease.epoch:
            log.info("lease taken", lease=name, epoch=lease.epoch)
        return True

    def held(self, name: str) -> Lease | None:
        """For writes that must be conditional on the epoch."""
        return self._held.get(name)

    async def release_all(self) -> None:
        """On the way out, so that another controller need not wait for the lease to run out."""
        for name, lease in list(self._held.items()):
            try:
                async with self._store.write() as tx:
                    await leases.release(tx, lease)
            except CorralError as error:
                log.warning("lease not released; it will run out", lease=name, error=error.message)
        self._held.clear()
