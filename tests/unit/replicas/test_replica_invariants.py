"""What must hold of replicas: each breach is told, and nothing else is."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from msgspec import structs

from corral.contract.loads import LoadState
from corral.contract.messages.backends import NodeBackend
from corral.controller.replicas.load_jobs import NOT_INSTALLED
from corral.store.records import DesiredReplica, LoadJob, ReplicaStage
from tests.support import replica_invariants as invariants
from tests.support.replica_invariants import Memory, ReplicaFacts

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def a_row(node: str, model: str = "m", stage: str = "running", **known: Any) -> DesiredReplica:
    was_told: dict[str, Any] = {
        "op_id": f"op-{node}",
        "process_id": f"p-{node}",
        "created_at": NOON,
        "updated_at": NOON,
    }
    return DesiredReplica(
        node_id=node,
        model=model,
        replica=0,
        revision="r1",
        backend="b",
        stage=ReplicaStage(stage),
        **(was_told | known),
    )


def data(*rows: DesiredReplica, **known: Any) -> ReplicaFacts:
    keys = {(row.node_id, row.model, row.replica): row for row in rows}
    was_told: dict[str, Any] = {
        "revisions": {"m": "r1"},
        "statuses": {row.node_id: "healthy" for row in rows},
        "ready": set(keys),
    }
    return ReplicaFacts(keys, **(was_told | known))


EVICTED: dict[str, Any] = {"stage": "leaving", "reason": "it was evicted for other"}


def test_what_gives_way_leaves_the_least() -> None:
    before = data(a_row("a"), a_row("b"), least={"m": 1})
    assert invariants.broken(before, data(a_row("a", **EVICTED), a_row("b"), least={"m": 1})) == []
    too_many = data(a_row("a", **EVICTED), a_row("b", **EVICTED), least={"m": 1})
    assert invariants.broken(before, too_many) == ["m had to end replicas and has 0 left of at least 1"]
    asked = data(a_row("a", stage="leaving", reason="a user unloaded it"), least={"m": 1})
    assert invariants.broken(data(a_row("a"), least={"m": 1}), asked) == [], "that is not automation's doing"


def test_one_that_does_not_serve_is_not_what_is_left() -> None:
    before = data(a_row("a"), a_row("b"), least={"m": 1}, ready={("a", "m", 0)})
    after = replace(data(a_row("a", **EVICTED), a_row("b"), least={"m": 1}), ready={("a", "m", 0)})
    assert invariants.ended_too_many(before, after)


def test_a_former_revision_never_answers_again() -> None:
    own, former = data(answering={"m": "r1"}), data(answering={"m": "r0"})
    assert invariants.back_to_an_earlier(former, own) == []
    assert invariants.back_to_an_earlier(own, former) == ["m answered as r1 and now as r0"]
    assert invariants.back_to_an_earlier(own, replace(former, revisions={"m": "r2"})) == [], "it was edited"
    assert invariants.back_to_an_earlier(own, data()) == [], "nothing answers"


def test_one_load_at_a_time_of_what_nobody_scheduled() -> None:
    one, two = a_row("a", stage="ordered"), a_row("b", stage="placed")
    begins = data(one, two)
    before = replace(data(one), statuses=begins.statuses)
    assert invariants.loaded_twice(before, begins) == ["m is being loaded 2 times at once"]
    assert invariants.loaded_twice(begins, begins) == [], "told when the second one began"
    assert invariants.loaded_twice(before, replace(begins, scaled={"m"})) == []
    assert invariants.loaded_twice(before, replace(begins, statuses={"a": "draining", "b": "healthy"})) == []
    assert invariants.loaded_twice(before, replace(begins, revisions={"m": "r2"})) == [], "the first one is stale"


def test_what_nobody_uses_leaves_the_least_as_well() -> None:
    unused: dict[str, Any] = {"stage": "leaving", "reason": "unused for more than 300 s"}
    before = data(a_row("a"), least={"m": 1})
    assert invariants.broken(before, data(a_row("a", **unused), least={"m": 1}))
    assert invariants.broken(before, data(a_row("a", **unused), least={"m": 0})) == [], "nobody asks for one any more"


def test_a_load_that_failed_waits_for_its_time() -> None:
    failed = LoadJob(
        model="m",
        state=LoadState.FAILED,
        created_at=NOON,
        updated_at=NOON,
        revision="r1",
        retry_at=NOON + timedelta(seconds=30),
    )
    again = structs.replace(failed, state=LoadState.PENDING, retry_at=None)
    before = data(jobs={"m": failed})
    at = {seconds: NOON + timedelta(seconds=seconds) for seconds in (10, 30)}
    assert invariants.loaded_too_early(before, data(jobs={"m": again}, at=at[10]))
    assert invariants.loaded_too_early(before, data(jobs={"m": again}, at=at[30])) == []
    changed = structs.replace(again, revision="r2")
    assert invariants.loaded_too_early(before, data(jobs={"m": changed}, at=at[10])) == [], "it was edited"
    lacked = data(jobs={"m": structs.replace(before.jobs["m"], failed_on={"n": f"vllm{NOT_INSTALLED}no libgomp"})})
    for name, is_wrong in (("vllm", False), ("piper", True)):
        there = data(jobs={"m": again}, at=at[10], installed={"n": [NodeBackend(name=name)]})
        assert bool(invariants.loaded_too_early(lacked, there)) is is_wrong


PLACED: dict[str, Any] = {
    "allowed": {"m": ("r1",)},
    "statuses": {"a": "healthy"},
    "memory": {"a": Memory(16, available_bytes=6, spare_bytes=1)},
}


@pytest.mark.parametrize(
    ("row", "known", "said"),
    [
        ({}, {}, ""),
        ({"revision": "r0"}, {}, "which may not answer"),
        ({"revision": "r0", "op_id": "adopted-p"}, {}, "which may not answer"),
        ({}, {"statuses": {"a": "offline"}}, "which is offline"),
        ({"op_id": "adopted-p"}, {"statuses": {"a": "draining"}}, ""),
        ({}, {"bus_down": {"a"}}, "which hears no orders"),
        ({}, {"selected": {"m": {"b"}}}, "which its schedule does not select"),
        ({"memory_bytes": 5}, {}, ""),
        ({"memory_bytes": 6}, {}, "whose memory does not hold it"),
        ({"memory_bytes": 6}, {"memory": {"a": Memory(16, available_bytes=7, spare_bytes=1)}}, ""),
        ({"memory_bytes": 6}, {"memory": {}}, ""),
    ],
)
def test_what_begins_may_be_there(row: dict[str, Any], known: dict[str, Any], said: str) -> None:
    before = data(**(PLACED | known))
    new = a_row("a", stage="placed", **row) if "revision" not in row else _of_revision("a", **row)
    wrong = invariants.broken_lately([before], data(new, **(PLACED | known)))
    assert [said in each for each in wrong] == ([True] if said else [])
    a_moment_ago = data(**PLACED)
    if "memory_bytes" not in row and "revision" not in row:
        after = data(new, **(PLACED | known))
        assert invariants.broken_lately([a_moment_ago, before], after) == [], "it was decided a moment ago"


def _of_revision(node: str, revision: str, **known: Any) -> DesiredReplica:
    return structs.replace(a_row(node, stage="running", **known), revision=revision)


def test_memory_of_those_that_start_is_taken_already() -> None:
    old, new = a_row("a", "o", "ordered", memory_bytes=3), a_row("a", stage="placed", op_id="new", memory_bytes=3)
    known = PLACED | {"allowed": {"m": ("r1",), "o": ("r1",)}}
    assert invariants.broken_lately([data(old, **known)], data(old, new, **known))
    ready = structs.replace(old, stage="running")
    assert invariants.broken_lately([data(ready, **known)], data(ready, new, **known)) == []


def test_no_replica_begins_beyond_the_most() -> None:
    one, two = a_row("a"), a_row("b", stage="placed")
    known: dict[str, Any] = {"allowed": {"m": ("r1",)}, "statuses": {"a": "healthy", "b": "healthy"}, "most": {"m": 1}}
    assert invariants.broken_lately([data(one, **known)], data(one, two, **known))
    away = known | {"statuses": {"a": "offline", "b": "healthy"}}
    assert invariants.broken_lately([data(one, **away)], data(one, two, **away)) == [], "it stands in for the other"
    unbound = known | {"most": {}}
    assert invariants.broken_lately([data(one, **unbound)], data(one, two, **unbound)) == []


BIG: dict[str, Any] = {
    "allowed": {"m": ("r1",), "o": ("r1",)},
    "groups": {"m": {"big"}, "o": {"small", "big"}},
    "statuses": {"a": "healthy"},
}


@pytest.mark.parametrize(
    ("rival", "known"),
    [
        (a_row("a", "o", "running"), {}),
        (a_row("a", "o", "leaving"), {}),
        (a_row("a", "o", "placed"), {}),
        (None, {"listed": {"a": {"o"}}}),
    ],
)
def test_no_replica_begins_beside_another_of_its_exclusive_group(
    rival: DesiredReplica | None, known: dict[str, Any]
) -> None:
    new, there = a_row("a", stage="placed", op_id="new"), [rival] if rival is not None else []
    before, after = data(*there, **(BIG | known)), data(*there, new, **(BIG | known))
    said = ["m is placed on a beside o of the same exclusive group"]
    assert invariants.broken_lately([before], after) == said
    # Whoever decided a moment ago did not know of the group.
    ungrouped = replace(before, groups={"m": {"big"}})
    assert invariants.broken_lately([ungrouped, before], after) == []
    found = data(*there, structs.replace(new, op_id="adopted-p"), **(BIG | known))
    assert invariants.broken_lately([before], found) == [], "it was found running"
    elsewhere = [structs.replace(each, node_id="b") for each in there]
    assert invariants.broken_lately([data(*elsewhere, **BIG)], data(*elsewhere, new, **BIG)) == []


def test_two_of_a_group_that_begin_together_and_a_process_that_has_gone() -> None:
    one, two = a_row("a", stage="placed", op_id="one"), a_row("a", "o", "placed", op_id="two")
    assert len(invariants.broken_lately([data(**BIG)], data(one, two, **BIG))) == 2
    listed = data(**BIG, listed={"a": {"o"}})
    assert invariants.broken_lately([listed], data(one, **BIG)) == []
    again = data(a_row("a", stage="running"), **BIG)
    assert invariants.broken_lately([again], data(*again.rows.values(), **BIG)) == []


def test_members_that_run_together() -> None:
    groups = {"m": {"big"}, "o": {"small", "big"}, "p": {"small"}}
    together = invariants.members_together({"b": {"m", "p", "q"}, "a": {"o", "m", "p"}}, groups)
    assert together == [("a", "m", "o"), ("a", "o", "p")]
