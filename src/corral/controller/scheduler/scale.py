"""How many replicas of a model there should be: one step at a time, and why. Pure
(docs/reference/wire/routing.md#scaling).

What is counted are replicas of the present revision on healthy nodes that the selector still picks. Others of it that
live are *leaving*: of an old revision, on a node that is being drained, where the labels no longer fit, or beside a
model of the same concurrency group that has precedence there. They answer until enough of the counted ones do, and go
then; one that must not come up beside such a model goes before its successor begins. The first replica of a model
nobody scheduled is not decided here: it comes when somebody asks for it (`controller/loads`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property

from corral.controller.scheduler.evict import MakeRoom, Purpose, WaitForRoom, can_answer, choose_place
from corral.controller.scheduler.groups import why_it_must_leave
from corral.controller.scheduler.place import NoRoom, Placed, check_node, check_selector, place
from corral.controller.scheduler.world import BuildState, Model, Node, Replica, ReplicaState, World


@dataclass(frozen=True)
class Up:
    """One more, here; or what has to happen before."""

    decision: Placed | MakeRoom | WaitForRoom
    purpose: Purpose
    text: str


@dataclass(frozen=True)
class Down:
    """This one gets no new requests, finishes what it has and ends."""

    replica: Replica
    text: str


@dataclass(frozen=True)
class Hold:
    text: str
    satisfied: bool = True  # there are as many as people said: ticks and cooldown can be forgotten


@dataclass(frozen=True)
class Unsatisfied:
    """There is no place for what people asked for. To be written down: after some looks it is left alone a while."""

    ticks: int
    until: datetime | None
    why: NoRoom
    text: str


Step = Up | Down | Hold | Unsatisfied


def plan_scale(world: World, model: Model) -> Step:
    look = _Look(world, model)
    if model.disabled:
        return _first(look, look.living, "is disabled") or Hold("is disabled")
    return (
        _give_way(look)
        or _missing(look)
        or _leave(look)
        or _grow(look)
        or _trim(look)
        or Hold(look.told, len(look.counted) >= look.least)
    )


@dataclass(frozen=True)
class _Look:
    world: World
    model: Model

    @cached_property
    def living(self) -> list[Replica]:
        own = self.world.of_model.get(self.model.name, ())
        return [replica for replica in own if replica.state is not ReplicaState.STOPPING]

    @cached_property
    def counted(self) -> list[Replica]:
        return [replica for replica in self.living if not self.why_leaving(replica) and self._is(replica, "healthy")]

    @cached_property
    def leaving(self) -> list[Replica]:
        return [replica for replica in self.living if self.why_leaving(replica) and self.can_be_told(replica)]

    @cached_property
    def answering(self) -> list[Replica]:
        return [replica for replica in self.counted if can_answer(self.world, replica)]

    @cached_property
    def everywhere(self) -> list[Node]:
        """The nodes that `spread_all` means: those that could have one at all."""
        return [
            node
            for node in self.world.nodes.values()
            if check_node(node).ok and check_selector(self.model, node).ok and self._has_build(node)
        ]

    @property
    def spread(self) -> bool:
        return self.model.schedule.spread_all

    @cached_property
    def least(self) -> int:
        return len(self.everywhere) if self.spread else self.model.schedule.min_replicas

    @cached_property
    def wanted(self) -> int:
        """While those that leave are in use, one has to take over even where nobody set a minimum."""
        return max(self.least, 1) if self.leaving and self.in_use else self.least

    @property
    def in_use(self) -> bool:
        if self.model.waiting or any(not replica.idle for replica in self.living):
            return True
        return any(self.unused_s(replica) < self.world.policy.down_after_s for replica in self.living)

    @property
    def told(self) -> str:
        most = self.model.schedule.max_replicas
        bounds = "one on every node" if self.spread else f"{self.least} to {most or 'any number'}"
        return f"{len(self.answering)} answering, {len(self.counted) - len(self.answering)} starting, {bounds} wanted"

    def why_leaving(self, replica: Replica) -> str:
        if replica.revision != self.model.revision:
            return "is of an earlier revision"
        node = self.world.nodes.get(replica.node_id)
        if node is None:
            return ""
        if node.status == "draining":
            return f"{node.name} is being drained"
        if not check_selector(self.model, node).ok:
            return f"{node.name} is no longer selected"
        return why_it_must_leave(self.world, self.model, replica)

    def unused_s(self, replica: Replica) -> float:
        since = replica.unused_since()
        return (self.world.now - since).total_seconds() if since is not None else 0.0

    def can_be_told(self, replica: Replica) -> bool:
        """An order to end it would reach it. What is out of reach is not waited for."""
        node = self.world.nodes.get(replica.node_id)
        return node is not None and not node.bus_down and self._is(replica, "healthy", "draining")

    def _is(self, replica: Replica, *status: str) -> bool:
        node = self.world.nodes.get(replica.node_id)
        return node is not None and node.status in status

    def _has_build(self, node: Node) -> bool:
        build = node.builds.get(self.model.backend)
        return build is not None and build.state not in (BuildState.MISSING, BuildState.FORBIDDEN)


def _give_way(look: _Look) -> Down | None:
    """One that has never served, on a node where another model of its group has precedence by now. Nobody is served by
    it, and come up it must not: it goes at once, and only then another one begins elsewhere."""
    never_served = [replica for replica in look.leaving if replica.ready_at is None and not replica.in_flight]
    for replica in never_served:
        if why := why_it_must_leave(look.world, look.model, replica):
            return Down(replica, why)
    return None


def _missing(look: _Look) -> Step | None:
    """Fewer than there should be."""
    nodes = _without_one(look) if look.spread else None
    missing = len(nodes) if nodes is not None else look.wanted - len(look.counted)
    if missing <= 0:
        return None
    until, now = look.model.schedule.unsatisfiable_until, look.world.now
    if until is not None and now < until:
        return None if look.leaving else Hold(f"{look.told}; no place was found, next try at {until:%H:%M:%S}", False)
    purpose = Purpose.MINIMUM
    decision = choose_place(look.world, look.model, purpose, only=nodes)
    if not isinstance(decision, NoRoom):
        return Up(decision, purpose, look.told)
    if instead := instead_of_itself(look.world, look.model):
        return instead
    if not look.model.schedule.scales:  # nobody set a number: what leaves stays until there is room elsewhere
        return Hold(f"{look.told}; {decision.text}", False)
    return _unsatisfied(look, decision)


def _without_one(look: _Look) -> set[str]:
    return {node.id for node in look.everywhere} - {replica.node_id for replica in look.counted}


def instead_of_itself(world: World, model: Model) -> Down | None:
    """Where memory does not hold the old one and the new one, the old one has to go first."""
    look = _Look(world, model)
    old = [replica for replica in look.leaving if replica.revision != look.model.revision]
    for replica in sorted(old, key=_end_order):
        if isinstance(place(look.world, look.model, gone={replica.key}), Placed):
            return Down(replica, "is of an earlier revision, and there is no room for both")
    return None


def _unsatisfied(look: _Look, why: NoRoom) -> Unsatisfied:
    policy, ticks = look.world.policy, look.model.schedule.unsatisfiable_ticks + 1
    if ticks < policy.unsatisfiable_after_ticks:
        return Unsatisfied(ticks, None, why, why.text)
    until = look.world.now + timedelta(seconds=policy.unsatisfiable_s)
    return Unsatisfied(0, until, why, why.text)


def _leave(look: _Look) -> Down | None:
    """Those that have to go, once enough others answer."""
    enough = min(look.wanted, 1) if look.spread else look.wanted  # of those on every node each is for itself
    if not look.leaving or len(look.answering) < enough:
        return None
    replica = min(look.leaving, key=_end_order)
    return Down(replica, look.why_leaving(replica))


def _grow(look: _Look) -> Step | None:
    schedule, policy = look.model.schedule, look.world.policy
    if not schedule.scales or look.spread or not look.answering or len(look.answering) < len(look.counted):
        return None  # what is starting may be enough
    if schedule.max_replicas and len(look.counted) >= schedule.max_replicas:
        return None
    busy = all(replica.busy for replica in look.answering)
    if _overrun(look) or (busy and (look.model.waiting or look.model.busy_for_s >= policy.up_after_s)):
        why = "all its replicas are busy"
    elif look.model.pressure >= policy.pressure_threshold:
        why = "requests had to leave the replicas that know their beginning"
    else:
        return None
    decision = choose_place(look.world, look.model, Purpose.GROWTH)
    if isinstance(decision, NoRoom):
        return Hold(f"{look.told}; {why}, but {decision.text}")
    return Up(decision, Purpose.GROWTH, why)


def _overrun(look: _Look) -> bool:
    """More is asked for than all of them take at once. Nodes tell their requests when one ends, so what is heard of a
    replica that never rests is often one too few; those that wait for it are counted where they wait."""
    if not all(replica.heard for replica in look.answering):
        return False
    asked = sum(replica.in_flight for replica in look.answering) + look.model.waiting
    return asked > sum(max(1, replica.slots) for replica in look.answering)


def _trim(look: _Look) -> Down | None:
    if look.spread:
        return _second_ones(look)
    schedule, policy = look.model.schedule, look.world.policy
    idle = [replica for replica in look.answering if replica.idle]
    spare = len(look.answering) > max(schedule.min_replicas, 1)  # those that start do not answer yet
    if spare and schedule.max_replicas and len(look.counted) > schedule.max_replicas:
        return _first(look, idle, f"there are {len(look.counted)} and at most {schedule.max_replicas} wanted")
    unused = [replica for replica in idle if look.unused_s(replica) > policy.down_after_s]
    if spare:
        return _first(look, unused, f"unused for more than {policy.down_after_s:.0f} s")
    return _to_zero(look, idle)


def _second_ones(look: _Look) -> Down | None:
    """One on every node is what was asked for."""
    there = Counter(replica.node_id for replica in look.answering)
    surplus = [replica for replica in look.answering if there[replica.node_id] > 1 and replica.idle]
    return _first(look, surplus, "is not the only one on its node")


def _to_zero(look: _Look, idle: Sequence[Replica]) -> Down | None:
    model = look.model
    if model.schedule.min_replicas or model.pinned or model.waiting or model.idle_unload_s <= 0:
        return None
    if len(look.counted) != 1 or len(look.living) != 1:
        return None
    unused = [replica for replica in idle if look.unused_s(replica) > model.idle_unload_s]
    return _first(look, unused, f"unused for more than {model.idle_unload_s:.0f} s: the last one may go")


def _first(look: _Look, replicas: Sequence[Replica], text: str) -> Down | None:
    first = min(filter(look.can_be_told, replicas), key=_end_order, default=None)
    return Down(first, text) if first is not None else None


def _end_order(replica: Replica) -> tuple[bool, int, int, float, str]:
    """The idle before the busy; then, as the contract says, the highest number; then the longest unused."""
    since = replica.unused_since()
    unused = since.timestamp() if since is not None else 0.0
    return (not replica.idle, replica.in_flight, -replica.index, unused, replica.node_id)
