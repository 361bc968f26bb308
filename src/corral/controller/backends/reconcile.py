"""Reconciles the backends of all nodes with the rules: reads the world, calls `decide`, writes, and sends orders
(docs/explanation/design.md#rules).

One controller reconciles at a time, under a lease that fences every write. A pass is one transaction: it applies the
observations since the last pass, and claims the orders that follow from them. The orders are sent after the commit. If
the controller dies in between, the next leader finds them claimed under an older epoch and sends them again, as the
same attempts. A pass is safe at any time, any number of times.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta

from corral.bus.api import Bus
from corral.contract.messages.backends import DELETE_RESULT, INSTALL_RESULT, UPGRADE_RESULT
from corral.controller.backends.catalogue import Catalogue
from corral.controller.backends.decide import Decided, DecisionInputs, decide
from corral.controller.backends.outcomes import RetryPolicy
from corral.controller.backends.plan import Step
from corral.controller.backends.targets import TargetResolver
from corral.controller.backends.world import World, read_world
from corral.controller.inventory.collector import complete_inventories
from corral.controller.orders.backend_calls import BackendCalls, CallLimits, Dispatch
from corral.controller.orders.observations import InventoryRead, Observation
from corral.controller.orders.order import BackendOrder
from corral.controller.registry.changes import NodeChanges
from corral.controller.rollouts.evidence import Judgements, read_judgements
from corral.controller.rollouts.plan import Held
from corral.controller.runtime.change_feed import INVENTORY, LOADS, RULES, ChangeFeed
from corral.controller.runtime.leadership import Leadership
from corral.controller.settings.backends import BackendSettings
from corral.kit.clock import Clock
from corral.kit.log import get_log
from corral.kit.tasks import Wake, run_every
from corral.store.engine.transactions import Store, Transaction
from corral.store.records import BackendIntent, Rollout, RolloutPhase
from corral.store.tables import (
    backend_intents,
    due_switches,
    node_backends,
    nodes,
    operation_nodes,
    revisions,
    rollouts,
)

log = get_log(__name__)

LEASE = "reconcile"
SOAK_TICK_S = 2.0  # between two looks at what a canary served, or whether another node has taken over
_OVERLAP = timedelta(seconds=2)  # the timestamp of a change is a little older than its commit


# Called in the reconciler's transaction; True if anything changed that users see. `controller/operations` implements
# it: that package imports this one.
RecordSteps = Callable[
    [
        Transaction,
        World,
        Mapping[str, Sequence[Step]],
        Mapping[tuple[str, str], BackendIntent],
        Mapping[tuple[str, str], Held],
    ],
    Awaitable[bool],
]
# The same, of a rollout whose nodes return to their previous version; returns the rollout to store.
RevertRollout = Callable[[Transaction, World, Mapping[tuple[str, str], BackendIntent], Rollout], Awaitable[Rollout]]


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
        settings: BackendSettings,
        *,
        record_steps: RecordSteps,
        revert_rollout: RevertRollout,
        renew_s: float = 5.0,
        rest_s: float = 0.05,
        limits: CallLimits | None = None,
    ) -> None:
        """`record_steps` applies the steps to the operations that users watch, `revert_rollout` requests the previous
        versions. `renew_s`: between two renewals of the
        lease. `rest_s`: after a pass, so that what arrives in this time is handled together."""
        self._store = store
        self._record_steps = record_steps
        self._revert_rollout = revert_rollout
        self._bus = bus
        self._calls = calls
        self._leadership = leadership
        self._feed = feed
        self._clock = clock
        self._settings = settings
        self._retry = RetryPolicy(timedelta(seconds=settings.retry_first_s), timedelta(seconds=settings.retry_cap_s))
        self._renew_s = renew_s
        self._rest_s = rest_s
        self._wake = Wake()
        self._observations: list[Observation] = []
        self._inventories: dict[str, InventoryRead] = {}
        self._all_due = True
        self._nodes_changed = True
        self._all_reconciled_at: datetime | None = None
        self._reconciled_at: datetime | None = None
        self._versions: dict[
            tuple[str, str], object
        ] = {}  # of nodes and inventories that changed lately, as of the last pass
        self._rolling: frozenset[str] = frozenset()  # operations that switch node by node
        self._timer: asyncio.TimerHandle | None = None
        self._is_soaking = False
        self._is_switch_due = False
        self._judgements: Judgements = {}
        self._judged_at = 0.0
        self.leading = False
        self.dispatch = Dispatch(
            calls, on_observation=self.on_observation, on_unreachable=changes.mark_unreachable, limits=limits
        )
        self.targets = TargetResolver(store, catalogue, clock, on_found=self.reconcile_all, retry=self._retry)

    # Triggers.

    def reconcile_all(self) -> None:
        """Wake the loop for all nodes: there is a new rule or a new build, or the bus connection changed."""
        self._all_due = True
        self._wake.set()

    def reconcile_changed(self) -> None:
        """Wake the loop: a node or an inventory changed, and the store knows which."""
        self._nodes_changed = True
        self._wake.set()

    def _on_loads(self) -> None:
        """No node may be able to take over what a due switch waits for."""
        if self._is_switch_due:
            self.reconcile_changed()

    def on_observation(self, observation: Observation, inventories: InventoryRead | None) -> None:
        self._observations.append(observation)
        if inventories is not None:
            self._inventories[inventories.node_id] = inventories
        self._wake.set()

    # The loop.

    async def run(self) -> None:
        forget = self._bus.on_change(lambda _: self.reconcile_all())
        self._feed.on(RULES, self.reconcile_all)
        self._feed.on("nodes", self.reconcile_changed)
        self._feed.on(INVENTORY, self.reconcile_changed)
        self._feed.on(LOADS, self._on_loads)
        try:
            async with self.dispatch, self.targets:
                for event in (INSTALL_RESULT, UPGRADE_RESULT, DELETE_RESULT):
                    await self._bus.subscribe(event, self.dispatch.on_result)
                await run_every(self.name, self._renew_s, self._reconcile_and_rest, clock=self._clock, wake=self._wake)
        finally:
            forget()
            if self._timer is not None:
                self._timer.cancel()

    async def _reconcile_and_rest(self) -> None:
        await self.reconcile_once()
        await self._clock.sleep(self._rest_s)

    async def reconcile_once(self) -> None:
        self.leading = await self._leadership.lead(LEASE)
        if not self.leading:
            self._observations.clear()  # the leader learns the outcomes from heartbeats
            self._inventories.clear()
            self._all_due = True
            return
        if self._bus.connected:  # otherwise every order would fail
            await self._pass()

    async def _pass(self) -> None:
        observations, self._observations = self._observations, []
        inventories, self._inventories = self._inventories, {}
        all_nodes, self._all_due = self._all_due, False
        try:
            with self._leadership.resign_if_unknown(LEASE):
                world, decided = await self._decide_and_write(observations, inventories.values(), all_nodes)
        except BaseException:
            self._observations = observations + self._observations
            self._inventories = inventories | self._inventories
            self._all_due = self._all_due or all_nodes
            raise
        if world is None or decided is None:
            return
        if decided.sends:
            first, count = decided.sends[0][1], len(decided.sends)
            log.info("sending orders", count=count, first=f"{first.kind} {first.backend}", operation=first.operation)
        for node_id, send in decided.sends:
            target = world.target_of(node_id, send.backend)
            node = world.nodes[node_id]
            self.dispatch.send(
                BackendOrder(
                    node_id=node_id,
                    accepts=node.accepts,
                    boot_id=node.boot_id,
                    send=send,
                    request=world.requests[send.generation],
                    build=target.build if target is not None else None,
                    in_place=node.accepts and world.ends_first(node_id, send.backend),
                )
            )
        for order, keep in decided.stops.items():
            self.dispatch.stop(order, keep=keep)
        self.targets.look_up(world.missing, whole=self._all_reconciled_at == self._reconciled_at)

    async def _decide_and_write(
        self, observations: list[Observation], inventories: Collection[InventoryRead], all_nodes: bool
    ) -> tuple[World | None, Decided | None]:
        has_changes = False
        judgements = await self._read_judgements()
        async with self._store.write() as tx:
            await self._leadership.require(tx, LEASE)
            await revisions.hold(tx, RULES)
            now = await tx.now()
            await self._store_inventories(tx, inventories)
            versions = await self._read_versions(tx)
            node_ids = await self._nodes_to_reconcile(
                tx, now, observations, all_nodes, versions, is_soaking=bool(judgements) or self._is_switch_due
            )
            if node_ids is not None and not node_ids:
                await self._set_timer(tx, now)
                return None, None
            world = await read_world(tx, node_ids, self.targets.lookup_state, {each.node_id for each in inventories})
            terms = DecisionInputs(
                self._leadership.epoch(LEASE),
                self._calls.answer_within_s,
                self.dispatch.free_slow_calls,
                self._retry,
                judgements,
            )
            decided = decide(world, observations, terms)
            await backend_intents.put(tx, decided.intents.values())
            has_changes = await self._record_steps(tx, world, decided.steps, decided.intents, decided.soaking)
            has_reverts = await self._store_rollouts(tx, world, decided)
            has_new_switches = await self._store_due_switches(tx, world, decided)
            self._is_soaking = bool(decided.soaking)
            await self._set_timer(tx, now)
            has_changes = has_changes or bool(decided.rollouts)
            if has_changes:
                await revisions.bump(tx, "operations")
        self._reconciled_at, self._versions = now, versions
        if node_ids is None:
            self._all_reconciled_at = now
        self._rolling = frozenset(
            want.operation
            for own in world.wanted.values()
            for want in own.values()
            if getattr(want, "max_parallel", "") and want.generation in world.peers
        )
        if has_changes:
            self._feed.notify("operations")
        if has_reverts:
            self._feed.notify(RULES)
        if has_new_switches:
            self._feed.notify(LOADS)
        return world, decided

    async def _read_judgements(self) -> Judgements:
        """Before the write transaction, and not with every pass: reading what canaries served takes a while."""
        async with self._store.read() as tx:
            active = await rollouts.list_active(tx)
            soaking = {(row.operation_id, each.canary) for row in active for each in row.classes if each.soaking}
            age_s = self._clock.monotonic() - self._judged_at
            if self._judgements.keys() != soaking or not 0 <= age_s < SOAK_TICK_S / 2:
                self._judgements = await read_judgements(tx, active)
                self._judged_at = self._clock.monotonic()
        return self._judgements

    async def _store_rollouts(self, tx: Transaction, world: World, decided: Decided) -> bool:
        """True if nodes have to return to their previous version."""
        reverting = False
        for rollout in decided.rollouts:
            if rollout.phase is RolloutPhase.REVERTED:
                log.warning(
                    "rollout is reverted",
                    operation=rollout.operation_id,
                    backend=rollout.subject,
                    verdict=rollout.verdict,
                )
                rollout, reverting = await self._revert_rollout(tx, world, decided.intents, rollout), True
            await rollouts.put(tx, rollout)
        return reverting

    async def _store_due_switches(self, tx: Transaction, world: World, decided: Decided) -> bool:
        """True if replicas have to be planned for them."""
        self._is_switch_due = bool(decided.due)
        gone = {
            key
            for key, row in world.due.items()
            if key not in decided.due or decided.due[key].operation_id != row.operation_id
        }
        changed = [row for key, row in decided.due.items() if key in gone or world.due.get(key) != row]
        await due_switches.delete(tx, sorted(gone))
        await due_switches.put(tx, changed)
        for row in changed:
            log.info("processes end before a switch", node_id=row.node_id, backend=row.backend, models=row.models)
        if gone or changed:
            await revisions.bump(tx, LOADS)
        return bool(gone or changed)

    async def _nodes_to_reconcile(
        self,
        tx: Transaction,
        now: datetime,
        observations: list[Observation],
        all_nodes: bool,
        versions: dict[tuple[str, str], object],
        *,
        is_soaking: bool,
    ) -> list[str] | None:
        """The nodes that something may have happened to; None = all."""
        overdue = self._all_reconciled_at is None or now - self._all_reconciled_at >= timedelta(
            seconds=self._settings.reconcile_interval_s
        )
        if all_nodes or overdue or self._reconciled_at is None:
            return None
        found = {observation.order.node_id for observation in observations}
        found.update(await backend_intents.list_due(tx, now))
        found.update(key[1] for key, version in versions.items() if self._versions.get(key) != version)
        if found or is_soaking:
            for operation in sorted(self._rolling):
                found.update(row.node_id for row in await operation_nodes.list_(tx, operation))
        if self._is_switch_due:
            found.update(row.node_id for row in await due_switches.list_(tx))
        found.update(row.node_id for row in await operation_nodes.list_orphans(tx))
        return sorted(found)

    async def _read_versions(self, tx: Transaction) -> dict[tuple[str, str], object]:
        """The versions of nodes and inventories that changed since shortly before the last pass. The overlap lists some
        changes twice; the caller compares the versions."""
        if self._reconciled_at is None:
            return {}
        since = self._reconciled_at - _OVERLAP
        changed = (
            ("node", await nodes.list_changed(tx, since)),
            ("inventory", await node_backends.list_changed(tx, since)),
        )
        return {(what, node_id): version for what, found in changed for node_id, version in found.items()}

    async def _store_inventories(self, tx: Transaction, inventories: Iterable[InventoryRead]) -> None:
        await node_backends.put_all(tx, await complete_inventories(tx, list(inventories)))

    async def _set_timer(self, tx: Transaction, now: datetime) -> None:
        """Wake the loop when the next attempt is due, by the database's clock."""
        due = await backend_intents.next_due(tx, now)
        waits = [(due - now).total_seconds()] if due is not None else []
        retry_s = self.targets.next_try_s()
        if retry_s is not None:
            waits.append(retry_s)
        if self._is_soaking or self._is_switch_due:
            waits.append(SOAK_TICK_S)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if waits and min(waits) < self._settings.reconcile_interval_s:
            self._timer = asyncio.get_running_loop().call_later(max(0.05, min(waits)), self._on_timer)

    def _on_timer(self) -> None:
        if self.targets.next_try_s() == 0.0:
            self._all_due = True
        self._wake.set()
