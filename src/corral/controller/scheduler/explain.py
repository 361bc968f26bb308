"""What was looked at and found, in the words of `corral why`. Pure: the same functions decide and explain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from corral.contract.why import WhyCheck, WhyModel, WhyNode, WhyReplica, WhyScore, WhySpace, WhyVerdict
from corral.controller.scheduler.evict import Decision, Keeping, MakeRoom, Purpose, WaitForRoom, choose_place
from corral.controller.scheduler.place import NoRoom, Placed, Score, Verdict, check_node, judge
from corral.controller.scheduler.room import Space, room_of
from corral.controller.scheduler.scale import Down, Hold, Step, Unsatisfied, Up, plan_scale
from corral.controller.scheduler.world import Model, Node, Replica, World

# The ranking, in the order in which it is compared.
MEANINGS = {
    "failed": "its last start there failed",
    "grouped": "replicas there that it should keep apart from",
    "uncertain": "nobody knows whether it fits",
    "in_ram": "without an accelerator",
    "replicas": "replicas of it there already",
    "fetch": "of backend and files, to be brought first",
    "loaded": "other models are there",
    "in_flight": "requests under way there",
    "used_bytes": "the negative of what is free",
    "name": "the name, when all is equal",
}

SOMEBODY = Model("", "")  # another model, that nothing answers for: what would have to give way to it


def explain_model(world: World, model: Model) -> WhyModel:
    """Where its next replica would go, and whether one is wanted."""
    decision = choose_place(world, model, _purpose(world, model))
    scaling = plan_scale(world, model)
    name, text = _decided(decision)
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
        kept=decision.kept if isinstance(decision, NoRoom) else (),
        nodes=tuple(_verdict(model, verdict) for verdict in decision.verdicts),
    )


def explain_node(world: World, node: Node) -> WhyNode:
    check = check_node(node)
    room = room_of(node, world.on_node.get(node.id, ()), world.policy)
    models = sorted(world.models.values(), key=lambda model: model.name)
    return WhyNode(
        node_id=node.id,
        node=node.name,
        accepts=check.ok,
        text="takes new replicas" if check.ok else check.text,
        spaces=tuple(map(_space, (*room.devices, room.ram))),
        budget_bytes=room.budget_bytes,
        left_of_budget=room.left_of_budget,
        replicas=_replicas(world, world.on_node.get(node.id, ())),
        models=tuple(_verdict(model, judge(world, model, node)) for model in models),
    )


def _purpose(world: World, model: Model) -> Purpose:
    """What its next replica would be for."""
    there = len(world.of_model.get(model.name, ()))
    if not there:
        return Purpose.COLD
    return Purpose.MINIMUM if there < model.schedule.min_replicas else Purpose.GROWTH


def _decided(decision: Decision) -> tuple[str, str]:
    match decision:
        case Placed():
            return "placed", decision.text
        case MakeRoom():
            return "make_room", decision.text
        case WaitForRoom():
            return "wait", decision.text
        case NoRoom():
            return "no_room", decision.text
        case _:
            assert_never(decision)


def _step_name(step: Step) -> str:
    match step:
        case Up():
            return "up"
        case Down():
            return "down"
        case Hold():
            return "hold"
        case Unsatisfied():
            return "unsatisfied"
        case _:
            assert_never(step)


def _step_text(world: World, step: Step) -> str:
    match step:
        case Up():
            return f"{step.text}; {_decided(step.decision)[1]}"
        case Down():
            return f"replica {step.replica.index} on {_node_name(world, step.replica)}: {step.text}"
        case Hold() | Unsatisfied():
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
        WhyScore(name=name, value=_shown(value), meaning=MEANINGS[name]) for name, value in score._asdict().items()
    )


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def _replicas(world: World, replicas: Sequence[Replica]) -> tuple[WhyReplica, ...]:
    keeping = Keeping(world, SOMEBODY, Purpose.COLD)
    return tuple(_replica(world, replica, keeping) for replica in replicas)


def _replica(world: World, replica: Replica, keeping: Keeping) -> WhyReplica:
    model = world.models.get(replica.model)
    since = replica.unused_since()
    return WhyReplica(
        node=_node_name(world, replica),
        model=replica.model,
        replica=replica.index,
        state=_state(world, replica),
        process_id=replica.process_id,
        current=model is not None and model.revision == replica.revision,
        in_flight=replica.in_flight,
        slots=replica.slots,
        memory_bytes=replica.memory_bytes,
        devices=tuple(device.index for device in replica.devices),
        unused_s=max(0.0, (world.now - since).total_seconds()) if since is not None else None,
        kept=keeping.why(replica),
    )


def _state(world: World, replica: Replica) -> str:
    """What its node said last is old news once the node is gone."""
    node = world.nodes.get(replica.node_id)
    return "node offline" if node is not None and node.status == "offline" else replica.state.value


def _node_name(world: World, replica: Replica) -> str:
    node = world.nodes.get(replica.node_id)
    return node.name if node is not None else replica.node_id


def _space(space: Space) -> WhySpace:
    return WhySpace(
        name=space.name,
        limit_bytes=space.limit_bytes,
        free_bytes=space.free_bytes,
        reserved_bytes=space.reserved_bytes,
        replicas=space.replicas,
        measured=space.measured,
        text=str(space),
    )
