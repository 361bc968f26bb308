"""Decides what one pass of the reconciler writes and sends, from the world it read and the observations since the last
pass. Pure: plans every node, applies the limits between nodes (rollouts, open calls), then derives the new intents."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

import msgspec

from corral.controller.backends import moves, outcomes
from corral.controller.backends.outcomes import DEFAULT_RETRY, RetryPolicy, apply
from corral.controller.backends.plan import Done, Drop, Fail, Hold, HoldCause, NodeWorld, Step, Stop, plan
from corral.controller.backends.rollout import Peer, advance
from corral.controller.backends.world import World, before_of
from corral.controller.orders.observations import Observation
from corral.controller.orders.order import OrderId, Send
from corral.controller.rollouts.comparison import Judgement
from corral.controller.rollouts.plan import Held
from corral.store.records import BackendIntent, DueSwitch, IntentStage, OrderKind, Rollout


@dataclass(frozen=True)
class DecisionInputs:
    """What a decision depends on besides the world."""

    epoch: int  # of the lease under which the pass writes
    answer_within_s: Callable[[OrderKind], float]  # for workers that reply when they have finished
    free_slow_calls: int  # how many more such calls may be opened
    retry: RetryPolicy = DEFAULT_RETRY
    judgements: Mapping[tuple[str, str], Judgement] = field(default_factory=dict)  # by operation and canary


@dataclass
class Decided:
    intents: dict[tuple[str, str], BackendIntent] = field(
        default_factory=dict
    )  # by node and backend, those that changed
    steps: dict[str, list[Step]] = field(default_factory=dict)  # by node
    sends: list[tuple[str, Send]] = field(default_factory=list)
    stops: dict[OrderId, bool] = field(default_factory=dict)  # → whether the worker keeps what it has downloaded
    rollouts: list[Rollout] = field(default_factory=list)  # those that changed
    soaking: dict[tuple[str, str], Held] = field(default_factory=dict)  # by operation and canary
    due: dict[tuple[str, str], DueSwitch] = field(default_factory=dict)  # by node and backend, all that are due


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
    decided = Decided(steps=steps, rollouts=list(world.ended))
    _apply_rollouts(decided, world, caught_up, terms)
    _apply_moves(decided, world)
    _apply_limits(caught_up, steps, terms)
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


def _apply_rollouts(decided: Decided, world: World, nodes: dict[str, NodeWorld], terms: DecisionInputs) -> None:
    """Replace the sends that have to wait for other nodes of their rollout by holds."""
    steps = decided.steps
    for generation, peers in world.peers.items():
        sends = {
            node_id: step
            for node_id, own in steps.items()
            for step in own
            if isinstance(step, Send) and step.max_parallel and step.generation == generation
        }
        rollout = world.rollouts.get(generation)
        if rollout is None and not sends:
            continue
        if generation in world.incomplete:
            for node_id, send in sends.items():
                hold = Hold(send.backend, send.operation, send.kind, HoldCause.TURN, "waits for its turn")
                steps[node_id] = [hold if step is send else step for step in steps[node_id]]
            continue
        peers = [_current_peer(peer, nodes, generation) for peer in peers]
        backend = rollout.subject if rollout is not None else next(iter(sends.values())).backend
        done = [
            node_id
            for node_id, own in steps.items()
            if any(isinstance(step, Done) and step.generation == generation for step in own)
        ]
        if rollout is not None:
            rollout = _with_nodes(rollout, peers, nodes, world, backend)
        judgements = {
            canary: found
            for (operation, canary), found in terms.judgements.items()
            if rollout is not None and operation == rollout.operation_id
        }
        parallel = next((send.max_parallel for send in sends.values()), "1")
        gated = advance(rollout, sends, done, peers, judgements, world.now, parallel)
        for node_id, hold in gated.held.items():
            steps[node_id] = [hold if step is sends[node_id] else step for step in steps[node_id]]
        if gated.step is not None:
            if gated.step.rollout != world.rollouts[generation]:
                decided.rollouts.append(gated.step.rollout)
            for node_id, held in gated.step.soaking.items():
                decided.soaking[gated.step.rollout.operation_id, node_id] = held


def _with_nodes(
    rollout: Rollout, peers: Sequence[Peer], nodes: dict[str, NodeWorld], world: World, backend: str
) -> Rollout:
    """The rollout with what its nodes have, as long as they have not begun to switch."""
    known = dict(rollout.nodes)
    for peer in peers:
        begun = peer.intent is not None and (
            peer.intent.stage is IntentStage.DONE or peer.intent.kind not in (OrderKind.FETCH, OrderKind.INSTALL)
        )
        if not begun or peer.node_id not in known:
            known[peer.node_id] = before_of(nodes[peer.node_id], world.outlines[peer.node_id], backend)
    return rollout if known == rollout.nodes else msgspec.structs.replace(rollout, nodes=known)


def _apply_moves(decided: Decided, world: World) -> None:
    """Hold a switch that would leave a model without a process until another node serves it, where one can."""
    switching = {  # nodes whose processes may end at any moment, though they are listed still
        node_id for node_id, own in decided.steps.items() if any(moves.is_being_switched(step) for step in own)
    }
    for node_id, own in decided.steps.items():
        for index, step in enumerate(own):
            key = (node_id, step.backend)
            before = world.due.get(key)
            if before is not None and moves.is_step_of(step, before):
                decided.due[key] = before
            if not isinstance(step, Send) or not moves.is_switch(step) or not world.nodes[node_id].accepts:
                continue
            if models := world.models_to_end(*key):
                lacking, coming = world.unserved_without(node_id, models, switching)
                due = decided.due[key] = moves.mark_due(before, node_id, step, models, world.now)
                # An install is wanted now, and a revert leaves a bad build: only switches that have turns wait.
                waits_for = moves.awaited(due, lacking, coming, world.now) if step.max_parallel else ()
                if waits_for:
                    reason = moves.waits_text(waits_for)
                    own[index] = Hold(step.backend, step.operation, step.kind, HoldCause.TURN, reason)
                else:
                    switching.add(node_id)


def _apply_limits(nodes: dict[str, NodeWorld], steps: dict[str, list[Step]], terms: DecisionInputs) -> None:
    """Hold calls to LocalAI workers beyond the number that may be open at once."""
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


def _current_peer(peer: Peer, nodes: dict[str, NodeWorld], generation: int) -> Peer:
    """The peer with the intent as it is after the observations of this pass."""
    if peer.intent is None:
        return peer
    intent = nodes[peer.node_id].intents.get(peer.intent.backend)
    return replace(peer, intent=intent if intent is not None and intent.generation == generation else None)


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
