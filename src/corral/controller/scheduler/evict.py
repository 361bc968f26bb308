"""Making room: which replicas have to give way so that another fits. Pure.

Only where nothing but other replicas is in the way (their memory, or a concurrency group), on one node, and no more of
them than it takes: rather one of several of a model than its last, and the least recently used first. Never one that is
busy, pinned, or needed by what people asked for (docs/explanation/invariants.md#8-automation-is-limited): what keeps
each is told. If it is only a question of time, the answer is to wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from functools import cached_property

from corral.controller.scheduler.place import NoRoom, Placed, Verdict, judge, place
from corral.controller.scheduler.world import Model, Node, Replica, ReplicaState, World

_ENOUGH_NODES = 32


class Purpose(StrEnum):
    """What a new replica is for: how much may be given up for it."""

    COLD = "cold"  # somebody asked, and nothing answers
    MINIMUM = "minimum"  # there are fewer than people said
    GROWTH = "growth"  # there are enough, and they are busy: no other model goes cold for that


@dataclass(frozen=True)
class MakeRoom:
    """End these, in this order; then look again. `placed` is where it will fit, as far as anybody can say now."""

    victims: tuple[Replica, ...]
    placed: Placed
    text: str

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        return self.placed.verdicts


@dataclass(frozen=True)
class WaitForRoom:
    """Nothing to do but look again: memory comes back by itself, somebody has to finish first, or a build is being
    looked up."""

    text: str
    verdicts: tuple[Verdict, ...]


Decision = Placed | MakeRoom | WaitForRoom | NoRoom


def choose_place(
    world: World, model: Model, purpose: Purpose = Purpose.COLD, *, only: Collection[str] | None = None
) -> Decision:
    """Where one more replica of it goes, or what has to happen first."""
    found = place(world, model, only=only)
    if isinstance(found, Placed):
        return found
    nodes = [world.nodes[verdict.node_id] for verdict in found.verdicts if verdict.only_replicas]
    if not nodes:
        looking = any(verdict.only_looking for verdict in found.verdicts)
        return WaitForRoom(found.text, found.verdicts) if looking else found
    return _wait_for_the_ending(world, model, nodes, found) or _make_room(world, model, purpose, nodes, found)


def _wait_for_the_ending(world: World, model: Model, nodes: Sequence[Node], now: NoRoom) -> WaitForRoom | None:
    """Memory of those that are ending already: nobody else has to go for what they leave."""
    ending = _ending(world, nodes)
    if not ending:
        return None
    later = place(world, model, gone={replica.key for replica in ending}, only={node.id for node in nodes})
    if isinstance(later, NoRoom):
        return None
    names = _names(replica for replica in ending if replica.node_id == later.node_id)
    return WaitForRoom(f"{later.node}: waits for {names} to end", now.verdicts)


def _make_room(
    world: World, model: Model, purpose: Purpose, nodes: Sequence[Node], now: NoRoom
) -> MakeRoom | WaitForRoom | NoRoom:
    keeping = Keeping(world, model, purpose)
    if (best := _cheapest(world, model, nodes, keeping, patient=False)) is not None:
        ended = {replica.key for replica in (*best.victims, *_ending(world, [best.node]))}
        then = place(world, model, gone=ended, only={best.node.id})
        if isinstance(then, Placed):
            text = f"{best.node.name}: {_names(best.victims)} {_has(best.victims)} to end for it"
            return MakeRoom(best.victims, replace(then, verdicts=now.verdicts), text)
    if (best := _cheapest(world, model, nodes, keeping, patient=True)) is not None:
        told = "; ".join(filter(None, map(keeping.told, best.victims)))
        return WaitForRoom(f"{best.node.name}: waits for room: {told}", now.verdicts)
    kept = {keeping.told(replica) for node in nodes for replica in world.on_node.get(node.id, ())}
    return replace(now, kept=tuple(sorted(kept - {""})))


@dataclass(frozen=True)
class _Plan:
    node: Node
    victims: tuple[Replica, ...]


def _cheapest(world: World, model: Model, nodes: Sequence[Node], keeping: Keeping, *, patient: bool) -> _Plan | None:
    """Nodes whose idle replicas were unused the longest are looked at first; when some of them will do, not all of a
    large fleet has to be."""

    def oldest(node: Node) -> tuple[float, str]:
        there = world.on_node.get(node.id, ())
        going = [_last_use(each)[0] for each in there if keeping.may_go(each, patient=patient)]
        return (min(going, default=float("inf")), node.name)

    ranked = sorted(((oldest(node), node) for node in nodes), key=lambda each: each[0])
    plans: list[_Plan] = []
    for looked, ((at, _), node) in enumerate(ranked, 1):
        if at == float("inf") or (plans and looked > _ENOUGH_NODES):
            break
        if (plan := _plan(world, model, node, keeping, patient=patient)) is not None:
            plans.append(plan)
    return min(plans, key=keeping.cost, default=None)


def _plan(world: World, model: Model, node: Node, keeping: Keeping, *, patient: bool) -> _Plan | None:
    """The victims on one node that are enough; None: all that may go are not."""
    ending = {replica.key for replica in _ending(world, [node])}
    victims: list[Replica] = []
    for candidate in sorted(world.on_node.get(node.id, ()), key=keeping.order):
        if keeping.may_go(candidate, victims, patient=patient):
            victims.append(candidate)
            if _fits(world, model, node, ending, victims):
                return _Plan(node, _needed(world, model, node, ending, victims))
    return None


def _needed(
    world: World, model: Model, node: Node, ending: Collection[tuple[str, str, int]], victims: Sequence[Replica]
) -> tuple[Replica, ...]:
    """Without those that turned out not to help, the most recently used of them first."""
    needed = list(victims)
    for candidate in reversed(victims):
        fewer = [victim for victim in needed if victim is not candidate]
        if _fits(world, model, node, ending, fewer):
            needed = fewer
    return tuple(needed)


def _fits(
    world: World, model: Model, node: Node, ending: Collection[tuple[str, str, int]], victims: Iterable[Replica]
) -> bool:
    return judge(world, model, node, {*ending, *(victim.key for victim in victims)}).eligible


@dataclass(frozen=True)
class Keeping:
    """What keeps a replica from being ended for another model's sake."""

    world: World
    model: Model  # for whose sake
    purpose: Purpose

    @cached_property
    def answering(self) -> Counter[str]:
        """By model, the replicas that can be counted on."""
        return Counter(replica.model for replica in self.world.replicas if can_answer(self.world, replica))

    def may_go(self, replica: Replica, with_them: Sequence[Replica] = (), *, patient: bool = False) -> bool:
        """`with_them` go already; patient: as if everything that only takes time had come to pass."""
        if self._for_good(replica, with_them):
            return False
        return patient or not self._for_now(replica, with_them)

    def why(self, replica: Replica) -> str:
        """Why it stays; empty: nothing keeps it."""
        return self._for_good(replica, ()) or self._for_now(replica, ())

    def told(self, replica: Replica) -> str:
        reason = self.why(replica)
        return f"{replica.model} {reason}" if reason else ""

    def order(self, replica: Replica) -> tuple[bool, tuple[float, str, int]]:
        """Who goes first."""
        return (self._left(replica, ()) < 1, _last_use(replica))

    def cost(self, plan: _Plan) -> tuple[int, float, int, str]:
        """Models that would have no replica any more, how lately they were used, how many have to go."""
        going = Counter(victim.model for victim in plan.victims)
        last = sum(self.answering[name] <= count for name, count in going.items())
        return (last, max(_last_use(victim)[0] for victim in plan.victims), len(plan.victims), plan.node.name)

    def _left(self, replica: Replica, with_them: Sequence[Replica]) -> int:
        """How many of its model would still answer."""
        going = [victim for victim in (*with_them, replica) if victim.model == replica.model]
        return self.answering[replica.model] - sum(can_answer(self.world, victim) for victim in going)

    def _for_good(self, replica: Replica, with_them: Sequence[Replica]) -> str:
        if replica.state is ReplicaState.STOPPING:
            return "is ending"
        if replica.model == self.model.name:
            return "is the model itself"
        own = self.world.models.get(replica.model)
        if own is None:  # nobody can ask for it any more
            return ""
        if own.pinned:
            return "is pinned"
        if own.schedule.spread_all:
            return "belongs on every node"
        left, least = self._left(replica, with_them), own.schedule.min_replicas
        if left < least:
            return f"has {self.answering[own.name]} replicas and needs {least}"
        if self.purpose is Purpose.GROWTH and left < 1:
            return "would have no replica any more"
        return ""

    def _for_now(self, replica: Replica, with_them: Sequence[Replica]) -> str:
        policy, now = self.world.policy, self.world.now
        if replica.state is ReplicaState.STARTING:
            return "is starting"
        if not replica.heard:
            return "may be busy: it has not been listened to for long enough"
        if not replica.idle:
            return f"is busy with {replica.in_flight} request{'s' if replica.in_flight > 1 else ''}"
        own = self.world.models.get(replica.model)
        if own is not None and _is_waited_for(self.world, own, replica) and self._left(replica, with_them) < 1:
            return f"has {own.waiting} request{'s' if own.waiting > 1 else ''} waiting for it"
        if _within(replica.last_used_at, policy.evict_after_idle_s, now):
            return "was used a moment ago"
        if _within(replica.ready_at, policy.evict_after_ready_s, now):
            return "has only just been loaded"
        return ""


def _is_waited_for(world: World, own: Model, replica: Replica) -> bool:
    """By requests, or by a load that it ends. A load without a place is no reason to keep what it shall replace: two
    edited models that are in each other's way would wait for each other for good. Once the new one starts, the earlier
    one may answer until it is ready."""
    if replica.revision == own.revision or not own.only_load_waits:
        return own.waiting > 0
    coming = (each for each in world.of_model.get(own.name, ()) if each.state is ReplicaState.STARTING)
    return any(each.revision == own.revision for each in coming)


def can_answer(world: World, replica: Replica) -> bool:
    """Ready, on a node that can be counted on. One whose bus is down still serves."""
    node = world.nodes.get(replica.node_id)
    return replica.state is ReplicaState.READY and node is not None and node.status == "healthy"


def _within(at: datetime | None, span_s: float, now: datetime) -> bool:
    return at is not None and now < at + timedelta(seconds=span_s)


def _ending(world: World, nodes: Iterable[Node]) -> list[Replica]:
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


def _has(victims: Sequence[Replica]) -> str:
    return "has" if len({victim.model for victim in victims}) == 1 else "have"
