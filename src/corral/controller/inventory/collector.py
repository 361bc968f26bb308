"""Collects the inventories of nodes: from the heartbeats of Corral workers, and by list calls to LocalAI workers
(docs/reference/wire/nodes.md#bus-heartbeat).

Only a changed inventory is stored; that raises the counter which wakes the reconciler on any controller. A LocalAI
worker is called every minute, a Corral worker only if it has not reported an inventory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta

import msgspec

from corral.contract.messages.nodes import BusHeartbeat
from corral.contract.messages.replicas import ReplicaProcess, ReplicaState
from corral.controller.inventory.nodes import is_current, takes_backends
from corral.controller.inventory.routable import routing_facts
from corral.controller.inventory.routing import read_routing
from corral.controller.orders.backend_calls import BackendCalls
from corral.controller.orders.observations import InventoryRead
from corral.controller.registry.sanitize import sanitize_text
from corral.controller.runtime.change_feed import INVENTORY, REPLICAS, ChangeFeed
from corral.controller.runtime.leadership import Leadership
from corral.kit.clock import Clock
from corral.kit.errors import CorralError, Unreachable
from corral.kit.log import get_log
from corral.kit.tasks import Wake, run_every
from corral.store.engine.transactions import Store, Transaction
from corral.store.tables import backend_intents, models, node_backends, nodes, revisions
from corral.store.tables.node_backends import Inventory, fingerprint_of
from corral.store.tables.nodes import NodeOutline

log = get_log(__name__)

_LEASE = "inventories"
_AT_ONCE = 64
_KEEP = 100_000


class InventoryCollector:
    name = "inventories"

    def __init__(
        self,
        store: Store,
        calls: BackendCalls,
        leadership: Leadership,
        feed: ChangeFeed,
        clock: Clock,
        *,
        on_unreachable: Callable[[str], Awaitable[None]],
        flush_s: float,
        read_every_s: float = 60.0,
        poll_s: float = 5.0,
    ) -> None:
        self._store = store
        self._calls = calls
        self._leadership = leadership
        self._feed = feed
        self._clock = clock
        self._on_unreachable = on_unreachable
        self._flush_s = flush_s
        self._read_every = timedelta(seconds=read_every_s)
        self._poll_s = poll_s
        self._waiting: dict[str, tuple[float, Inventory]] = {}  # with the time of its arrival, by the monotonic clock
        self._routing: dict[
            str, frozenset[object]
        ] = {}  # by node: the facts that matter to gateways, as of the last heartbeat
        self._dates: dict[
            str, tuple[float, datetime]
        ] = {}  # by node: time of the last heartbeat, by the monotonic clock and by the database's
        self._soon = Wake()
        self.wake = Wake()

    def on_heartbeat(self, node_id: str, beat: BusHeartbeat) -> None:
        """Keep the inventory of the heartbeat until the next flush; the last one of each node counts."""
        if beat.inventory is None or (len(self._waiting) >= _KEEP and node_id not in self._waiting):
            return
        boot_id, seq = sanitize_text(beat.boot_id) or "", max(0, min(beat.inventory_seq, 2**62))
        inventory = Inventory(
            node_id=node_id,
            boot_id=boot_id,
            seq=seq,
            seen_at=self._clock.now(),
            backends=beat.inventory,
            orders=beat.orders or (),
            processes=beat.processes or (),
        )
        self._waiting[node_id] = (self._clock.monotonic(), inventory)
        # Requests may wait for a replica that has just become ready: flush at once.
        routing = routing_facts(inventory.processes)
        if self._routing.get(node_id, frozenset()) != routing:
            self._routing[node_id] = routing
            self._soon.set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(
                run_every(
                    "inventories",
                    self._flush_s,
                    self.flush,
                    clock=self._clock,
                    wake=self._soon,
                    max_wait_s=self._flush_s,
                )
            )
            tasks.create_task(
                run_every("asking for inventories", self._poll_s, self.read_due, clock=self._clock, wake=self.wake)
            )

    async def flush(self) -> None:
        batch, self._waiting = self._waiting, {}
        if not batch:
            return
        try:
            async with self._store.read() as tx:
                known = await node_backends.list_fingerprints(tx, list(batch))
                at_work = await backend_intents.list_sent_to(tx, list(batch))
                inventories = [self._dated(received_at, row, await tx.now()) for received_at, row in batch.values()]
            await self._write([row for row in inventories if known.get(row.node_id) != fingerprint_of(row)])
            same = [
                row for row in inventories if row.node_id in at_work and known.get(row.node_id) == fingerprint_of(row)
            ]
            if same:  # the time of the report matters: an order that it does not list may be lost
                async with self._store.write() as tx:
                    await node_backends.confirm(tx, same)
        except CorralError:
            self._waiting = batch | self._waiting
            raise

    def _dated(self, received_at: float, inventory: Inventory, now: datetime) -> Inventory:
        """With the time of its arrival by the database's clock. Later heartbeats get later times, even if reading the
        database's clock took longer for an earlier one."""
        at = now - timedelta(seconds=self._clock.monotonic() - received_at)
        before_received, before_at = self._dates.get(inventory.node_id, (received_at, at))
        if received_at > before_received:
            at = max(at, before_at + timedelta(microseconds=1))
        elif received_at == before_received:
            at = before_at  # the same heartbeat again: its write failed
        if len(self._dates) < _KEEP or inventory.node_id in self._dates:
            self._dates[inventory.node_id] = (received_at, at)
        return msgspec.structs.replace(inventory, reported_at=at)

    async def read_due(self) -> None:
        """Read the inventories of nodes that do not report them. One controller does that."""
        if not await self._leadership.lead(_LEASE, every_s=self._poll_s):
            return
        async with self._store.read() as tx:
            now = await tx.now()
            inventories = {row.node_id: row for row in await node_backends.list_(tx)}
            due = []
            for outline in await nodes.list_outlines(tx):
                row = inventories.get(outline.id)
                silent = outline.protocol == 0 and (row is None or now - row.seen_at >= self._read_every)
                reachable = outline.status == "healthy" and not outline.bus_down and takes_backends(outline)
                if reachable and (silent or not is_current(row, outline)):
                    due.append(outline)
        boots, turn = {outline.id: outline.boot_id for outline in due}, asyncio.Semaphore(_AT_ONCE)
        reading = [asyncio.create_task(self._read(outline, turn)) for outline in due]
        try:
            while reading:  # each reply is stored at once, before it is out of date
                await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
                answers = [read for task in reading if task.done() and (read := task.result()) is not None]
                reading = [task for task in reading if not task.done()]
                if answers:
                    await self._write_answers(answers, boots, now)
        finally:
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)

    async def _read(self, outline: NodeOutline, turn: asyncio.Semaphore) -> InventoryRead | None:
        node_id = outline.id
        try:
            async with turn:
                listed = await self._calls.list_backends(node_id, accepts=outline.protocol >= 1)
        except Unreachable:
            # A Corral worker that has just been approved or started again still connects to the bus; if it cannot, its
            # heartbeats over HTTP say so.
            if outline.protocol == 0:
                await self._on_unreachable(node_id)
        except CorralError as error:  # without a reply the stored inventory stays
            log.warning("inventory could not be read", node_id=node_id, error=error.message)
        else:
            return InventoryRead(node_id, listed.backends, listed.seq)
        return None

    async def _write(self, changed: list[Inventory]) -> None:
        if not changed:
            return
        async with self._store.write() as tx:
            routing_changed = await self._put(tx, changed)
        self._notify(routing_changed)

    async def _write_answers(
        self, answers: list[InventoryRead], boots: Mapping[str, str], requested_at: datetime
    ) -> None:
        """Except the replies of workers that restarted since, and of nodes whose inventory was stored since."""
        async with self._store.write() as tx:
            inventories = await complete_inventories(tx, answers)
            routing_changed = await self._put(
                tx, [row for row in inventories if row.boot_id == boots[row.node_id]], unless_since=requested_at
            )
        self._notify(routing_changed)

    async def _put(self, tx: Transaction, changed: list[Inventory], *, unless_since: datetime | None = None) -> bool:
        """Whether the routing of gateways changes."""
        outlines = {
            each.id: each for each in await nodes.list_outlines(tx, [inventory.node_id for inventory in changed])
        }
        kept = [inventory for inventory in changed if inventory.node_id in outlines]
        before = await node_backends.list_boots(tx, list(outlines))
        ran = await node_backends.list_processes(tx, list(outlines))
        await node_backends.put_all(tx, kept, unless_since=unless_since)
        now = await node_backends.list_boots(tx, list(outlines))
        # Otherwise a restarted worker would not match its stored boot id until its heartbeat is stored.
        await nodes.set_boot_ids(
            tx, {id: boot for id, boot in now.items() if outlines[id].boot_id in ("", before.get(id))}
        )
        routing_changed = any(
            routing_facts(inventory.processes)
            != routing_facts(ran[inventory.node_id].processes if inventory.node_id in ran else ())
            for inventory in kept
        )
        await revisions.bump(tx, INVENTORY)
        if routing_changed:
            await _forget_previous_revisions(tx, [process for inventory in kept for process in inventory.processes])
            await revisions.bump(tx, REPLICAS)
        return routing_changed

    def _notify(self, routing_changed: bool) -> None:
        self._feed.notify(INVENTORY)
        if routing_changed:
            self._feed.notify(REPLICAS)


