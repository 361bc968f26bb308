"""Brings about what the rules say: reads the world, asks `decide`, writes, and sends
(docs/explanation/design.md#rules).

One controller does it at a time, under a lease; every write is fenced by it. A pass is one transaction: what was heard
since the last one, what it changes, and the claims of the orders that follow. The orders go out after the commit; if we
die in between, whoever holds the lease next finds them claimed under an older epoch and sends them again, as the same
attempt. Safe to call at any time, any number of times, for any reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from corral.bus.api import Bus
from corral.contract.messages.backends import DELETE_RESULT, INSTALL_RESULT, UPGRADE_RESULT
from corral.controller.backends.catalogue import Catalogue
from corral.controller.backends.decide import Decided, Terms, decide
from corral.controller.backends.outcomes import Retry
from corral.controller.backends.plan import Step
from corral.controller.backends.targets import Targets
from corral.controller.backends.world import World, read_world
from corral.controller.inventory.collector import with_boot
from corral.controller.orders.backend_calls import BackendCalls
from corral.controller.orders.dispatch import CallLimits, Dispatch
from corral.controller.orders.observations import InventoryRead, Observation
from corral.controller.orders.order import BackendOrder
from corral.controller.registry.changes import NodeChanges
from corral.controller.runtime.change_feed import ChangeFeed
from corral.controller.runtime.counters import INVENTORY, RULES
from corral.controller.runtime.leadership import Leadership
from corral.kit.clock import Clock
from corral.kit.log import get_log
from corral.kit.tasks import Wake, run_every
from corral.store.engine.transactions import Store, Transaction
from corral.store.records import BackendIntent
from corral.store.tables import backend_intents, node_backends, nodes, operation_nodes, revisions

log = get_log(__name__)

LEASE = "reconcile"
_OVERLAP = timedelta(seconds=2)  # a change is stamped a little before it is committed


@dataclass(frozen=True)
class Pace:
    every_s: float = 30.0  # every node is looked at, whatever was heard
    renew_s: float = 5.0  # the lease
    rest_s: float = 0.05  # between two passes, so that what comes together is handled together
    first_retry_s: float = 30.0
    last_retry_s: float = 900.0

    @property
    def retry(self) -> Retry:
        return Retry(timedelta(seconds=self.first_retry_s), timedelta(seconds=self.last_retry_s))


# In the reconciler's transaction; True if anything changed that users see. The operations do it: they know of us, not
# we of them.
RecordSteps = Callable[
    [Transaction, World, Mapping[str, Sequence[Step]], Mapping[tuple[str, str], BackendIntent]], Awaitable[bool]
]


class Reconciler:
    name = "reconcile"

    def __init__(
        self,
        store: Store,
        bus: Bus,
        calls: BackendCalls,
        catalogue: Catalogue,
        leadership: Leadership,
        changes: NodeChanges,
        feed: ChangeFeed,
        clock: Clock,
        *,
        record_steps: RecordSteps,
        pace: Pace | None = None,
        limits: CallLimits | None = None,
    ) -> None:
        """`record_steps` writes what the steps mean for the operations that users watch."""
        self._store = store
        self._record_steps = record_steps
        self._bus = bus
        self._calls = calls
        self._leadership = leadership
        self._feed = feed
        self._clock = clock
        self._pace = pace or Pace()
        self._wake = Wake()
        self._heard: list[Observation] = []
        self._looked: dict[str, InventoryRead] = {}
        self._everybody = True
        self._nodes_moved = True
        self._everybody_at: datetime | None = None
        self._looked_at: datetime | None = None
        self._news: dict[tuple[str, str], object] = {}  # what changed lately, as it was when we looked
        self._rolling: frozenset[str] = frozenset()  # operations that go node by node
        self._alarm: asyncio.TimerHandle | None = None
        self.leading = False
        self.dispatch = Dispatch(
            calls, on_observation=self.on_observation, on_unreachable=changes.mark_unreachable, limits=limits
        )
        self.targets = Targets(store, catalogue, clock, found=self.look_at_everybody, retry=self._pace.retry)

    # Who may wake us.

    def look_at_everybody(self) -> None:
        """A rule is new, a build was found, time has passed."""
        self._everybody = True
        self._wake.set()

    def look_at_what_changed(self) -> None:
        """A node or an inventory changed; the store knows which."""
        self._nodes_moved = True
        self._wake.set()

    def on_observation(self, observation: Observation, looked: InventoryRead | None) -> None:
        self._heard.append(observation)
        if looked is not None:
            self._looked[looked.node_id] = looked
        self._wake.set()

    # The loop.

    async def run(self) -> None:
        forget = self._bus.on_change(lambda _: self.look_at_everybody())
        self._feed.on(RULES, self.look_at_everybody)
        self._feed.on("nodes", self.look_at_what_changed)
        self._feed.on(INVENTORY, self.look_at_what_changed)
        try:
            async with self.dispatch, self.targets:
                for event in (INSTALL_RESULT, UPGRADE_RESULT, DELETE_RESULT):
                    await self._bus.subscribe(event, self.dispatch.on_result)
                await run_every(self.name, self._pace.renew_s, self._paced, clock=self._clock, wake=self._wake)
        finally:
            forget()
            if self._alarm is not None:
                self._alarm.cancel()

    async def _paced(self) -> None:
        await self.look()
        await self._clock.sleep(self._pace.rest_s)

    async def look(self) -> None:
        self.leading = await self._leadership.lead(LEASE)
        if not self.leading:
            self._heard.clear()  # whoever leads finds it out from the heartbeats
            self._looked.clear()
            self._everybody = True
            return
        if self._bus.connected:  # without it nothing could be ordered, and everything would look as if it had failed
            await self._pass()

    async def _pass(self) -> None:
        heard, self._heard = self._heard, []
        looked, self._looked = self._looked, {}
        everybody, self._everybody = self._everybody, False
        try:
            with self._leadership.resign_if_unknown(LEASE):
                world, decided = await self._decide_and_write(heard, looked.values(), everybody)
        except BaseException:
            self._heard = heard + self._heard
            self._looked = looked | self._looked
            self._everybody = self._everybody or everybody
            raise
        if world is None or decided is None:
            return
        if decided.sends:
            first, count = decided.sends[0][1], len(decided.sends)
            log.info("orders go out", count=count, first=f"{first.kind} {first.backend}", operation=first.operation)
        for node_id, send in decided.sends:
            target = world.target_of(node_id, send.backend)
            node = world.nodes[node_id]
            self.dispatch.send(
                BackendOrder(
                    node_id=node_id,
                    accepts=node.accepts,
                    boot_id=node.boot_id,
                    send=send,
                    asked=world.asked[send.generation],
                    build=target.build if target is not None else None,
                    in_place=node.accepts and world.ends_first(node_id, send.backend),
                )
            )
        for order, keep in decided.stops.items():
            self.dispatch.stop(order, keep=keep)
        self.targets.look_up(world.missing, whole=self._everybody_at == self._looked_at)

    async def _decide_and_write(
        self, heard: list[Observation], looked: Collection[InventoryRead], everybody: bool
    ) -> tuple[World | None, Decided | None]:
        told = False
        async with self._store.write() as tx:
            await self._leadership.require(tx, LEASE)
            await revisions.hold(tx, RULES)
            now = await tx.now()
            await self._keep_inventories(tx, looked)
            news = await self._read_news(tx)
            node_ids = await self._whom(tx, now, heard, everybody, news)
            if node_ids is not None and not node_ids:
                await self._set_alarm(tx, now)
                return None, None
            world = await read_world(tx, node_ids, self.targets.looking, {each.node_id for each in looked})
            terms = Terms(
                self._leadership.epoch(LEASE),
                self._calls.answer_within_s,
                self.dispatch.free_slow_calls,
                self._pace.retry,
            )
            decided = decide(world, heard, terms)
            await backend_intents.put(tx, decided.intents.values())
            told = await self._record_steps(tx, world, decided.steps, decided.intents)
            await self._set_alarm(tx, now)
            if told:
                await revisions.bump(tx, "operations")
        self._looked_at, self._news = now, news
        if node_ids is None:
            self._everybody_at = now
        self._rolling = frozenset(
            want.operation
            for own in world.wanted.values()
            for want in own.values()
            if getattr(want, "max_parallel", "") and want.generation in world.peers
        )
        if told:
            self._feed.notify("operations")
        return world, decided

    async def _whom(
        self,
        tx: Transaction,
        now: datetime,
        heard: list[Observation],
        everybody: bool,
        news: dict[tuple[str, str], object],
    ) -> list[str] | None:
        """Nodes something may have happened to; None = all."""
        long_ago = self._everybody_at is None or now - self._everybody_at >= timedelta(seconds=self._pace.every_s)
        if everybody or long_ago or self._looked_at is None:
            return None
        found = {observation.order.node_id for observation in heard}
        found.update(await backend_intents.list_due(tx, now))
        found.update(key[1] for key, version in news.items() if self._news.get(key) != version)
        if found:
            for operation in sorted(self._rolling):
                found.update(row.node_id for row in await operation_nodes.list_(tx, operation))
        found.update(row.node_id for row in await operation_nodes.list_orphans(tx))
        return sorted(found)

    async def _read_news(self, tx: Transaction) -> dict[tuple[str, str], object]:
        """Of nodes and inventories, since a little before we last looked; the same again is no news."""
        if self._looked_at is None:
            return {}
        since = self._looked_at - _OVERLAP
        changed = (("node", await nodes.list_changed(tx, since)), ("told", await node_backends.list_changed(tx, since)))
        return {(what, node_id): version for what, found in changed for node_id, version in found.items()}

    async def _keep_inventories(self, tx: Transaction, looked: Iterable[InventoryRead]) -> None:
        await node_backends.put_all(tx, await with_boot(tx, list(looked)))

    async def _set_alarm(self, tx: Transaction, now: datetime) -> None:
        """Wake when the next try is due, by the database's clock."""
        due = await backend_intents.next_due(tx, now)
        waits = [(due - now).total_seconds()] if due is not None else []
        retry_s = self.targets.next_try_s()
        if retry_s is not None:
            waits.append(retry_s)
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = None
        if waits and min(waits) < self._pace.every_s:
            self._alarm = asyncio.get_running_loop().call_later(max(0.05, min(waits)), self._alarmed)

    def _alarmed(self) -> None:
        if self.targets.next_try_s() == 0.0:
            self._everybody = True
        self._wake.set()
