"""What becomes of an intent: attempts are counted where the node failed, and only there."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from msgspec import structs

from corral.contract.messages.backends import BackendResult
from corral.controller.backends import outcomes
from corral.controller.backends.plan import Done, NodeWorld
from corral.controller.orders.observations import OrderEnded
from corral.controller.orders.order import Build, OrderId, Send
from corral.store.records import BackendIntent, IntentStage, OrderKind

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
SEND = Send("vllm", OrderKind.INSTALL, Build("cpu-vllm", "sha256:new"), 7, "op7", 2, before="monday")
SENT = BackendIntent(
    node_id="n1",
    backend="vllm",
    kind=OrderKind.INSTALL,
    stage=IntentStage.SENT,
    generation=7,
    operation_id="op7",
    attempt=2,
    variant="cpu-vllm",
    digest="sha256:new",
    epoch=3,
    sent_at=NOON,
    updated_at=NOON,
)


def result(**known: Any) -> OrderEnded:
    return OrderEnded(OrderId("n1", "op7", 2, "vllm"), **({"success": False} | known))


def reported_result(**known: Any) -> BackendResult:
    defaults: dict[str, Any] = {"op_id": "op7", "attempt": 2, "node_id": "n1", "backend": "vllm"}
    return BackendResult(**(defaults | known))


def test_retries_back_off_to_a_quarter_of_an_hour_for_ever() -> None:
    waits = [outcomes.DEFAULT_RETRY.delay(n).total_seconds() for n in (1, 2, 3, 5, 6, 7, 10_000)]
    assert waits == [30, 60, 120, 480, 900, 900, 900]


def test_an_order_is_claimed_with_all_that_is_needed_to_find_it_again() -> None:
    claimed = outcomes.claim("n1", None, SEND, NOON, epoch=3, answer_by=None)
    assert claimed == structs.replace(SENT, before="monday")
    failing = structs.replace(SENT, stage=IntentStage.WAITING, failures=4, reason="disk full", attempt=1)
    assert outcomes.claim("n1", failing, SEND, NOON, epoch=3, answer_by=None).failures == 4
    newer = replace(SEND, generation=8)
    assert outcomes.claim("n1", failing, newer, NOON, epoch=3, answer_by=None).failures == 0, "a new rule starts afresh"
    repeated = outcomes.claim(
        "n1", structs.replace(SENT, before="sunday"), replace(SEND, again=True), NOON, epoch=3, answer_by=None
    )
    assert repeated.before == "sunday", "the same order still changes what was there at first"


def test_a_timeout_is_no_failure() -> None:
    late = outcomes.still_running(structs.replace(SENT, failures=2), NOON, timedelta(seconds=5))
    assert (late.stage, late.running, late.failures, late.attempt) == ("sent", True, 2, 2)
    assert late.next_try_at == NOON + timedelta(seconds=5)


def test_a_refusal_counts_and_backs_off() -> None:
    once = outcomes.ended(structs.replace(SENT, accepted_at=NOON), result(error="disk full"), NOON)
    assert (once.stage, once.failures, once.reason) == ("waiting", 1, "disk full")
    assert once.next_try_at == NOON + timedelta(seconds=30)
    again = outcomes.ended(structs.replace(once, stage=IntentStage.SENT), result(error="disk full"), NOON)
    assert again.next_try_at == NOON + timedelta(seconds=60)
    assert outcomes.ended(SENT, result(), NOON).reason == "the node gave no reason"


def test_what_time_does_not_cure_gets_no_clock() -> None:
    parked = outcomes.ended(SENT, result(error="no such backend", permanent=True), NOON)
    assert (parked.stage, parked.next_try_at, parked.failures) == ("parked", None, 1)


@pytest.mark.parametrize(
    ("phase", "switched"),
    [("resolving", False), ("downloading", False), ("verifying", False), ("extracting", False), ("starting", True)],
)
def test_only_a_failed_switch_counts_as_one(phase: str, switched: bool) -> None:
    assert outcomes.ended(SENT, result(phase=phase), NOON).switch_failed is switched
    assert outcomes.ended(SENT, result(), NOON).switch_failed, "a worker that does not say: better safe"


def test_a_failed_switch_is_remembered_until_an_attempt_succeeds() -> None:
    """The rest of a rollout waits for that: the retry itself, and a retry that ends before its switch, lift nothing."""
    failed = outcomes.ended(SENT, result(phase="starting"), NOON)
    retried = outcomes.claim("n1", failed, replace(SEND, attempt=3), NOON, epoch=3, answer_by=None)
    assert retried.switch_failed
    assert outcomes.ended(retried, result(phase="downloading"), NOON).switch_failed
    assert outcomes.failed(retried, "no worker listens on the node", NOON).switch_failed
    later_rule = outcomes.claim("n1", failed, replace(SEND, generation=8), NOON, epoch=3, answer_by=None)
    assert not later_rule.switch_failed
    done = Done("vllm", "op7", generation=7, kind=OrderKind.UPGRADE)
    assert not outcomes.done("n1", retried, done, NOON).switch_failed


def test_what_was_cancelled_is_free_to_be_sent_anew() -> None:
    ended = outcomes.ended(structs.replace(SENT, accepted_at=NOON), result(cancelled=True), NOON)
    assert (ended.stage, ended.failures, ended.next_try_at) == ("waiting", 0, None)


def test_done_keeps_the_number_and_what_was_found() -> None:
    settled = outcomes.done("n1", SENT, Done("vllm", "op7", 7, OrderKind.INSTALL, "sha256:found"), NOON)
    assert (settled.stage, settled.attempt, settled.digest, settled.failures) == ("done", 2, "sha256:found", 0)
    assert outcomes.done("n1", None, Done("vllm", "op7", 7), NOON).attempt == 0
    assert outcomes.dropped(SENT, NOON) == BackendIntent(
        node_id="n1",
        backend="vllm",
        kind=OrderKind.INSTALL,
        stage=IntentStage.IDLE,
        generation=7,
        operation_id="op7",
        attempt=2,
        updated_at=NOON,
    )


def test_an_outcome_whose_event_was_lost_stands_in_the_heartbeat() -> None:
    node = NodeWorld(
        "n1", "barn", "healthy", intents={"vllm": SENT, "other": structs.replace(SENT, operation_id="op9")}
    )
    results = {("op7", 2): reported_result(success=True), ("op9", 1): reported_result(op_id="op9", attempt=1)}
    assert outcomes.catch_up(node, results, NOON) == {"vllm": outcomes.answered(SENT, NOON)}
    assert outcomes.catch_up(replace(node, intents={"x": SENT}), results, NOON) == {}, "it was about another backend"
    heard = replace(node, intents={"vllm": outcomes.answered(SENT, NOON)})
    assert outcomes.catch_up(heard, results, NOON) == {}
