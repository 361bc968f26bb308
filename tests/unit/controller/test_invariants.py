"""What must always hold, asked of facts in which it does not."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from corral.contract.messages.backends import NodeBackend
from corral.controller.health.classify import Guard
from corral.store.records import (
    BackendIntent,
    BackendRequest,
    BackendRule,
    IntentStage,
    OperationNode,
    OperationNodeStatus,
    OrderKind,
    ScopeKind,
    Want,
)
from corral.store.tables.node_backends import Inventory
from corral.store.tables.nodes import NodePulse
from corral.store.tables.operations import Operation, StoredRequest
from tests.support import invariants
from tests.support.invariants import Facts, TakenOut

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
ASKED = BackendRequest("vllm")
OPERATION = Operation(
    id="op",
    kind="install",
    backend="vllm",
    scope_kind="all",
    scope_value="",
    generation=7,
    created_at=NOON,
    request=StoredRequest(ASKED),
)
RULE = BackendRule(
    generation=7,
    operation_id="op",
    scope_kind=ScopeKind("all"),
    scope_value="",
    backend="vllm",
    want=Want("present"),
    target="t",
    created_at=NOON,
    request=ASKED,
)


def row(status: str, **more: Any) -> OperationNode:
    return msgspec.structs.replace(
        OperationNode(
            operation_id="op",
            node_id="n1",
            node_name="barn",
            status=OperationNodeStatus(status),
            updated_at=NOON,
            digest="sha256:new",
        ),
        **more,
    )


def facts(*rows: OperationNode, digest: str = "", rule: bool = True, **operation: Any) -> Facts:
    backends = (NodeBackend("vllm", False, False, digest=digest),) if digest else ()
    return Facts(
        {"op": msgspec.structs.replace(OPERATION, **operation)},
        {(one.operation_id, one.node_id): one for one in rows},
        {7: RULE} if rule else {},
        {"n1": Inventory(node_id="n1", boot_id="b1", seq=1, seen_at=NOON, backends=backends)},
    )


def test_all_is_well() -> None:
    begun, under_way = facts(row("queued")), facts(row("downloading", attempt=1, seq=3, percentage=50.0))
    done = facts(row("success", attempt=1, seq=9, percentage=100.0), digest="sha256:new", finished_at=NOON)
    for before, after in ((Facts(), begun), (begun, under_way), (under_way, done), (done, done)):
        assert invariants.broken(before, after) == []


def test_nothing_accepted_is_forgotten() -> None:
    begun = facts(row("queued"))
    assert "vanished" in invariants.forgotten(begun, Facts())[0]
    assert "forgot about node barn" in invariants.forgotten(begun, facts())[0]
    assert invariants.forgotten(facts(row("success"), finished_at=NOON), Facts()) == [], "what has ended may be pruned"


def test_an_operation_is_open_as_long_as_a_row_is() -> None:
    assert "said to have ended" in invariants.astray(facts(row("queued"), finished_at=NOON))[0]
    assert "no rule asks" in invariants.astray(facts(row("queued"), rule=False))[0]
    assert "nothing left to do" in invariants.astray(facts(row("success")))[0]


def test_nobody_works_unseen() -> None:
    intent = BackendIntent(
        node_id="n1",
        backend="vllm",
        kind=OrderKind("install"),
        stage=IntentStage("sent"),
        generation=7,
        operation_id="op",
        attempt=1,
        updated_at=NOON,
    )
    seen, unseen = facts(row("downloading")), facts()
    assert invariants.unseen(with_intent(seen, intent)) == []
    assert "shows no row" in invariants.unseen(with_intent(unseen, intent))[0]


def with_intent(known: Facts, intent: BackendIntent) -> Facts:
    return Facts(known.operations, known.rows, known.rules, known.inventories, known.nodes, {("n1", "vllm"): intent})


def test_orders_go_to_nodes_that_hear_them() -> None:
    intent = BackendIntent(
        node_id="n1",
        backend="vllm",
        kind=OrderKind("install"),
        stage=IntentStage("sent"),
        generation=7,
        operation_id="op",
        attempt=1,
        updated_at=NOON,
        sent_at=NOON,
    )
    well = NodePulse(id="n1", status="healthy", status_changed_at=NOON, last_heartbeat=NOON, left=False)
    away = msgspec.structs.replace(well, status="offline")
    for known, said in (((away, ()), "is not healthy"), ((well, {"n1"}), "hears none")):
        bad = Facts(nodes={"n1": known[0]}, bus_down=known[1])
        sent = replace(bad, intents={("n1", "vllm"): intent})
        assert said in invariants.ordered_in_vain([bad], sent)[0]
        assert invariants.ordered_in_vain([Facts(nodes={"n1": well}), bad], sent) == [], "it was decided a moment ago"
        assert invariants.ordered_in_vain([sent], sent) == [], "it was ordered long ago"


def test_a_success_is_one_the_inventory_shows() -> None:
    begun = facts(row("downloading"))
    for digest in ("", "sha256:old"):
        assert "does not show" in invariants.unproven(begun, facts(row("success"), digest=digest))[0]
    assert "does not show" in invariants.unproven(begun, facts(row("success"), digest="sha256:old", kind="delete"))[0]
    assert invariants.unproven(begun, facts(row("success"), kind="delete")) == []
    ended = facts(row("success"), digest="sha256:new")
    assert invariants.unproven(ended, facts(row("success"))) == [], "what was shown once need not stay for ever"


def test_nothing_goes_backwards_and_an_end_is_an_end() -> None:
    before = facts(row("downloading", attempt=2, seq=5, percentage=50.0))
    for changed in (
        row("downloading", attempt=2, seq=4, percentage=60.0),
        row("downloading", attempt=1, seq=9, percentage=60.0),
        row("downloading", attempt=2, seq=6, percentage=40.0),
    ):
        assert "went back" in invariants.backwards(before, facts(changed))[0]
    assert invariants.backwards(before, facts(row("downloading", attempt=3, seq=0))) == [], "a new try begins anew"
    assert "had ended as success" in invariants.backwards(facts(row("success")), facts(row("queued")))[0]


def test_automation_takes_out_no_more_than_its_share() -> None:
    def fleet(*offline: int) -> Facts:
        return Facts(
            nodes={
                f"n{number}": NodePulse(
                    id=f"n{number}",
                    status="offline" if number in offline else "healthy",
                    status_changed_at=NOON,
                    last_heartbeat=NOON,
                    left=False,
                )
                for number in range(5)
            }
        )

    guard = Guard(40, 3)
    fallen = invariants.taken_out(fleet(), fleet(0, 1, 2), NOON, MINUTE)
    assert len(fallen) == 3
    assert "3 of 5" in invariants.too_many_taken_out(fallen, guard, MINUTE)[0]
    assert invariants.too_many_taken_out(fallen[:2], guard, MINUTE) == []
    assert [one.node_id for one in invariants.still_out(fallen, fleet(1))] == ["n1"], "who is back is not out"
    slowly = [TakenOut(one.node_id, NOON + number * MINUTE, 5) for number, one in enumerate(fallen)]
    assert invariants.too_many_taken_out(slowly, guard, MINUTE) == []
    left = {id: msgspec.structs.replace(node, left=True) for id, node in fleet(0, 1, 2).nodes.items()}
    assert invariants.taken_out(fleet(), Facts(nodes=left), NOON, MINUTE) == [], "who says goodbye leaves by itself"


def test_at_rest_the_world_is_as_the_rules_say() -> None:
    wanted = [("n1", "a", "x"), ("n1", "b", None), ("n1", "c", "")]
    assert invariants.unlike(wanted, {("n1", "a"): "x", ("n1", "c"): "whatever"}) == []
    assert len(invariants.unlike(wanted, {("n1", "a"): "y", ("n1", "b"): "x"})) == 3
