"""Keeps what the nodes say they have: from heartbeats of Corral workers, by asking LocalAI workers
(docs/reference/wire/nodes.md#bus-heartbeat).

Most heartbeats bring nothing new; what does is written, and raises the counter that wakes the reconciler wherever it
runs. A LocalAI worker is asked every minute; a Corral worker only if it has never told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime, timedelta

import msgspec

from corral.contract.messages.nodes import BusHeartbeat
from corral.controller.inventory.nodes import is_current, takes_backends
from corral.controller.inventory.previous_revisions import forget_previous_revisions
from corral.controller.inventory.routable import routing_facts
from corral.controller.orders.backend_calls import BackendCalls
from corral.controller.orders.observations import InventoryRead
from corral.controller.registry.reports import tame_text
from corral.controller.runtime.change_feed import ChangeFeed
from corral.controller.runtime.counters import INVENTORY, REPLICAS
from corral.controller.runtime.leadership import Leadership
from corral.kit.clock import Clock
from corral.kit.errors import CorralError, Unreachable
from corral.kit.log import get_log
from corral.kit.tasks import Wake, run_every
from corral.store.engine.transactions import Store, Transaction
from corral.store.tables import backend_intents, node_backends, nodes, revisions
from corral.store.tables.node_backends import Inventory, fingerprint_of
from corral.store.tables.nodes import NodeOutline

log = get_log(__name__)

_LEASE = "inventories"
_AT_ONCE = 64
_KEEP = 100_000


class Inventories:
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
        ask_every_s: float = 60.0,
        look_every_s: float = 5.0,
    ) -> None:
        self._store = store
        self._calls = calls
        self._leadership = leadership
        self._feed = feed
        self._clock = clock
        self._on_unreachable = on_unreachable
        self._flush_s = flush_s
        self._ask_every = timedelta(seconds=ask_every_s)
        self._look_every_s = look_every_s
        self._waiting: dict[str, tuple[float, Inventory]] = {}  # with our second at which it was heard
        self._routing: dict[str, frozenset[object]] = {}  # by node: what gateways would notice, as last heard
        self._dates: dict[
            str, tuple[float, datetime]
        ] = {}  # by node: when it was last heard, by our clock and by SQL's
        self._soon = Wake()
        self.wake = Wake()

    def heard(self, node_id: str, beat: BusHeartbeat) -> None:
        """The last of each node counts."""
        if beat.inventory is None or (len(self._waiting) >= _KEEP and node_id not in self._waiting):
            return
        boot_id, seq = tame_text(beat.boot_id) or "", max(0, min(beat.inventory_seq, 2**62))
        told = Inventory(
            node_id=node_id,
            boot_id=boot_id,
            seq=seq,
            seen_at=self._clock.now(),
            backends=beat.inventory,
            orders=beat.orders or (),
            processes=beat.processes or (),
        )
        self._waiting[node_id] = (self._clock.monotonic(), told)
        # A replica that has just become ready, or is no more, is what requests wait for: it does not.
        routing = routing_facts(told.processes)
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
                run_every("asking for inventories", self._look_every_s, self.ask_due, clock=self._clock, wake=self.wake)
            )

    async def flush(self) -> None:
        batch, self._waiting = self._waiting, {}
        if not batch:
            return
        try:
            async with self._store.read() as tx:
                known = await node_backends.list_fingerprints(tx, list(batch))
                at_work = await backend_intents.list_sent_to(tx, list(batch))
                told = [self._dated(heard_at, row, await tx.now()) for heard_at, row in batch.values()]
            await self._write([row for row in told if known.get(row.node_id) != fingerprint_of(row)])
            same = [row for row in told if row.node_id in at_work and known.get(row.node_id) == fingerprint_of(row)]
            if same:  # what is not in there is known not to be: an order may have been lost
                async with self._store.write() as tx:
                    await node_backends.still_so(tx, same)
        except CorralError:
            self._waiting = batch | self._waiting
            raise

    def _dated(self, heard_at: float, told: Inventory, now: datetime) -> Inventory:
        """By the database's clock. It may have waited here for long, and was no younger for that. What was heard later
        is told later, though asking for the time took longer the first time: else it would look overtaken."""
        at = now - timedelta(seconds=self._clock.monotonic() - heard_at)
        before_heard, before_at = self._dates.get(told.node_id, (heard_at, at))
        if heard_at > before_heard:
            at = max(at, before_at + timedelta(microseconds=1))
        elif heard_at == before_heard:
            at = before_at  # the same beat once more: its writing failed
        if len(self._dates) < _KEEP or told.node_id in self._dates:
            self._dates[told.node_id] = (heard_at, at)
        return msgspec.structs.replace(told, reported_at=at)

    async def ask_due(self) -> None:
        """One controller asks, and those only who would not tell by themselves."""
        if not await self._leadership.lead(_LEASE, every_s=self._look_every_s):
            return
        async with self._store.read() as tx:
            now = await tx.now()
            told = {row.node_id: row for row in await node_backends.list_(tx)}
            due = []
            for outline in await nodes.list_outlines(tx):
                row = told.get(outline.id)
                silent = outline.protocol == 0 and (row is None or now - row.seen_at >= self._ask_every)
                reachable = outline.status == "healthy" and not outline.bus_down and takes_backends(outline)
                if reachable and (silent or not is_current(row, outline)):
                    due.append(outline)
        boots, turn = {outline.id: outline.boot_id for outline in due}, asyncio.Semaphore(_AT_ONCE)
        asking = [asyncio.create_task(self._ask(outline, turn)) for outline in due]
        try:
            while asking:  # no answer waits for those of others: it would be old news by then
                await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
                answers = [looked for task in asking if task.done() and (looked := task.result()) is not None]
                asking = [task for task in asking if not task.done()]
                if answers:
                    await self._write_answers(answers, boots, now)
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    async def _ask(self, outline: NodeOutline, turn: asyncio.Semaphore) -> InventoryRead | None:
        node_id = outline.id
        try:
            async with turn:
                listed = await self._calls.list_backends(node_id, accepts=outline.protocol >= 1)
        except Unreachable:
            await self._on_unreachable(node_id)
        except CorralError as error:  # no answer says nothing about what is there
            log.warning("inventory could not be read", node_id=node_id, error=error.message)
        else:
            return InventoryRead(node_id, listed.backends, listed.seq)
        return None

    async def _write(self, news: list[Inventory]) -> None:
        if not news:
            return
        async with self._store.write() as tx:
            moved = await self._put(tx, news)
        self._touched(moved)

    async def _write_answers(self, answers: list[InventoryRead], boots: Mapping[str, str], asked_at: datetime) -> None:
        """Not those of workers that were started again since; what was written since may be later than they are."""
        async with self._store.write() as tx:
            told = await with_boot(tx, answers)
            moved = await self._put(
                tx, [row for row in told if row.boot_id == boots[row.node_id]], unless_since=asked_at
            )
        self._touched(moved)

    async def _put(self, tx: Transaction, news: list[Inventory], *, unless_since: datetime | None = None) -> bool:
        """Whether gateways would notice."""
        outlines = {each.id: each for each in await nodes.list_outlines(tx, [told.node_id for told in news])}
        kept = [told for told in news if told.node_id in outlines]
        before = await node_backends.list_boots(tx, list(outlines))
        ran = await node_backends.list_processes(tx, list(outlines))
        await node_backends.put_all(tx, kept, unless_since=unless_since)
        now = await node_backends.list_boots(tx, list(outlines))
        # A worker that follows the one on file would look restarted until its heartbeat itself is written.
        await nodes.set_boot_ids(
            tx, {id: boot for id, boot in now.items() if outlines[id].boot_id in ("", before.get(id))}
        )
        moved = any(
            routing_facts(told.processes) != routing_facts(ran[told.node_id].processes if told.node_id in ran else ())
            for told in kept
        )
        await revisions.bump(tx, INVENTORY)
        if moved:
            await forget_previous_revisions(tx, [process for told in kept for process in told.processes])
            await revisions.bump(tx, REPLICAS)
        return moved

    def _touched(self, moved: bool) -> None:
        self._feed.notify(INVENTORY)
        if moved:
            self._feed.notify(REPLICAS)


async def with_boot(tx: Transaction, answers: Sequence[InventoryRead]) -> list[Inventory]:
    """Answers tell no boot, orders or processes: the node has its own, and told those. None for nodes that are gone."""
    ids = [looked.node_id for looked in answers]
    outlines = {outline.id: outline for outline in await nodes.list_outlines(tx, ids)}
    told = {row.node_id: row for row in await node_backends.list_(tx, ids)}
    now = await tx.now()
    return [
        _completed(looked, outlines[looked.node_id], told.get(looked.node_id), now)
        for looked in answers
        if looked.node_id in outlines
    ]


def _completed(looked: InventoryRead, outline: NodeOutline, before: Inventory | None, now: datetime) -> Inventory:
    answer = Inventory(
        node_id=looked.node_id, boot_id=outline.boot_id, seq=looked.seq, seen_at=now, backends=looked.backends
    )
    if before is None:
        return answer
    if not is_current(before, outline):
        # It says nothing of what runs, and a worker that was started again has most likely adopted it: until it tells,
        # which shows by its having told something, what ran before is the best that is known.
        return msgspec.structs.replace(answer, processes=before.processes)
    if outline.protocol == 0:  # names come from galleries, and those may not have answered this time
        named = {row.name: row.alias for row in before.backends}
        rows = [msgspec.structs.replace(row, alias=row.alias or named.get(row.name, "")) for row in answer.backends]
        answer = msgspec.structs.replace(answer, backends=tuple(rows))
    return msgspec.structs.replace(
        answer, orders=before.orders, processes=before.processes, reported_at=before.reported_at
    )
