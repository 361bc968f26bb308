"""Explains decisions of the scheduler for `corral why`. Pure: the same functions decide and explain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from corral.contract.why import WhyCheck, WhyModel, WhyNode, WhyReplica, WhyScore, WhySpace, WhyVerdict
from corral.controller.scheduler.eviction import (
    Decision,
    EvictFirst,
    EvictionRules,
    Purpose,
    WaitForCapacity,
    choose_placement,
)
from corral.controller.scheduler.free_memory import MemoryPool, free_memory_of
from corral.controller.scheduler.placement import NoCapacity, Placed, Score, Verdict, check_node, evaluate_node
from corral.controller.scheduler.scaling import Hold, NotTaken, ScaleDown, ScaleStep, ScaleUp, Unsatisfied, plan_scaling
from corral.controller.scheduler.world import Model, Node, Replica, World

# The ranking, in the order in which it is compared.
MEANINGS = {
    "failed": "its last start on the node failed",
    "grouped": "replicas of its concurrency groups on the node",
    "uncertain": "it is not known whether it fits",
    "in_ram": "without an accelerator",
    "replicas": "replicas of this model on the node",
    "fetch": "of backend and files, how many to fetch first",
    "loaded": "other models run on the node",
    "in_flight": "active requests on the node",
    "used_bytes": "free memory, negated",
    "name": "the name, when all else is equal",
}

ANY_MODEL = Model("", "")  # stands for any other cold model: what could be evicted for it


def explain_model(world: World, model: Model) -> WhyModel:
    """Where the model's next replica would go, and whether scaling wants one."""
    decision = choose_placement(world, model, _purpose(world, model))
    scaling = plan_scaling(world, model)
    name, text = _decision_text(decision)
    return WhyModel(
        model=model.name,
        decision=name,
        text=text,
        memory_bytes=model.memory.total_bytes,
        host_bytes=model.memory.host_bytes,
        memory_how=model.memory.how,
        selector=str(model.schedule.selector),
        min_replicas=model.schedule.min_replicas,
        max_replicas=model.schedule.max_replicas,
        spread_all=model.schedule.spread_all,
        waiting=model.waiting,
        scaling=_step_name(scaling),
        scaling_text=_step_text(world, scaling),
        replicas=_replicas(world, world.of_model.get(model.name, ())),
        kept=decision.kept if isinstance(decision, NoCapacity) else (),
        nodes=tuple(_verdict(model, verdict) for verdict in decision.verdicts),
    )


def explain_node(world: World, node: Node) -> WhyNode:
    check = check_node(node)
    free = free_memory_of(node, world.on_node.get(node.id, ()), world.policy)
    models = sorted(world.models.values(), key=lambda model: model.name)
    return WhyNode(
        node_id=node.id,
        node=node.name,
        accepts=check.ok,
        text="takes new replicas" if check.ok else check.text,
        spaces=tuple(map(_pool, (*free.devices, free.ram))),
        budget_bytes=free.budget_bytes,
        left_of_budget=free.left_of_budget,
        replicas=_replicas(world, world.on_node.get(node.id, ())),
        models=tuple(_verdict(model, evaluate_node(world, model, node)) for model in models),
    )


def _purpose(world: World, model: Model) -> Purpose:
    """What the model's next replica would be for."""
    there = len(world.of_model.get(model.name, ()))
    if not there:
        return Purpose.COLD
    return Purpose.MINIMUM if there < model.schedule.min_replicas else Purpose.GROWTH


def _decision_text(decision: Decision) -> tuple[str, str]:
    match decision:
        case Placed():
            return "placed", decision.text
        case EvictFirst():
            return "make_room", decision.text
        case WaitForCapacity():
            return "wait", decision.text
        case NoCapacity():
            return "no_room", decision.text
        case _:
            assert_never(decision)


def _step_name(step: ScaleStep) -> str:
    match step:
        case ScaleUp():
            return "up"
        case ScaleDown():
            return "down"
        case Hold() | NotTaken():
            return "hold"
        case Unsatisfied():
            return "unsatisfied"
        case _:
            assert_never(step)


def _step_text(world: World, step: ScaleStep) -> str:
    match step:
        case ScaleUp():
            return f"{step.text}; {_decision_text(step.decision)[1]}"
        case ScaleDown():
            return f"replica {step.replica.index} on {_node_name(world, step.replica)}: {step.text}"
        case Hold() | Unsatisfied() | NotTaken():
            return step.text
        case _:
            assert_never(step)


def _verdict(model: Model, verdict: Verdict) -> WhyVerdict:
    fit = verdict.fit
    return WhyVerdict(
        node_id=verdict.node_id,
        node=verdict.node,
        model=model.name,
        eligible=verdict.eligible,
        text=fit.text if verdict.eligible and fit is not None else verdict.why_not,
        checks=tuple(WhyCheck(name=check.name, ok=check.ok, text=check.text) for check in verdict.checks),
        score=_score(verdict.score) if verdict.score is not None else (),
        notes=verdict.notes,
        devices=tuple(device.index for device in fit.devices) if fit is not None else (),
        memory_bytes=fit.memory_bytes if fit is not None else 0,
        fetch_bytes=verdict.fetch_bytes,
    )


def _score(score: Score) -> tuple[WhyScore, ...]:
    return tuple(
        WhyScore(name=name, value=_format_value(value), meaning=MEANINGS[name])
        for name, value in score._asdict().items()
    )


def _format_value(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def _replicas(world: World, replicas: Sequence[Replica]) -> tuple[WhyReplica, ...]:
    rules = EvictionRules(world, ANY_MODEL, Purpose.COLD)
    return tuple(_replica(world, replica, rules) for replica in replicas)


def _replica(world: World, replica: Replica, rules: EvictionRules) -> WhyReplica:
    model = world.models.get(replica.model)
    since = replica.unused_since()
    return WhyReplica(
        node=_node_name(world, replica),
        model=replica.model,
        replica=replica.index,
        state=_state(world, replica),
        process_id=replica.process_id,
        current=model is not None and model.revision == replica.revision,
        on_trial=model is not None and model.trial_revision == replica.revision != "",
        in_flight=replica.in_flight,
        slots=replica.slots,
        memory_bytes=replica.memory_bytes,
        devices=tuple(device.index for device in replica.devices),
        unused_s=max(0.0, (world.now - since).total_seconds()) if since is not None else None,
        kept=rules.why(replica),
    )


def _state(world: World, replica: Replica) -> str:
    """The last report of an offline node is out of date."""
    node = world.nodes.get(replica.node_id)
    return "node offline" if node is not None and node.status == "offline" else replica.state.value


def _node_name(world: World, replica: Replica) -> str:
    node = world.nodes.get(replica.node_id)
    return node.name if node is not None else replica.node_id


def _pool(pool: MemoryPool) -> WhySpace:
    return WhySpace(
        name=pool.name,
        limit_bytes=pool.limit_bytes,
        free_bytes=pool.free_bytes,
        reserved_bytes=pool.reserved_bytes,
        replicas=pool.replicas,
        measured=pool.measured,
        text=str(pool),
    )
