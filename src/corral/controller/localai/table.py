"""The processes on LocalAI workers, in the store for everybody and in memory for whoever serves from here.

Writes are the leader's, fenced by the lease of the replicas; with each goes the node's own list, as all others read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from corral.contract.messages.replicas import ReplicaState
from corral.controller.localai.processes import listed
from corral.controller.runtime.change_feed import INVENTORY, REPLICAS, ChangeFeed
from corral.controller.runtime.leadership import Leadership
from corral.kit.clock import Clock
from corral.kit.errors import Conflict
from corral.kit.log import get_log
from corral.kit.tasks import Wake, run_every
from corral.store.engine.transactions import Store, Transaction
from corral.store.engine.types import storable
from corral.store.tables import node_backends, peer_processes, revisions
from corral.store.tables.peer_processes import PeerProcess

log = get_log(__name__)


class NotLeading(Conflict):
    """What was to be written is another controller's to write by now."""


class PeerTable:
    name = "peer processes"

    def __init__(
        self,
        store: Store,
        leadership: Leadership,
        feed: ChangeFeed,
        clock: Clock,
        *,
        lease: str,
        refresh_s: float = 30.0,
    ) -> None:
        self._store = store
        self._leadership = leadership
        self._feed = feed
        self._clock = clock
        self._lease = lease
        self._refresh_s = refresh_s
        self._wake = Wake()
        self._known: dict[str, PeerProcess] = {}
        self.changed: Callable[[], None] = _nobody

    # For whoever serves.

    async def run(self) -> None:
        self._feed.on(REPLICAS, self._wake.set)
        await run_every(self.name, self._refresh_s, self.refresh, clock=self._clock, wake=self._wake)

    async def refresh(self) -> None:
        async with self._store.read() as tx:
            rows = await peer_processes.list_(tx)
        self._known = {row.process_id: row for row in rows}
        self.changed()

    def known(self) -> dict[str, PeerProcess]:
        return self._known

    async def find(self, process_id: str) -> PeerProcess | None:
        """From memory where it is there; a gateway may have heard of a new one before us."""
        if (known := self._known.get(process_id)) is not None:
            return known
        async with self._store.read() as tx:
            found = await peer_processes.find(tx, process_id)
        if found is not None:
            self._known[process_id] = found
        return found

    # For whoever leads.

    @property
    def leads(self) -> bool:
        """As far as we know; whether it is still so is asked with each write."""
        return self._leadership.epoch(self._lease) != 0

    async def put(self, row: PeerProcess) -> None:
        async with self._store.write() as tx:
            await self._require(tx)
            # Whatever else was under this key there ended before this one could start.
            others = [each.process_id for each in await peer_processes.list_(tx, [row.node_id]) if each.key == row.key]
            await peer_processes.delete(tx, [each for each in others if each != row.process_id])
            await peer_processes.put(tx, [row])
            await self._tell(tx, [row.node_id])
        self._touched()

    async def mark(self, process_id: str, state: ReplicaState, error: str = "") -> None:
        async with self._store.write() as tx:
            await self._require(tx)
            row = await peer_processes.find(tx, process_id)
            if row is None or (row.state, row.error) == (state.value, error):
                return
            await peer_processes.put(tx, [replace(row, state=state.value, error=storable(error))])
            await self._tell(tx, [row.node_id])
        self._touched()

    async def forget(self, process_id: str, *, unless_stopping: bool = False) -> None:
        """`unless_stopping`: whoever stops it settles what becomes of it."""
        async with self._store.write() as tx:
            await self._require(tx)
            row = await peer_processes.find(tx, process_id)
            if row is None or (unless_stopping and row.state == ReplicaState.STOPPING):
                return
            await peer_processes.delete(tx, [process_id])
            await self._tell(tx, [row.node_id])
        self._touched()

    async def repair_inventories(self, node_ids: Sequence[str]) -> None:
        """An answer about backends that was under way while a list changed may have put the old one back."""
        async with self._store.read() as tx:
            rows = await peer_processes.list_(tx, node_ids)
            inventories = await node_backends.list_(tx, node_ids)
        wrong = [
            inventory.node_id
            for inventory in inventories
            if inventory.processes != listed(row for row in rows if row.node_id == inventory.node_id)
            or inventory.reported_at is None
        ]
        if wrong:
            async with self._store.write() as tx:
                await self._require(tx)
                await self._tell(tx, wrong)
            self._touched()

    async def _require(self, tx: Transaction) -> None:
        try:
            await self._leadership.require(tx, self._lease)
        except Conflict as error:
            raise NotLeading(error.message) from error

    async def _tell(self, tx: Transaction, node_ids: Sequence[str]) -> None:
        for node_id in node_ids:
            processes = listed(await peer_processes.list_(tx, [node_id]))
            if not await node_backends.set_processes(tx, node_id, processes):
                log.debug("nobody has asked yet what the node has", node_id=node_id)
        await revisions.bump(tx, INVENTORY)
        await revisions.bump(tx, REPLICAS)

    def _touched(self) -> None:
        self._feed.notify(INVENTORY)
        self._feed.notify(REPLICAS)
        self._wake.set()


def _nobody() -> None:
    pass
