"""Decides what one pass of the reconciler writes and sends, from the world it read and the observations since the last
pass. Pure: plans every node, applies the limits between nodes (rollouts, open calls), then derives the new intents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

from corral.controller.backends import outcomes
from corral.controller.backends.outcomes import DEFAULT_RETRY, RetryPolicy, apply
from corral.controller.backends.plan import Done, Drop, Fail, Hold, HoldCause, NodeWorld, Step, Stop, plan
from corral.controller.backends.rollout import Peer, gate
from corral.controller.backends.world import World
from corral.controller.orders.observations import Observation
from corral.controller.orders.order import OrderId, Send
from corral.store.records import BackendIntent, OrderKind


@dataclass(frozen=True)
class DecisionInputs:
    """What a decision depends on besides the world."""

    epoch: int  # of the lease under which the pass writes
    answer_within_s: Callable[[OrderKind], float]  # for workers that reply when they have finished
    free_slow_calls: int  # how many more such calls may be opened
    retry: RetryPolicy = DEFAULT_RETRY


@dataclass
class Decided:
    intents: dict[tuple[str, str], BackendIntent] = field(
        default_factory=dict
    )  # by node and backend, those that changed
    steps: dict[str, list[Step]] = field(default_factory=dict)  # by node
    sends: list[tuple[str, Send]] = field(default_factory=list)
    stops: dict[OrderId, bool] = field(default_factory=dict)  # → whether the worker keeps what it has downloaded


def decide(world: World, observations: Sequence[Observation], terms: DecisionInputs) -> Decided:
    by_node: dict[str, list[Observation]] = {}
    for observation in observations:
        by_node.setdefault(observation.order.node_id, []).append(observation)
    caught_up = {
        node.id: _caught_up(node, world, by_node.get(node.id, ()), terms.retry) for node in world.nodes.values()
    }
    steps = {
        node.id: plan(node, world.wanted[node.id], world.builds[node.id], world.now, epoch=terms.epoch)
        for node in caught_up.values()
    }
    _apply_limits(world, caught_up, steps, terms)
    decided = Decided(steps=steps)
    for node_id, node in caught_up.items():
        intents = dict(node.intents)
        for step in steps[node_id]:
            _apply_step(decided, node, intents, step, world, terms)
        before = world.nodes[node_id].intents
        changed = {backend: intent for backend, intent in intents.items() if before.get(backend) != intent}
        decided.intents.update({(node_id, backend): intent for backend, intent in changed.items()})
    return decided


def _caught_up(node: NodeWorld, world: World, observations: Sequence[Observation], retry: RetryPolicy) -> NodeWorld:
    if observations:
        intents = dict(node.intents)
        for observation in observations:
            backend = observation.order.backend
            if backend in intents:
                intents[backend] = apply(intents[backend], observation, world.now, retry)
        node = replace(node, intents=intents)
    late = outcomes.catch_up(node, world.results[node.id], world.now, retry)
    return replace(node, intents={**node.intents, **late}) if late else node


def _apply_limits(
    world: World, nodes: dict[str, NodeWorld], steps: dict[str, list[Step]], terms: DecisionInputs
) -> None:
    """Replace the sends that have to wait by holds."""
    by_rule: dict[int, dict[str, Send]] = {}
    for node_id, own in steps.items():
        for step in own:
            if isinstance(step, Send) and step.max_parallel:
                by_rule.setdefault(step.generation, {})[node_id] = step
    for generation, sends in by_rule.items():
        peers = [_current_peer(peer, nodes, sends) for peer in world.peers.get(generation, ())]
        held = gate(sends, peers, world.concerned.get(generation, len(sends)))
        for node_id, hold in held.items():
            steps[node_id] = [hold if step is sends[node_id] else step for step in steps[node_id]]
    free = terms.free_slow_calls
    for node_id, own in steps.items():
        if nodes[node_id].accepts:
            continue
        for index, step in enumerate(own):
            if isinstance(step, Send):
                if free > 0:
                    free -= 1
                else:
                    reason = "waits for its turn: many nodes are busy"
                    own[index] = Hold(step.backend, step.operation, step.kind, HoldCause.TURN, reason)


def _current_peer(peer: Peer, nodes: dict[str, NodeWorld], sends: dict[str, Send]) -> Peer:
    """The peer with the intent as it is after the observations of this pass."""
    node = nodes.get(peer.node_id)
    if node is None:
        return peer
    backend = next(iter(sends.values())).backend
    return replace(peer, intent=node.intents.get(backend, peer.intent))


def _apply_step(
    decided: Decided,
    node: NodeWorld,
    intents: dict[str, BackendIntent],
    step: Step,
    world: World,
    terms: DecisionInputs,
) -> None:
    before = intents.get(step.backend)
    match step:
        case Send():
            late = None if node.accepts else world.now + timedelta(seconds=terms.answer_within_s(step.kind))
            intents[step.backend] = outcomes.claim(
                node.id, before, step, world.now, epoch=terms.epoch, answer_by=late, boot_id=node.boot_id
            )
            decided.sends.append((node.id, step))
        case Done():
            intents[step.backend] = outcomes.done(node.id, before, step, world.now)
        case Fail() if before is not None:
            intents[step.backend] = outcomes.failed(before, step.reason, world.now, retry=terms.retry)
        case Drop() if before is not None:
            intents[step.backend] = outcomes.dropped(before, world.now)
        case Stop():
            decided.stops[OrderId(node.id, step.operation, step.attempt, step.backend)] = step.keep
        case _:
            pass
