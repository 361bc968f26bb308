"""Operations in words: pills, bars, reasons, what may be done."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from corral.contract.admin import OperationHistory, OperationRecord
from corral.controller.web.operations import (
    Opened,
    counts_of,
    line_of,
    lines_of,
    node_line,
    parse_opened,
    past_of,
    work_of,
)
from tests.support.operation_views import on, operation

NOON = datetime(2026, 11, 15, 12, tzinfo=UTC)
MIB = 2**20


@pytest.mark.parametrize(
    ("more", "where", "state", "words"),
    [
        ({}, "on every node", "under_way", "under way"),
        ({"scope": "controller"}, "to the controller", "under_way", "under way"),
        ({"state": "waiting", "scope": "node", "scope_value": "barn"}, "on barn", "waiting", "waiting"),
        ({"state": "failing", "scope": "selector", "scope_value": "a=b"}, "on nodes with a=b", "failing", "failing"),
        ({"state": "done", "finished_at": "now", "outcome": "completed"}, "on every node", "completed", "done"),
        ({"state": "done", "finished_at": "now", "outcome": "cancelled"}, "on every node", "cancelled", "cancelled"),
    ],
)
def test_where_and_how_it_stands(more: dict[str, Any], where: str, state: str, words: str) -> None:
    line = line_of(operation(on("barn"), **more), NOON)
    assert (line.what, line.where, line.state, line.words) == ("install vllm", where, state, words)
    assert (line.requested, line.moving) == ("1 min ago", state not in ("completed", "cancelled"))


def test_an_upgrade_of_corral_leads_to_the_nodes() -> None:
    line = line_of(operation(on("barn"), kind="corral-upgrade", backend="corral", is_backend=False), NOON)
    assert (line.what, line.href) == ("upgrade corral", "/nodes")


def test_levers_fit_what_it_is_at() -> None:
    moving = line_of(operation(on("barn"), counts={"downloading": 1}), NOON)
    assert (moving.may_retry, moving.may_cancel, moving.may_dismiss) == (False, True, False)
    failing = line_of(operation(on("barn", "error"), state="failing", counts={"error": 1}), NOON)
    assert (failing.may_retry, failing.may_cancel, failing.may_dismiss) == (True, True, True)
    ended = line_of(operation(on("barn", "success"), state="done", finished_at="now", outcome="completed"), NOON)
    assert (ended.may_retry, ended.may_cancel, ended.may_dismiss) == (False, False, True)
    cancelled = line_of(operation(state="done", finished_at="now", outcome="cancelled"), NOON)
    assert cancelled.may_retry, "it is asked for anew"


@pytest.mark.parametrize(
    ("status", "words", "moving"),
    [
        ("queued", "waiting", True),
        ("downloading", "under way", True),
        ("running_on_worker", "worker busy", True),
        ("success", "done", False),
        ("error", "failing", True),
        ("skipped", "skipped", False),
    ],
)
def test_a_pill_for_every_status(status: str, words: str, moving: bool) -> None:
    line = node_line(on("barn", status), "install", NOON)
    assert (line.words, line.moving, line.may_cancel) == (words, moving, moving)
    assert line.may_retry == (status == "error")
    assert bool(line.title) == (status == "running_on_worker"), "the busy one says why it is yellow"


def test_a_node_tells_phase_file_bytes_and_rate() -> None:
    row = on(
        "barn",
        phase="downloading",
        file_name="layer",
        current_bytes=MIB,
        total_bytes=4 * MIB,
        rate=2.5 * MIB,
        percentage=25.9,
    )
    line = node_line(row, "install", NOON)
    assert (line.at, line.amount, line.percent) == ("downloading · layer", "1 / 4 MiB, 2.5 MiB/s", 25)
    assert node_line(on("barn", current_bytes=MIB), "install", NOON).amount == "1 MiB", "the whole is not known"
    done = node_line(on("barn", "success", version="1.1", current_bytes=MIB, phase="starting"), "install", NOON)
    assert (done.at, done.amount) == ("1.1", "")
    assert node_line(on("barn", "success", version="1.1"), "delete", NOON).at == ""


def test_a_node_tells_who_feeds_it_and_who_sent_wrong_data() -> None:
    row = on(
        "barn",
        phase="downloading",
        file_name="w.gguf",
        sources={"controller": 25, "attic": 75, "none": 0},
        bad_sources=("loft",),
    )
    line = node_line(row, "stage", NOON)
    assert line.at == "downloading · w.gguf · from attic 75 %, controller 25 %, none 0 %"
    assert line.note == "wrong data from loft"
    ended = on("barn", "success", note="1 MiB from attic; wrong data from loft", bad_sources=("loft",))
    assert node_line(ended, "stage", NOON).note == "1 MiB from attic; wrong data from loft"


def test_why_it_fails_and_when_it_is_tried_again() -> None:
    line = node_line(on("barn", "error", error="503", next_retry_at="2026-11-15T12:00:30Z"), "install", NOON)
    assert (line.note, line.retry) == ("503", "in 30 s")


def test_one_node_is_shown_at_once_and_many_when_a_person_opens_them() -> None:
    alone = line_of(operation(on("a")), NOON)
    assert alone.single
    assert alone.shown is not None
    assert [line.name for line in alone.shown.lines] == ["a"]
    view = operation(*(on(f"n{number:03}") for number in range(250)), counts={"downloading": 250})
    closed = line_of(view, NOON)
    assert (closed.handle, closed.single, closed.shown) == ("250 nodes", False, None)
    shown = line_of(view, NOON, Opened(view.job_id, at=100)).shown
    assert shown is not None
    assert (shown.lines[0].name, len(shown.lines), shown.range) == ("n100", 100, "Nodes 101–200 of 250")
    assert (shown.previous, shown.next) == (Opened(view.job_id), Opened(view.job_id, at=200))


def test_many_nodes_are_filtered_by_status() -> None:
    rows = [on(f"n{number}", "error" if number % 10 == 0 else "success") for number in range(30)]
    view = operation(*rows, counts={"success": 27, "error": 3})
    shown = line_of(view, NOON, Opened(view.job_id, "error")).shown
    assert shown is not None
    assert [line.name for line in shown.lines] == ["n0", "n10", "n20"]
    assert [(chip.words, chip.count, chip.chosen) for chip in shown.chips] == [
        ("all", 30, False),
        ("done", 27, False),
        ("failing", 3, True),
    ]
    (failing,) = [chip for chip in shown.chips if chip.chosen]
    assert parse_opened([failing.query]) == {view.job_id: Opened(view.job_id, "error")}
    few = line_of(operation(on("a"), on("b")), NOON, Opened(view.job_id)).shown
    assert few is not None
    assert not few.chips, "seen at a glance"


@pytest.mark.parametrize(
    ("token", "opened"),
    [
        ("op-1", Opened("op-1")),
        ("op-1~error", Opened("op-1", "error")),
        ("op-1~~200", Opened("op-1", "", 200)),
        ("op-1~nonsense~-3", Opened("op-1")),
        ("~~~~", Opened("")),
    ],
)
def test_what_is_open_stands_in_the_address(token: str, opened: Opened) -> None:
    assert parse_opened([token]) == {opened.id: opened}
    assert parse_opened([str(opened)]) == {opened.id: opened}


def test_counts_come_in_one_order() -> None:
    assert counts_of({"queued": 1, "success": 2, "error": 3, "skipped": 0}) == "2 done · 3 failing · 1 waiting"


def test_the_newest_is_first_and_the_strip_shows_three() -> None:
    views = [operation(job_id=f"op-{number}", created_at=f"2026-11-15T11:0{number}:00Z") for number in range(5)]
    assert [line.id for line in lines_of(views, NOON, {})] == ["op-4", "op-3", "op-2", "op-1", "op-0"]
    work, more = work_of(views[::-1], 7)
    assert ([one.id for one in work], more) == (["op-4", "op-3", "op-2"], 4)
    assert [one.words for one in work_of([operation(progress=41), operation(state="failing")], 2)[0]] == [
        "41 %",
        "failing",
    ]


def test_what_has_ended_tells_how_and_how_long() -> None:
    record = OperationRecord(
        "demo", "demo", "op-1", True, "installation", "cancelled", "2026-11-15T11:50:00Z", "2026-11-15T11:53:20Z",
        kind="rollback", created_by="ann",
    )  # fmt: skip
    (past,) = past_of(OperationHistory((record,)), NOON)
    assert (past.what, past.words, past.ended, past.took) == ("roll back demo", "cancelled", "6 min ago", "3 min")
    assert past.may_repeat
    assert not past_of(OperationHistory((record,)), NOON, {"op-1"}), "it still has a line of its own"
