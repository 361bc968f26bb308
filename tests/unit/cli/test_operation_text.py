"""Operations in words: rows, lines, what remains, exit codes."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from corral.cli.operations import text
from corral.contract.admin import OperationNodeView, PlanNode, PlanView
from tests.support.operation_views import on, operation

NOON = datetime(2026, 11, 15, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("states", "code"),
    [
        (["done"], 0),
        (["done", "done"], 0),
        (["failing"], 1),
        (["waiting"], 3),
        (["under_way"], 3),
        (["done", "waiting"], 3),
        (["waiting", "failing", "done"], 1),
    ],
)
def test_the_worst_of_several_decides_the_exit_code(states: list[str], code: int) -> None:
    assert text.exit_code([operation(on("attic", "success"), state=each) for each in states]) == code


def test_what_was_cancelled_is_no_success_though_it_has_ended() -> None:
    cancelled = operation(on("attic", "cancelled"), state="done", outcome="cancelled")
    assert text.exit_code([cancelled]) == 1
    assert text.state(cancelled) == "cancelled"


def test_an_upgrade_that_was_taken_back_names_the_figure_and_the_next_commands() -> None:
    row = on("attic", "withdrawn", error="the rollout was reverted: too slow")
    reverted = operation(row, state="done", outcome="reverted", error="too slow", kind="upgrade")
    assert text.exit_code([reverted]) == 1
    assert text.state(reverted) == "reverted"
    assert text.result_lines(reverted)[0].endswith(": reverted: too slow")
    assert "corral rollouts show" in text.next_steps([reverted])[0]


def test_a_canary_says_how_far_its_soak_is() -> None:
    row = on("attic", phase="soaking", percentage=99.0, error="soaks: 1m of 5m, 34 requests")
    assert text.line(row) == "attic: soaking 99% (soaks: 1m of 5m, 34 requests)"


@pytest.mark.parametrize(
    ("node", "line"),
    [
        (
            on(
                "attic",
                phase="downloading",
                percentage=41.2,
                file_name="https://x.example/a/layer.tgz",
                current_bytes=432013312,
                total_bytes=1073741824,
                rate=32715571.2,
            ),
            "attic: downloading 41% 412.0 MiB / 1.0 GiB 31.2 MiB/s (layer.tgz)",
        ),
        (on("attic"), "attic: started 0%"),
        (
            on("attic", phase="building", percentage=30.0, current_bytes=4300000, total_bytes=4300000),
            "attic: building 30% 4.1 MiB",
        ),
        (
            on("attic", "queued", error="node offline, will retry when healthy", waits=True),
            "attic: queued (node offline, will retry when healthy)",
        ),
        (on("attic", "success", version="1.1", percentage=100.0), "attic: success 1.1"),
        (on("attic", "skipped", error="no linux/arm64 build"), "attic: skipped (no linux/arm64 build)"),
        (on("attic", "cancelled", error="cancelled", percentage=26.0), "attic: cancelled"),
        (
            on("attic", "running_on_worker", error="no answer yet", percentage=10.0),
            "attic: running 10% (no answer yet)",
        ),
        (
            on("attic", "error", error="disk full", failures=3, next_retry_at="2026-11-15T12:00:30Z"),
            "attic: error (disk full; failed 3 times; next attempt in 30s)",
        ),
        (
            on("attic", "error", error="wrong digest", failures=1),
            "attic: error (wrong digest; no automatic retry)",
        ),
        (
            on("attic", "error", error="it lacks libgomp.so.1 → apt-get install libgomp1", failures=1),
            "attic: error (it lacks libgomp.so.1 → apt-get install libgomp1; retried once that is done)",
        ),
        (on("at\x1b[2Jtic", "success"), "at�[2Jtic: success"),
    ],
)
def test_one_node_in_one_line(node: OperationNodeView, line: str) -> None:
    assert text.line(node, NOON) == line


def test_a_row_of_the_table() -> None:
    view = operation(on("attic", "success"), on("shed", percentage=40.0), progress=70, message="1 of 2 nodes done")
    assert text.row(view, NOON) == (
        *("3f2a91c0", "install", "vllm", "every node", "running", "70%", "1 of 2 done", "1m ago"),
        "1 of 2 nodes done",
    )
    done = operation(on("attic", "success"), state="done", scope="node", scope_value="attic", message="completed")
    assert text.row(done, NOON)[3:] == ("attic", "done", "", "1 of 1 done", "1m ago", "")


def test_a_row_of_the_table_whose_nodes_were_only_counted() -> None:
    ended = operation(state="done", created_at="2026-11-15T11:59:00Z", counts={"success": 997, "skipped": 3})
    assert text.row(ended, NOON)[6] == "997 of 1000 done, 3 skipped"
    failing = operation(state="failing", counts={"success": 1, "error": 1, "queued": 2}, error="attic: disk full")
    assert text.row(failing, NOON)[6] == "1 of 4 done, 1 failing, 2 queued"
    assert text.row(failing, NOON)[8] == "attic: disk full"
    assert text.row(operation(state="done"), NOON)[6] == "none"


def test_the_table_of_nodes_shows_bytes_of_what_ended_as_a_whole() -> None:
    # The last progress that was written down may be older than the end.
    ended = on("attic", "success", percentage=100.0, current_bytes=5, total_bytes=2048, variant="cpu-vllm", version="2")
    assert text.node_row(ended, NOON) == ("attic", "success", "100%", "cpu-vllm", "2", "2.0 KiB", "")
    waiting = on("shed", "queued", error="node offline", waits=True)
    assert text.node_row(waiting, NOON) == ("shed", "queued", "", "", "", "", "node offline")


def test_the_report_says_what_was_done_and_what_remains_grouped_by_reason() -> None:
    away = [on(f"n{number}", "queued", error="node offline", waits=True) for number in range(7)]
    view = operation(
        on("attic", "success"),
        on("shed", "skipped", error="no linux/arm64 build"),
        on("barn", "error", error="disk full", failures=1, next_retry_at="2026-11-15T12:02:00Z"),
        on("cellar", "error", error="disk full", failures=2, next_retry_at="2026-11-15T12:01:00Z"),
        *away,
        state="failing",
    )
    assert text.result_lines(view, NOON) == [
        "vllm: installed on attic",
        "vllm: skipped on shed: no linux/arm64 build",
        "vllm: failing on barn, cellar: disk full; failed 2 times; next attempt in 1m",
        "vllm: waiting on n0, n1, n2, n3, n4 and 2 more: node offline",
    ]


def test_a_fleet_without_nodes_is_told_so() -> None:
    assert text.result_lines(operation(state="done")) == [
        "vllm: no node matches yet; the first node that joins gets it"
    ]
    chosen = operation(state="done", scope="selector", scope_value="tier=fast")
    assert text.result_lines(chosen) == ["vllm: no node matches yet; the first node that joins with tier=fast gets it"]
    assert text.result_lines(operation(state="done", kind="delete")) == ["vllm: no node matches"]


def test_an_install_that_found_no_node_is_waiting_and_not_done() -> None:
    assert text.exit_code([operation(state="done")]) == 3
    assert text.exit_code([operation(state="done", scope="selector", scope_value="tier=fast")]) == 3
    assert text.exit_code([operation(state="done", kind="delete")]) == 0
    assert text.exit_code([operation(on("attic", "success"), state="done")]) == 0


def test_how_to_go_on_is_said_only_where_something_goes_on() -> None:
    assert text.next_steps([operation(on("attic", "success"), state="done")]) == []
    waiting = operation(on("attic", "queued", waits=True), state="waiting")
    assert ["corral ops watch 3f2a91c0" in line for line in text.next_steps([waiting])] == [True]
    parked = operation(on("attic", "error", error="wrong digest"), state="failing")
    lines = text.next_steps([parked])
    assert len(lines) == 1
    assert "corral ops retry 3f2a91c0" in lines[0]
    retried = operation(on("attic", "error", next_retry_at="2026-11-15T12:01:00Z"), state="failing")
    assert len(text.next_steps([retried])) == 2


@pytest.mark.parametrize(("state", "lines"), [("under_way", 1), ("waiting", 0), ("failing", 0)])
def test_only_its_sender_can_continue_an_upload_that_stopped(state: str, lines: int) -> None:
    row = on("controller", "error" if state == "failing" else "queued", waits=state == "waiting")
    assert len(text.next_steps([operation(row, state=state, kind="upload")])) == lines


def test_details_leave_out_what_is_not_known() -> None:
    lines = list(text.details(operation(created_by="admin", message="0 of 0 nodes done"), NOON))
    assert lines[0] == "id         3f2a91c0-0000-4000-8000-000000000000"
    assert "started    1m ago by admin" in lines
    assert not [line for line in lines if line.startswith(("finished", "bytes", "error", "hidden"))]


@pytest.mark.parametrize(
    ("kind", "node", "row"),
    [
        (
            "install",
            {"action": "install", "variant": "cpu", "version": "1", "fetch_bytes": 1024, "disk_after_bytes": 2048},
            ("install", "cpu", "1", "1.0 KiB", "2.0 KiB free", "", ""),
        ),
        ("install", {"action": "install", "version": "1"}, ("install", "", "1", "?", "", "", "")),
        (
            "upgrade",
            {"action": "upgrade", "installed_version": "1.0", "version": "1.1", "fetch_bytes": 0, "processes": "kept"},
            ("upgrade", "", "1.0 → 1.1", "0 B", "", "kept", ""),
        ),
        (
            "rollback",
            {"action": "upgrade", "installed_digest": "sha256:" + "ab" * 32, "digest": "sha256:" + "cd" * 32},
            ("roll back", "", "sha256:abababababab → sha256:cdcdcdcdcdcd", "?", "", "", ""),
        ),
        (
            "install",
            {"action": "skip", "reason": "no linux/arm64 build"},
            ("skip", "", "", "", "", "", "no linux/arm64 build"),
        ),
        (
            "install",
            {"action": "nothing", "version": "1.1", "installed_version": "1.1", "reason": "it has this build already"},
            ("nothing", "", "1.1", "", "", "", "it has this build already"),
        ),
        (
            "delete",
            {"action": "delete", "installed_version": "1.1", "processes": "those that run are stopped first"},
            ("delete", "", "1.1", "", "", "those that run are stopped first", ""),
        ),
    ],
)
def test_a_plan_in_rows(kind: str, node: dict[str, Any], row: tuple[str, ...]) -> None:
    assert text.plan_row(PlanNode("a", "attic", **node), kind) == ("attic", *row)


def test_a_plan_in_one_sentence() -> None:
    nodes = (PlanNode("a", "attic", "install"), PlanNode("s", "shed", "install"), PlanNode("b", "barn", "skip"))
    assert text.plan_title(PlanView("install", "vllm", nodes)) == "Plan for install vllm: install on 2, skip on 1"
    assert text.plan_title(PlanView("install", "vllm")) == "Plan for install vllm: nothing, no node matches"
