"""When a switch waits for another node, and what becomes of the row that says so."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from corral.contract.messages.replicas import ReplicaProcess
from corral.controller.backends.moves import (
    awaited,
    is_being_switched,
    is_step_of,
    is_switch,
    mark_due,
    models_of,
    waits_text,
)
from corral.controller.backends.plan import Done, Hold, HoldCause, Step, Wait
from corral.controller.backends.world import World
from corral.controller.orders.order import Send
from corral.store.records import DueSwitch, OrderKind

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
SWITCH = Send("vllm", OrderKind.UPGRADE, None, 7, "op", 2, max_parallel="25%")
DUE = DueSwitch("n", "vllm", "op", NOON, ("m",))


def process(model: str, state: str = "ready") -> ReplicaProcess:
    return ReplicaProcess(f"p-{model}-{state}", model, 0, "vllm", state, "openai")


def test_only_processes_that_may_serve_count_once_each() -> None:
    found = models_of([process("b"), process("a", "starting"), process("a"), process("c", "failed"), process("")])
    assert found == ("a", "b")


@pytest.mark.parametrize(
    ("step", "switch"),
    [
        (SWITCH, True),
        (Send("vllm", OrderKind.INSTALL, None, 7, "op", 2, force=True), True),
        (Send("vllm", OrderKind.UPGRADE, None, 7, "op", 2, max_parallel="25%", again=True), False),
        (Send("vllm", OrderKind.FETCH, None, 7, "op", 2, max_parallel="25%"), False),
        (Send("vllm", OrderKind.DELETE, None, 7, "op", 2), False),
    ],
)
def test_new_orders_that_replace_processes_are_switches(step: Send, switch: bool) -> None:
    assert is_switch(step) is switch


@pytest.mark.parametrize(
    ("step", "being"),
    [
        (SWITCH, False),  # this pass still decides about it
        (Send("vllm", OrderKind.UPGRADE, None, 7, "op", 2, again=True), True),
        (Wait("vllm", "op", OrderKind.UPGRADE), True),
        (Wait("vllm", "op", OrderKind.FETCH), False),
        (Hold("vllm", "op", OrderKind.UPGRADE, HoldCause.TURN, "waits for its turn"), False),
        (Done("vllm", "op", kind=OrderKind.UPGRADE), False),
    ],
)
def test_a_node_with_an_order_to_switch_may_be_ending_processes(step: Step, being: bool) -> None:
    assert is_being_switched(step) is being


def test_the_row_stays_while_the_node_carries_out_its_order_and_no_other() -> None:
    assert is_step_of(Wait("vllm", "op", OrderKind.UPGRADE), DUE)
    assert not is_step_of(Wait("vllm", "later", OrderKind.UPGRADE), DUE)
    assert not is_step_of(Wait("piper", "op", OrderKind.UPGRADE), DUE)
    assert not is_step_of(SWITCH, DUE)


def test_a_row_names_the_models_of_the_processes_that_end_and_keeps_its_time() -> None:
    assert mark_due(None, "n", SWITCH, ("m",), NOON) == DUE
    grown = mark_due(DUE, "n", SWITCH, ("a",), NOON + MINUTE)
    assert (grown.models, grown.since) == (("a", "m"), NOON)


def test_another_operation_begins_a_row_of_its_own() -> None:
    old = DueSwitch("n", "vllm", "earlier", NOON, ("m",), {"m": "too small"})
    assert mark_due(old, "n", SWITCH, ("m",), NOON + MINUTE) == DueSwitch("n", "vllm", "op", NOON + MINUTE, ("m",))


REFUSED = DueSwitch("n", "vllm", "op", NOON, ("m",), {"m": "too small"})


@pytest.mark.parametrize(
    ("due", "lacking", "coming", "after", "expected"),
    [
        (DUE, ("m",), (), MINUTE, ("m",)),
        (DUE, (), (), MINUTE, ()),  # another node serves it
        (REFUSED, ("m",), (), MINUTE, ()),  # nobody can
        (REFUSED, ("m",), ("m",), MINUTE, ("m",)),  # but one that switches will serve it again
        (DUE, ("m",), ("m",), 10 * MINUTE, ("m",)),
        (DUE, ("m",), ("m",), 10 * MINUTE + timedelta(seconds=1), ()),  # long enough
        (REFUSED, ("a", "m"), (), MINUTE, ("a",)),
    ],
)
def test_a_switch_waits_as_long_as_that_can_help(
    due: DueSwitch,
    lacking: tuple[str, ...],
    coming: tuple[str, ...],
    after: timedelta,
    expected: tuple[str, ...],
) -> None:
    assert awaited(due, lacking, coming, NOON + after) == expected


def test_the_row_of_the_operation_names_the_models() -> None:
    assert waits_text(("a", "b")) == (
        "waits until another node serves a, b, 10 minutes at most: memory does not hold both versions"
    )


def test_a_node_that_switches_itself_does_not_count_as_serving() -> None:
    world = World(NOON)
    world.serving = {"m": frozenset({"n", "other"}), "alone": frozenset({"n"}), "twice": frozenset({"other", "third"})}
    assert world.unserved_without("n", ("m", "alone", "twice"), set()) == (("alone",), frozenset())
    assert world.unserved_without("n", ("m", "alone", "twice"), {"other"}) == (("m", "alone"), frozenset({"m"}))