async def _forget_previous_revisions(tx: Transaction, processes: Iterable[ReplicaProcess]) -> None:
    """Part of the transaction that stores these processes: gateways see them from its commit on. After an edit the
    previous revision serves until the current one is ready, and never again after that: not even if the first process
    of the current revision ends before the replica reconciler has run."""
    ready = {process.model for process in processes if process.state == ReplicaState.READY and process.model}
    if not ready:
        return
    for row in await models.list_(tx, sorted(ready)):
        if row.previous_revisions:
            shown, _ = await read_routing(tx, row.id)
            if any(replica.revision == row.revision for replica in shown):
                await models.forget_previous_revisions(tx, row.id, row.revision)


async def complete_inventories(tx: Transaction, answers: Sequence[InventoryRead]) -> list[Inventory]:
    """Complete the replies, which contain no boot id, orders or processes, from the stored rows. Replies of deleted
    nodes are dropped."""
    ids = [read.node_id for read in answers]
    outlines = {outline.id: outline for outline in await nodes.list_outlines(tx, ids)}
    inventories = {row.node_id: row for row in await node_backends.list_(tx, ids)}
    now = await tx.now()
    return [
        _completed(read, outlines[read.node_id], inventories.get(read.node_id), now)
        for read in answers
        if read.node_id in outlines
    ]


def _completed(read: InventoryRead, outline: NodeOutline, before: Inventory | None, now: datetime) -> Inventory:
    answer = Inventory(node_id=read.node_id, boot_id=outline.boot_id, seq=read.seq, seen_at=now, backends=read.backends)
    if before is None:
        return answer
    if not is_current(before, outline):
        # A restarted worker has most likely adopted its processes: until it reports them, the stored ones are the best
        # information.
        return msgspec.structs.replace(answer, processes=before.processes)
    if outline.protocol == 0:  # aliases come from galleries, which may be unreadable this time
        named = {row.name: row.alias for row in before.backends}
        rows = [msgspec.structs.replace(row, alias=row.alias or named.get(row.name, "")) for row in answer.backends]
        answer = msgspec.structs.replace(answer, backends=tuple(rows))
    return msgspec.structs.replace(
        answer, orders=before.orders, processes=before.processes, reported_at=before.reported_at
    )
