"""Decides how many replicas of a model there should be: one step at a time, with the reason. Pure
(docs/reference/wire/routing.md#scaling).

The *counted* replicas are of the present revision, on healthy nodes that match the selector. Other running replicas of
the model are *leaving*: of an earlier revision, on a draining node, on a node that no longer matches the selector, or
beside a model of the same concurrency group that has precedence there. They serve until enough counted ones are ready.
One that never served and must not start beside such a model ends before its successor starts. The first replica of a
model without a schedule is not decided here: a load job starts it (`controller/replicas`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property

from corral.controller.scheduler.eviction import EvictFirst, Purpose, WaitForCapacity, can_answer, choose_placement
from corral.controller.scheduler.groups import why_must_leave
from corral.controller.scheduler.placement import NoCapacity, Placed, check_node, check_selector, choose_node
from corral.controller.scheduler.world import BuildState, Model, Node, Replica, ReplicaState, World


@dataclass(frozen=True)
class ScaleUp:
    """Start one more replica; `decision` says where, or what has to happen first."""

    decision: Placed | EvictFirst | WaitForCapacity
    purpose: Purpose
    text: str


@dataclass(frozen=True)
class ScaleDown:
    """End this replica: it gets no new requests and stops when its last one has ended."""

    replica: Replica
    text: str


@dataclass(frozen=True)
class Hold:
    text: str
    satisfied: bool = True  # the schedule's minimum is met: ticks and cooldown can be cleared


@dataclass(frozen=True)
class Unsatisfied:
    """No node can take a replica that the schedule requires. The caller stores `ticks` and `until`. While `ticks` is
    not 0 the next try before `until` does not count; after the last one, `ticks` is 0 and scaling pauses until then."""

    ticks: int
    until: datetime | None
    why: NoCapacity
    text: str


@dataclass(frozen=True)
class NotTaken:
    """No other node takes the model while its node switches a backend: requests will wait. The caller stores it."""

    text: str


ScaleStep = ScaleUp | ScaleDown | Hold | Unsatisfied | NotTaken


def plan_scaling(world: World, model: Model) -> ScaleStep:
    state = _ModelState(world, model)
    if model.disabled:
        return _end_first(state, state.living, "is disabled") or Hold("is disabled")
    return (
        _yield_to_rival(state)
        or _take_over(state)
        or _add_missing(state)
        or _retire(state)
        or _grow(state)
        or _trim(state)
        or Hold(state.summary, len(state.counted) >= state.least)
    )


@dataclass(frozen=True)
class _ModelState:
    """The replicas of one model, grouped by what scaling does with them."""

    world: World
    model: Model

    @cached_property
    def living(self) -> list[Replica]:
        found = self.world.of_model.get(self.model.name, ())
        own = [replica for replica in found if not replica.revision or replica.revision != self.model.trial_revision]
        return [replica for replica in own if replica.state is not ReplicaState.STOPPING]

    @cached_property
    def counted(self) -> list[Replica]:
        return [
            replica for replica in self.living if not self.why_leaving(replica) and self._node_is(replica, "healthy")
        ]

    @cached_property
    def leaving(self) -> list[Replica]:
        return [replica for replica in self.living if self.why_leaving(replica) and self.is_reachable(replica)]

    @cached_property
    def answering(self) -> list[Replica]:
        return [replica for replica in self.counted if can_answer(self.world, replica)]

    @cached_property
    def everywhere(self) -> list[Node]:
        """The nodes that `spread_all` covers: those that could run the model at all."""
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
        """While leaving replicas are in use, one has to replace them even without a minimum."""
        return max(self.least, 1) if self.leaving and self.in_use else self.least

    @property
    def in_use(self) -> bool:
        if self.model.waiting or any(not replica.idle for replica in self.living):
            return True
        return any(self.unused_s(replica) < self.world.policy.down_after_s for replica in self.living)

    @property
    def summary(self) -> str:
        most = self.model.schedule.max_replicas
        bounds = "one on every node" if self.spread else f"{self.least} to {most or 'any number'}"
        return f"{len(self.answering)} ready, {len(self.counted) - len(self.answering)} starting, {bounds} wanted"

    @cached_property
    def switching(self) -> list[Node]:
        """The nodes that wait for another one to take the model."""
        return [node for node in self.world.switching if self.model.name in node.switching]

    def is_on_canary(self, replica: Replica) -> bool:
        node = self.world.nodes.get(replica.node_id)
        return node is not None and node.is_canary

    def why_leaving(self, replica: Replica) -> str:
        if replica.revision != self.model.revision:
            return "is of an earlier revision"
        node = self.world.nodes.get(replica.node_id)
        if node is None:
            return ""
        if node.status == "draining":
            return f"{node.name} is draining"
        if not check_selector(self.model, node).ok:
            return f"{node.name} no longer matches the selector"
        return why_must_leave(self.world, self.model, replica)

    def unused_s(self, replica: Replica) -> float:
        since = replica.unused_since()
        return (self.world.now - since).total_seconds() if since is not None else 0.0

    def is_reachable(self, replica: Replica) -> bool:
        """Whether an order to end it would arrive. Scaling does not wait for unreachable replicas."""
        node = self.world.nodes.get(replica.node_id)
        return node is not None and not node.bus_down and self._node_is(replica, "healthy", "draining")

    def _node_is(self, replica: Replica, *status: str) -> bool:
        node = self.world.nodes.get(replica.node_id)
        return node is not None and node.status in status

    def _has_build(self, node: Node) -> bool:
        build = node.builds.get(self.model.backend)
        return build is not None and build.state not in (BuildState.MISSING, BuildState.FORBIDDEN)


def _yield_to_rival(state: _ModelState) -> ScaleDown | None:
    """End a replica that has never served on a node where another model of its group has precedence by now. It serves
    no requests and must not become ready: it ends at once, before another one starts elsewhere."""
    never_served = [replica for replica in state.leaving if replica.ready_at is None and not replica.in_flight]
    for replica in sorted(never_served, key=_end_order):
        if why := why_must_leave(state.world, state.model, replica):
            return ScaleDown(replica, why)
    return None


def _take_over(state: _ModelState) -> ScaleUp | NotTaken | None:
    """Start a replica on another node that has the backend, before a node ends its own for a switch. When the switch is
    over it is one of several, and ends like any that is not used."""
    name = state.model.name
    due = {node.id: node for node in state.switching if not node.switching[name]}
    if not due or any(replica.node_id not in due for replica in state.counted):
        return None
    if not any(replica.node_id in due for replica in state.living):
        return NotTaken("its replicas there are not kept")
    others = {
        node.id
        for node in state.world.nodes.values()
        if name not in node.switching and _is_installed(node, state.model.backend)
    }
    if not others:
        return NotTaken(f"no other node has {state.model.backend}")
    decision = choose_placement(state.world, state.model, Purpose.SWITCH, only=others)
    if isinstance(decision, NoCapacity):
        return NotTaken("; ".join((decision.text, *(decision.why if len(decision.verdicts) > 1 else ()))))
    names = ", ".join(sorted(node.name for node in due.values()))
    return ScaleUp(decision, Purpose.SWITCH, f"{names} switches {state.model.backend}")


def _is_installed(node: Node, backend: str) -> bool:
    build = node.builds.get(backend)
    return build is not None and build.state is BuildState.INSTALLED


def _add_missing(state: _ModelState) -> ScaleStep | None:
    """Start one where there are fewer than wanted."""
    nodes = _nodes_without_replica(state) if state.spread else None
    missing = len(nodes) if nodes is not None else state.wanted - len(state.counted)
    if missing <= 0:
        return None
    schedule = state.model.schedule
    until = schedule.unsatisfiable_until
    if until is not None and not schedule.unsatisfiable_ticks and state.world.now < until:
        return (
            None if state.leaving else Hold(f"{state.summary}; no place was found, next try at {until:%H:%M:%S}", False)
        )
    purpose = Purpose.MINIMUM
    decision = choose_placement(state.world, state.model, purpose, only=nodes)
    if not isinstance(decision, NoCapacity):
        return ScaleUp(decision, purpose, state.summary)
    if instead := replace_in_place(state.world, state.model):
        return instead
    if not state.model.schedule.scales:  # no number is set: a leaving replica stays until another node has capacity
        return Hold(f"{state.summary}; {decision.text}", False)
    return _unsatisfied(state, decision)


def _nodes_without_replica(state: _ModelState) -> set[str]:
    return {node.id for node in state.everywhere} - {replica.node_id for replica in state.counted}


def replace_in_place(world: World, model: Model) -> ScaleDown | None:
    """End the replica of an earlier revision first where memory cannot hold both."""
    state = _ModelState(world, model)
    old = [replica for replica in state.leaving if replica.revision != state.model.revision]
    for replica in sorted(old, key=_end_order):
        if isinstance(choose_node(state.world, state.model, without={replica.key}), Placed):
            return ScaleDown(replica, "is of an earlier revision, and memory cannot hold both")
    return None


def _unsatisfied(state: _ModelState, why: NoCapacity) -> Unsatisfied:
    policy, now = state.world.policy, state.world.now
    ticks, until = state.model.schedule.unsatisfiable_ticks, state.model.schedule.unsatisfiable_until
    if ticks and until is not None and now < until:
        return Unsatisfied(ticks, until, why, why.text)
    if ticks + 1 < policy.unsatisfiable_after_ticks:
        return Unsatisfied(ticks + 1, now + timedelta(seconds=policy.unsatisfiable_tick_s), why, why.text)
    return Unsatisfied(0, now + timedelta(seconds=policy.unsatisfiable_s), why, why.text)


def _retire(state: _ModelState) -> ScaleDown | None:
    """End leaving replicas once enough counted ones are ready."""
    enough = min(state.wanted, 1) if state.spread else state.wanted  # of those on every node each is for itself
    if not state.leaving or len(state.answering) < enough:
        return None
    replica = min(state.leaving, key=_end_order)
    return ScaleDown(replica, state.why_leaving(replica))


def _grow(state: _ModelState) -> ScaleStep | None:
    schedule, policy = state.model.schedule, state.world.policy
    if not schedule.scales or state.spread or not state.answering or len(state.answering) < len(state.counted):
        return None  # the starting replicas may be enough
    if state.switching:
        return None
    if schedule.max_replicas and len(state.counted) >= schedule.max_replicas:
        return None
    busy = all(replica.busy for replica in state.answering)
    if _overrun(state) or (busy and (state.model.waiting or state.model.busy_for_s >= policy.up_after_s)):
        why = "all its replicas are busy"
    elif state.model.pressure >= policy.pressure_threshold:
        why = "busy replicas made requests leave the replica that caches their prefix"
    else:
        return None
    decision = choose_placement(state.world, state.model, Purpose.GROWTH)
    if isinstance(decision, NoCapacity):
        return Hold(f"{state.summary}; {why}, but {decision.text}")
    return ScaleUp(decision, Purpose.GROWTH, why)


def _overrun(state: _ModelState) -> bool:
    """Whether there are more requests than slots. Nodes report active requests when one ends, so the number reported
    for a replica that is never idle is often one too low; gateways report waiting requests."""
    if not all(replica.activity_known for replica in state.answering):
        return False
    requests = sum(replica.in_flight for replica in state.answering) + state.model.waiting
    return requests > sum(max(1, replica.slots) for replica in state.answering)


def _trim(state: _ModelState) -> ScaleDown | None:
    if state.switching:  # until the switch is over no replica is one too many
        return None
    if state.spread:
        return _trim_duplicates(state)
    schedule, policy = state.model.schedule, state.world.policy
    idle = [replica for replica in state.answering if replica.idle]
    spare = len(state.answering) > max(schedule.min_replicas, 1)  # starting replicas do not serve yet
    others = [replica for replica in idle if not state.is_on_canary(replica)]
    if spare and schedule.max_replicas and len(state.counted) > schedule.max_replicas:
        return _end_first(state, others, f"{len(state.counted)} replicas, at most {schedule.max_replicas} wanted")
    unused = [replica for replica in others if state.unused_s(replica) > policy.down_after_s]
    if spare:
        return _end_first(state, unused, f"unused for more than {policy.down_after_s:.0f} s")
    return _to_zero(state, idle)


def _trim_duplicates(state: _ModelState) -> ScaleDown | None:
    """End the second replica on a node: `spread_all` wants one on every node."""
    there = Counter(replica.node_id for replica in state.answering)
    surplus = [replica for replica in state.answering if there[replica.node_id] > 1 and replica.idle]
    return _end_first(state, surplus, "is not the only one on its node")


def _to_zero(state: _ModelState, idle: Sequence[Replica]) -> ScaleDown | None:
    model = state.model
    if model.schedule.min_replicas or model.pinned or model.waiting or model.idle_unload_s <= 0:
        return None
    if len(state.counted) != 1 or len(state.living) != 1:
        return None
    unused = [replica for replica in idle if state.unused_s(replica) > model.idle_unload_s]
    return _end_first(state, unused, f"unused for more than {model.idle_unload_s:.0f} s: the model is unloaded")


def _end_first(state: _ModelState, replicas: Sequence[Replica], text: str) -> ScaleDown | None:
    first = min(filter(state.is_reachable, replicas), key=_end_order, default=None)
    return ScaleDown(first, text) if first is not None else None


def _end_order(replica: Replica) -> tuple[bool, int, int, float, str]:
    """Idle before busy; then, by the contract, the highest index; then the longest unused."""
    since = replica.unused_since()
    unused = since.timestamp() if since is not None else 0.0
    return (not replica.idle, replica.in_flight, -replica.index, unused, replica.node_id)
