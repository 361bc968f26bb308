"""Whatever the world looks like, carrying out plans comes to rest at what is wanted, and nothing is ordered twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.contract.messages.backends import BackendResult, NodeBackend
from corral.controller.backends import outcomes
from corral.controller.backends.plan import Done, Drop, Fail, NodeWorld, Stop, plan
from corral.controller.backends.rules import Unwanted, Wanted
from corral.controller.orders.observations import OrderEnded
from corral.controller.orders.order import Build, OrderId, Send
from corral.store.records import BackendIntent, IntentStage, OrderKind

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
NEW = Build("vllm", "sha256:new")
WANTS: list[Wanted | Unwanted | None] = [
    Wanted("t", 7, "op7"),
    Wanted("t", 7, "op7", upgraded=True, max_parallel="25%"),
    Unwanted(8, "op8"),
    None,
]
BOOTS = ["b0", "b1"]


@dataclass(frozen=True)
class Machine:
    """The real node behind the world: what it has, what it is at, what it remembers."""

    digest: str = ""
    at: tuple[str, int, OrderKind] | None = None
    ended: frozenset[tuple[str, int]] = frozenset()
    done: tuple[tuple[str, int], ...] = ()  # every order it carried out
    beside: str = ""  # fetched, and not switched to


@st.composite
def worlds(draw: st.DrawFn) -> tuple[NodeWorld, Machine]:
    stage = draw(st.sampled_from(list(IntentStage)))
    kind = draw(st.sampled_from(list(OrderKind)))
    generation = draw(st.sampled_from([5, 7, 8]))
    accepted = draw(st.booleans())
    intent = BackendIntent(
        node_id="n",
        backend="vllm",
        kind=kind,
        generation=generation,
        operation_id=f"op{generation}",
        digest="" if kind is OrderKind.DELETE else draw(st.sampled_from(["sha256:new", "sha256:old"])),
        stage=stage,
        attempt=draw(st.integers(1, 3)),
        failures=draw(st.integers(0, 3)),
        next_try_at=draw(st.sampled_from([None, NOON, NOON + timedelta(minutes=5)])),
        updated_at=NOON,
        epoch=draw(st.integers(0, 1)),
        accepted_at=NOON if accepted and stage is IntentStage.SENT else None,
        boot_id=draw(st.sampled_from(BOOTS)) if accepted else "",
    )
    digest = draw(st.sampled_from(["", "sha256:new", "sha256:old"]))
    running = stage is IntentStage.SENT and draw(st.booleans())
    machine = Machine(digest, (intent.operation_id, intent.attempt, kind) if running else None)
    accepts = draw(st.booleans())
    node = NodeWorld("n1", "barn", "healthy", accepts=accepts, boot_id=draw(st.sampled_from(BOOTS)), reported_at=NOON)
    intents = {"vllm": intent} if draw(st.booleans()) or running else {}
    return _seen(replace(node, intents=intents), machine, NOON), machine


@given(worlds(), st.sampled_from(WANTS))
def test_carrying_out_plans_comes_to_rest_at_what_is_wanted(
    world: tuple[NodeWorld, Machine], want: Wanted | Unwanted | None
) -> None:
    node, machine = world
    now, resting = NOON, 0
    for _ in range(40):
        steps = plan(node, {"vllm": want} if want else {}, {"vllm": NEW}, now, epoch=1)
        orders = [step for step in steps if isinstance(step, Send)]
        assert len(orders) <= 1
        node, machine = _carried_out(node, machine, steps, now)
        now += timedelta(minutes=2)
        node, machine = _worked(node, machine, now)
        resting = resting + 1 if not steps and machine.at is None else 0
        if resting == 2:  # once may mean that old news is not believed yet
            break
        intent = node.intents.get("vllm")
        if (
            intent is not None
            and intent.stage is IntentStage.PARKED
            and want is not None
            and intent.generation == _of(want)
        ):
            break  # rests, told, until a person or a new rule moves it
    else:
        pytest.fail(f"still moving: {node} {machine}")
    assert len(set(machine.done)) == len(machine.done), "an order was carried out twice"
    parked = node.intents.get("vllm") is not None and node.intents["vllm"].stage is IntentStage.PARKED
    if want is not None and not parked:
        assert machine.digest == ("sha256:new" if isinstance(want, Wanted) else "")


def _of(want: Wanted | Unwanted) -> int:
    return want.generation


def _carried_out(
    node: NodeWorld, machine: Machine, steps: Sequence[object], now: datetime
) -> tuple[NodeWorld, Machine]:
    """The controller's part, and the worker's answer to an order."""
    intents = dict(node.intents)
    for step in steps:
        before = intents.get("vllm")
        match step:
            case Send():
                late = None if node.accepts else now + timedelta(minutes=15)
                claimed = outcomes.claim(node.id, before, step, now, epoch=1, answer_by=late)
                intents["vllm"] = outcomes.accepted(claimed, node.boot_id, now) if node.accepts else claimed
                if (step.operation, step.attempt) not in machine.ended:
                    assert (
                        machine.at is None or (machine.at[:2] == (step.operation, step.attempt)) or not _is_known(node)
                    ), "two orders at once"
                    machine = replace(machine, at=(step.operation, step.attempt, step.kind))
            case Done():
                intents["vllm"] = outcomes.done(node.id, before, step, now)
            case Drop() if before is not None:
                intents["vllm"] = outcomes.dropped(before, now)
            case Fail() if before is not None:
                intents["vllm"] = outcomes.failed(before, step.reason, now)
            case Stop() if before is not None:
                if machine.at is None:
                    intents["vllm"] = outcomes.over(before, now)
                else:
                    machine = replace(machine, at=None, ended=machine.ended | {machine.at[:2]})
                    intents["vllm"] = outcomes.ended(
                        before,
                        OrderEnded(OrderId("n", before.operation_id, before.attempt), False, cancelled=True),
                        now,
                    )
            case _:
                pass
    return replace(node, intents=intents), machine


def _is_known(node: NodeWorld) -> bool:
    """Whether the controller could have known of the running order: it is told of it, or it is its own."""
    intent = node.intents.get("vllm")
    return intent is not None and intent.stage is IntentStage.SENT


def _worked(node: NodeWorld, machine: Machine, now: datetime) -> tuple[NodeWorld, Machine]:
    """The worker ends what it is at; its event may be lost, so only the next heartbeat tells."""
    if machine.at is not None:
        operation, attempt, kind = machine.at
        digest = {OrderKind.DELETE: "", OrderKind.FETCH: machine.digest}.get(kind, "sha256:new")
        beside = "sha256:new" if kind is OrderKind.FETCH and machine.digest else ""
        done = (*machine.done, (operation, attempt))
        machine = Machine(digest, None, machine.ended | {(operation, attempt)}, done, beside)
    node = _seen(node, machine, now)
    results = {key: BackendResult(key[0], key[1], "n1", "vllm", True) for key in machine.ended}
    if node.accepts:
        node = replace(node, intents={**node.intents, **outcomes.catch_up(node, results, now)})
    return node, machine


def _seen(node: NodeWorld, machine: Machine, now: datetime) -> NodeWorld:
    fetched = (machine.beside,) if machine.beside else ()
    rows = (NodeBackend("vllm", False, False, digest=machine.digest, installed_at=now.isoformat(), fetched=fetched),)
    orders = machine.ended | ({machine.at[:2]} if machine.at else set())
    return replace(
        node, backends=rows if machine.digest else (), orders=orders if node.accepts else frozenset(), reported_at=now
    )
