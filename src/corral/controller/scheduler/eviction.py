"""Eviction: chooses the replicas to end so that another one fits. Pure.

Replicas are evicted only where nothing else blocks the new one (their memory, or a concurrency group), on one node, and
no more of them than necessary: one of several of a model before its last, and the least recently used first. A busy
or pinned replica, or one that a schedule requires, is never evicted
(docs/explanation/invariants.md#8-automation-is-limited),
and the decision names the reason. If time alone solves it, the decision is to wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from functools import cached_property

from corral.controller.scheduler.placement import NoCapacity, Placed, Verdict, choose_node, evaluate_node
from corral.controller.scheduler.world import Model, Node, Replica, ReplicaState, World

MAX_NODES_COMPARED = 32


class Purpose(StrEnum):
    """What a new replica is for, which decides what may be evicted for it."""

    COLD = "cold"  # requests wait, and no replica is ready
    MINIMUM = "minimum"  # there are fewer than the schedule's minimum
    GROWTH = "growth"  # there are enough, but all are busy: no other model goes cold for that
    SWITCH = "switch"  # its only node has to end it for a while: neither does one for that


@dataclass(frozen=True)
class EvictFirst:
    """End the victims, in this order; then decide again. `placed` is where the replica should fit then."""

    victims: tuple[Replica, ...]
    placed: Placed
    text: str

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        return self.placed.verdicts


@dataclass(frozen=True)
class WaitForCapacity:
    """Decide again later: memory comes back by itself, requests have to end first, or a build lookup is running."""

    text: str
    verdicts: tuple[Verdict, ...]


Decision = Placed | EvictFirst | WaitForCapacity | NoCapacity


def choose_placement(
    world: World, model: Model, purpose: Purpose = Purpose.COLD, *, only: Collection[str] | None = None
) -> Decision:
    """Where one more replica of the model goes, or what has to happen first."""
    found = choose_node(world, model, only=only)
    if isinstance(found, Placed):
        return found
    nodes = [world.nodes[verdict.node_id] for verdict in found.verdicts if verdict.blocked_by_replicas]
    if not nodes:
        waits = any(verdict.waits_for_lookup for verdict in found.verdicts)
        return WaitForCapacity(found.text, found.verdicts) if waits else found
    return _wait_for_stopping(world, model, nodes, found) or _evict(world, model, purpose, nodes, found)


def _wait_for_stopping(world: World, model: Model, nodes: Sequence[Node], now: NoCapacity) -> WaitForCapacity | None:
    """Wait for the memory of replicas that are stopping already, instead of evicting others."""
    stopping = _stopping(world, nodes)
    if not stopping:
        return None
    later = choose_node(world, model, without={replica.key for replica in stopping}, only={node.id for node in nodes})
    if isinstance(later, NoCapacity):
        return None
    names = _names(replica for replica in stopping if replica.node_id == later.node_id)
    return WaitForCapacity(f"{later.node}: waits for {names} to stop", now.verdicts)


def _evict(
    world: World, model: Model, purpose: Purpose, nodes: Sequence[Node], now: NoCapacity
) -> EvictFirst | WaitForCapacity | NoCapacity:
    rules = EvictionRules(world, model, purpose)
    if (best := _cheapest(world, model, nodes, rules, if_waited=False)) is not None:
        ended = {replica.key for replica in (*best.victims, *_stopping(world, [best.node]))}
        then = choose_node(world, model, without=ended, only={best.node.id})
        if isinstance(then, Placed):
            text = f"{best.node.name}: evicts {_names(best.victims)} first"
            return EvictFirst(best.victims, replace(then, verdicts=now.verdicts), text)
    if (best := _cheapest(world, model, nodes, rules, if_waited=True)) is not None:
        reasons = "; ".join(filter(None, map(rules.sentence, best.victims)))
        return WaitForCapacity(f"{best.node.name}: waits, because {reasons}", now.verdicts)
    kept = {rules.sentence(replica) for node in nodes for replica in world.on_node.get(node.id, ())}
    return replace(now, kept=tuple(sorted(kept - {""})))


@dataclass(frozen=True)
class _Eviction:
    node: Node
    victims: tuple[Replica, ...]


def _cheapest(
    world: World, model: Model, nodes: Sequence[Node], rules: EvictionRules, *, if_waited: bool
) -> _Eviction | None:
    """Nodes whose idle replicas were unused the longest come first; once some suffice, the rest of a large fleet is
    skipped."""

    def oldest(node: Node) -> tuple[float, str]:
        there = world.on_node.get(node.id, ())
        going = [_last_use(each)[0] for each in there if rules.can_evict(each, if_waited=if_waited)]
        return (min(going, default=float("inf")), node.name)

    ranked = sorted(((oldest(node), node) for node in nodes), key=lambda each: each[0])
    plans: list[_Eviction] = []
    for number, ((at, _), node) in enumerate(ranked, 1):
        if at == float("inf") or (plans and number > MAX_NODES_COMPARED):
            break
        if (plan := _plan(world, model, node, rules, if_waited=if_waited)) is not None:
            plans.append(plan)
    return min(plans, key=rules.cost, default=None)


def _plan(world: World, model: Model, node: Node, rules: EvictionRules, *, if_waited: bool) -> _Eviction | None:
    """Enough victims on one node; None: all that can be evicted are not enough."""
    stopping = {replica.key for replica in _stopping(world, [node])}
    victims: list[Replica] = []
    for candidate in sorted(world.on_node.get(node.id, ()), key=rules.order):
        if rules.can_evict(candidate, victims, if_waited=if_waited):
            victims.append(candidate)
            if _fits(world, model, node, stopping, victims):
                return _Eviction(node, _needed(world, model, node, stopping, victims))
    return None


def _needed(
    world: World, model: Model, node: Node, stopping: Collection[tuple[str, str, int]], victims: Sequence[Replica]
) -> tuple[Replica, ...]:
    """The victims without those that are not necessary, of which the most recently used are kept first."""
    needed = list(victims)
    for candidate in reversed(victims):
        fewer = [victim for victim in needed if victim is not candidate]
        if _fits(world, model, node, stopping, fewer):
            needed = fewer
    return tuple(needed)


def _fits(
    world: World, model: Model, node: Node, stopping: Collection[tuple[str, str, int]], victims: Iterable[Replica]
) -> bool:
    return evaluate_node(world, model, node, {*stopping, *(victim.key for victim in victims)}).eligible


@dataclass(frozen=True)
class EvictionRules:
    """Whether a replica can be evicted for another model, and the reason if not."""

    world: World
    model: Model  # that needs the memory
    purpose: Purpose

    @cached_property
    def answering(self) -> Counter[str]:
        """By model, the replicas that are ready on healthy nodes."""
        return Counter(replica.model for replica in self.world.replicas if can_answer(self.world, replica))

    def can_evict(self, replica: Replica, chosen: Sequence[Replica] = (), *, if_waited: bool = False) -> bool:
        """`chosen` go already; patient: as if everything that only takes time had come to pass."""
        if self._permanent_reason(replica, chosen):
            return False
        return if_waited or not self._temporary_reason(replica, chosen)

    def why(self, replica: Replica) -> str:
        """Why it cannot be evicted; empty: it can."""
        return self._permanent_reason(replica, ()) or self._temporary_reason(replica, ())

    def sentence(self, replica: Replica) -> str:
        reason = self.why(replica)
        return f"{replica.model} {reason}" if reason else ""

    def order(self, replica: Replica) -> tuple[bool, tuple[float, str, int]]:
        """The sort key of victims."""
        return (self._remaining(replica, ()) < 1, _last_use(replica))

    def cost(self, plan: _Eviction) -> tuple[int, float, int, str]:
        """How many models lose their last replica, how recently they were used, how many replicas end."""
        going = Counter(victim.model for victim in plan.victims)
        last = sum(self.answering[name] <= count for name, count in going.items())
        return (last, max(_last_use(victim)[0] for victim in plan.victims), len(plan.victims), plan.node.name)

    def _remaining(self, replica: Replica, chosen: Sequence[Replica]) -> int:
        """How many replicas of its model would still be ready."""
        going = [victim for victim in (*chosen, replica) if victim.model == replica.model]
        return self.answering[replica.model] - sum(can_answer(self.world, victim) for victim in going)

    def _permanent_reason(self, replica: Replica, chosen: Sequence[Replica]) -> str:
        if replica.state is ReplicaState.STOPPING:
            return "is stopping"
        if replica.model == self.model.name:
            return "is the model itself"
        own = self.world.models.get(replica.model)
        if own is None:  # its model was deleted: no request can name it
            return ""
        if own.pinned:
            return "is pinned"
        if own.schedule.spread_all:
            return "runs on every node by its schedule"
        left, least = self._remaining(replica, chosen), own.schedule.min_replicas
        if left < least:
            return f"has {self.answering[own.name]} replicas and needs {least}"
        if self.purpose in (Purpose.GROWTH, Purpose.SWITCH) and left < 1:
            return "would lose its last replica"
        return ""

    def _temporary_reason(self, replica: Replica, chosen: Sequence[Replica]) -> str:
        policy, now = self.world.policy, self.world.now
        if replica.state is ReplicaState.STARTING:
            return "is starting"
        if not replica.activity_known:
            return "may be busy: its node has not reported its requests yet"
        if not replica.idle:
            return f"is busy with {replica.in_flight} request{'s' if replica.in_flight > 1 else ''}"
        own = self.world.models.get(replica.model)
        if own is not None and _is_awaited(self.world, own, replica) and self._remaining(replica, chosen) < 1:
            return f"has {own.waiting} request{'s' if own.waiting > 1 else ''} waiting for it"
        if _within(replica.last_used_at, policy.evict_after_idle_s, now):
            return "was used a moment ago"
        if _within(replica.ready_at, policy.evict_after_ready_s, now):
            return "was loaded a moment ago"
        return ""


def _is_awaited(world: World, own: Model, replica: Replica) -> bool:
    """Whether requests wait for it, or a load that it completes. A load that has no node yet does not keep the replica
    it replaces: two edited models that block each other would wait for each other forever. Once the new one starts, the
    earlier one may serve until it is ready."""
    if replica.revision == own.revision or not own.only_load_waits:
        return own.waiting > 0
    starting = (each for each in world.of_model.get(own.name, ()) if each.state is ReplicaState.STARTING)
    return any(each.revision == own.revision for each in starting)


def can_answer(world: World, replica: Replica) -> bool:
    """Whether it is ready on a healthy node. A node whose bus connection is down still serves."""
    node = world.nodes.get(replica.node_id)
    return replica.state is ReplicaState.READY and node is not None and node.status == "healthy"


def _within(at: datetime | None, span_s: float, now: datetime) -> bool:
    return at is not None and now < at + timedelta(seconds=span_s)


def _stopping(world: World, nodes: Iterable[Node]) -> list[Replica]:
    return [
        replica
        for node in nodes
        for replica in world.on_node.get(node.id, ())
        if replica.state is ReplicaState.STOPPING
    ]


def _last_use(replica: Replica) -> tuple[float, str, int]:
    at = replica.unused_since()
    return (at.timestamp() if at is not None else 0.0, replica.model, replica.index)


def _names(replicas: Iterable[Replica]) -> str:
    return ", ".join(sorted({replica.model for replica in replicas}))
