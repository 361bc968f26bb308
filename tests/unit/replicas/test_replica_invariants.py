"""What must hold of replicas: each breach is told, and nothing else is."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from corral.controller.replicas import invariants
from corral.controller.replicas.invariants import ReplicaFacts
from corral.store.replicas import Replica

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def a_row(node: str, model: str = "m", stage: str = "running", **known: Any) -> Replica:
    told: dict[str, Any] = {"op_id": f"op-{node}", "process_id": f"p-{node}", "created_at": NOON, "updated_at": NOON}
    return Replica(node, model, 0, "r1", "b", stage, **(told | known))


def facts(*rows: Replica, **known: Any) -> ReplicaFacts:
    keys = {(row.node_id, row.model, row.replica): row for row in rows}
    told: dict[str, Any] = {
        "revisions": {"m": "r1"},
        "statuses": {row.node_id: "healthy" for row in rows},
        "ready": set(keys),
    }
    return ReplicaFacts(keys, **(told | known))


EVICTED: dict[str, Any] = {"stage": "leaving", "reason": "it makes room for other"}


def test_what_gives_way_leaves_the_least() -> None:
    before = facts(a_row("a"), a_row("b"), least={"m": 1})
    assert invariants.broken(before, facts(a_row("a", **EVICTED), a_row("b"), least={"m": 1})) == []
    too_many = facts(a_row("a", **EVICTED), a_row("b", **EVICTED), least={"m": 1})
    assert invariants.broken(before, too_many) == ["m had to make room and has 0 replicas left of at least 1"]
    asked = facts(a_row("a", stage="leaving", reason="somebody unloaded it"), least={"m": 1})
    assert invariants.broken(facts(a_row("a"), least={"m": 1}), asked) == [], "that is not automation's doing"


def test_one_that_does_not_serve_is_not_what_is_left() -> None:
    before = facts(a_row("a"), a_row("b"), least={"m": 1}, ready={("a", "m", 0)})
    after = replace(facts(a_row("a", **EVICTED), a_row("b"), least={"m": 1}), ready={("a", "m", 0)})
    assert invariants.evicted_too_many(before, after)


def test_a_former_revision_never_answers_again() -> None:
    own, former = facts(answering={"m": "r1"}), facts(answering={"m": "r0"})
    assert invariants.back_to_an_earlier(former, own) == []
    assert invariants.back_to_an_earlier(own, former) == ["m answered as r1 and now as r0"]
    assert invariants.back_to_an_earlier(own, replace(former, revisions={"m": "r2"})) == [], "it was edited"
    assert invariants.back_to_an_earlier(own, facts()) == [], "nothing answers"


def test_one_load_at_a_time_of_what_nobody_scheduled() -> None:
    one, two = a_row("a", stage="ordered"), a_row("b", stage="placed")
    begins = facts(one, two)
    before = replace(facts(one), statuses=begins.statuses)
    assert invariants.loaded_twice(before, begins) == ["m is being loaded 2 times at once"]
    assert invariants.loaded_twice(begins, begins) == [], "told when the second one began"
    assert invariants.loaded_twice(before, replace(begins, scaled={"m"})) == []
    assert invariants.loaded_twice(before, replace(begins, statuses={"a": "draining", "b": "healthy"})) == []
    assert invariants.loaded_twice(before, replace(begins, revisions={"m": "r2"})) == [], "the first one is stale"
