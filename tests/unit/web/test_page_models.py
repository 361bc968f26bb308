"""Models as the page shows them: their state in one word, what there is of each, what may be done."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from corral.contract.catalogue import ModelView, ScheduleView
from corral.contract.loads import LoadStatus
from corral.contract.receipts import RequestView
from corral.controller.web.list_filter import ListFilter
from corral.controller.web.models import catalogue_of, line_of, wanted
from corral.controller.web.requests import RequestFilter, facts_of, request_lines

NOW = datetime(2026, 1, 31, 12, 0, tzinfo=UTC)
REVISION = "0123456789abcdef"


def model(name: str = "m", **known: Any) -> ModelView:
    return ModelView(id=name, backend="llama-cpp", config_revision=REVISION, origin="person", **known)


def replica(node: str = "barn", state: str = "loaded", **known: Any) -> dict[str, Any]:
    row = {
        "id": "op-1",
        "node_id": f"id-of-{node}",
        "node_name": node,
        "model_name": "m",
        "replica_index": 0,
        "state": state,
        "in_flight": 0,
        "last_used": "2026-01-31T11:59:00Z",
        "config_revision": REVISION,
        "process_state": "ready" if state == "loaded" else "",
        "memory_bytes": 2 * 1024**3,
        "devices": [],
        "reason": "barn: 60 GiB of RAM free",
        "restarts": 0,
    }
    return row | known


def schedule(**known: Any) -> ScheduleView:
    return ScheduleView(model_name="m", **known)


@pytest.mark.parametrize(
    ("known", "load", "replicas", "state", "words"),
    [
        ({}, None, [], "cold", "not loaded"),
        ({"alias": "other"}, None, [], "alias", "other name"),
        ({"disabled": True}, None, [replica()], "disabled", "disabled"),
        ({}, LoadStatus("m", "staging", "barn"), [replica(state="staging")], "loading", "loading"),
        ({}, LoadStatus("m", "pending", message="no node can run m"), [], "waiting", "waiting"),
        ({}, LoadStatus("m", "failed", "barn", error="out of memory"), [], "failed", "failed"),
        ({}, LoadStatus("m", "loaded"), [replica()], "ready", "ready × 1"),
        ({"schedule": schedule(min_replicas=3)}, None, [replica()], "ready", "ready × 1 of 3"),
        ({"schedule": schedule(min_replicas=3)}, None, [], "waiting", "waiting"),
        ({"schedule": schedule(max_replicas=3)}, None, [], "cold", "not loaded"),
        ({}, None, [replica(config_revision="older")], "cold", "not loaded"),
        ({}, None, [replica(state="loading")], "loading", "loading"),
        ({}, LoadStatus("m", "pending"), [replica(), replica("attic", "loading")], "ready", "ready × 1"),
    ],
)
def test_the_state_of_a_model(
    known: dict[str, Any], load: LoadStatus | None, replicas: list[dict[str, Any]], state: str, words: str
) -> None:
    line = line_of(model(**known), load, replicas, NOW)
    assert (line.state, line.words) == (state, words)


def test_a_load_is_shown_where_it_goes_on() -> None:
    load = LoadStatus(
        "m", "staging", "barn", progress=62.5, bytes_sent=625, total_bytes=1000, eta_seconds=3, message="its files come"
    )
    line = line_of(model(), load, [replica("barn", "staging"), replica("attic", "loading")], NOW)
    assert (line.phase, line.percent, line.amount) == ("its files come", 62, "625 / 1000 B, about 3 s left")
    assert [(each.node, each.words, each.phase, each.percent) for each in line.replicas] == [
        ("attic", "starting", "", None),
        ("barn", "on its way", "fetching its files", 62),
    ]
    assert (line.may_load, line.may_unload) == (False, True)


def test_a_failure_says_why_and_when_it_may_be_tried_again() -> None:
    line = line_of(model(), LoadStatus("m", "failed", error="exit 1\nno such file", retry_after_s=10), [], NOW)
    assert (line.cause, line.retry, line.retry_at) == (
        "exit 1\nno such file",
        "in 10 s",
        "2026-01-31T12:00:10+00:00",
    )
    assert line.may_load


def test_replicas_tell_what_they_do_and_hold() -> None:
    rows = [
        replica("barn", in_flight=2, devices=[0, 1]),
        replica("barn", replica_index=1, config_revision="older"),
        replica("shed", process_state="restarting", restarts=2, error="exit 137"),
        replica("tower", "unloading", reason="a user unloaded it"),
    ]
    first, second, third, fourth = line_of(model(), None, rows, NOW).replicas
    assert (first.node, first.requests, first.memory, first.used) == (
        "barn",
        "2 requests",
        "2 GiB · GPU 0, 1",
        "1 min ago",
    )
    assert (second.node, second.requests, second.older) == ("barn #1", "idle", True)
    assert (third.state, third.words, third.note) == ("loading", "restarting", "restarted 2 times: exit 137")
    assert (fourth.words, fourth.note, fourth.used) == ("ending", "a user unloaded it", "")


def test_of_many_replicas_those_that_are_not_ready_are_shown_first() -> None:
    rows = [replica(f"node-{number:03}") for number in range(100)] + [replica("zz", "loading")]
    line = line_of(model(), None, rows, NOW)
    assert [each.node for each in line.replicas[:2]] == ["zz", "node-000"]
    assert (len(line.replicas), line.replicas_more, line.words) == (30, "and 71 ready", "ready × 100")
    assert line_of(model(), None, rows[:30], NOW).replicas_more == ""


def test_what_the_dialog_about_replicas_starts_with() -> None:
    line = line_of(
        model(schedule=schedule(min_replicas=1, max_replicas=4, node_selector='{"tier":"fast"}')), None, [], NOW
    )
    assert json.loads(line.schedule) == {"min": 1, "max": 4, "all": False, "selector": "tier=fast"}
    assert "1 to 4 replicas" in line.facts
    assert "on nodes with tier=fast" in line.facts
    assert line_of(model(), None, [], NOW).schedule == ""


@pytest.mark.parametrize(
    ("known", "words"),
    [
        ({"spread_all": True}, "one on every node"),
        ({"min_replicas": 1, "max_replicas": 1}, "1 replica"),
        ({"min_replicas": 2}, "at least 2 replicas"),
        ({"max_replicas": 2}, "0 to 2 replicas"),
        ({}, ""),
    ],
)
def test_how_many_are_wanted(known: dict[str, Any], words: str) -> None:
    assert wanted(schedule(**known)) == words


def test_of_many_models_some_are_shown_and_found() -> None:
    many = [model(f"m-{number:03}", tags=("even",) if number % 2 == 0 else ()) for number in range(120)]
    shown = catalogue_of(many, [LoadStatus("m-007", "failed", error="x")], [], ListFilter(at=50), NOW)
    assert (len(shown.lines), shown.lines[0].id, shown.range) == (50, "m-050", "Models 51–100 of 120")
    assert (shown.previous, shown.next) == ("", "?at=100")
    assert [(chip.only, chip.count) for chip in shown.chips if chip.count] == [("", 120), ("failed", 1), ("cold", 119)]
    assert [line.id for line in catalogue_of(many, [], [], ListFilter(find="EVEN 004"), NOW).lines] == ["m-004"]
    failed = catalogue_of(many, [LoadStatus("m-007", "failed", error="x")], [], ListFilter(only="failed"), NOW)
    assert ([line.id for line in failed.lines], failed.range) == (["m-007"], "1 of 120 models")
    assert catalogue_of([], [], [], ListFilter(only="nonsense"), NOW).lines == ()


def test_a_request_in_one_line() -> None:
    view = RequestView(
        id="r-1",
        at="2026-01-31T11:59:50Z",
        key_id="k-1",
        key="",
        model="m",
        served_by="other",
        path="/v1/chat/completions",
        status=200,
        node_id="n-1",
        node="barn",
        process_id="p-1",
        replica=0,
        revision=REVISION,
        digest="sha256:x",
        queue_ms=0.2,
        load_ms=12_345,
        first_byte_ms=34,
        total_ms=990,
        prompt_tokens=7,
        completion_tokens=20,
        estimated=True,
        streamed=True,
        ending="upstream_broke",
        tries=2,
    )
    [line] = request_lines((view,), NOW)
    assert (line.when, line.who, line.queued, line.loaded, line.first) == ("10 s ago", "k-1", "", "12.3 s", "34 ms")
    assert (line.tokens, line.remark, line.failed) == ("7 → ~20", "the replica closed the connection, 2 tries", True)
    refused = msgspec.structs.replace(view, status=504, ending="", tries=1, error="upstream_failed", error_text="late")
    assert request_lines((refused,), NOW)[0].remark == "late"
    resumed = msgspec.structs.replace(view, ending="", resumed=2)
    assert request_lines((resumed,), NOW)[0].remark == "resumed twice, 2 tries"
    assert ("Resumed", "twice, after a replica broke the stream off", "") in facts_of(resumed)
    assert {("Error", "upstream_failed", ""), ("What failed", "late", "")} <= set(facts_of(refused))
    assert not {"Error", "What failed"} & {what for what, _, _ in facts_of(view)}
    assert (line.speed, line.link) == ("19.9", "/fleet/requests/r-1?at=2026-01-31T11%3A59%3A50Z")
    asked = RequestFilter(model="a b", failed=True, before="x~y")
    assert asked.query() == "?model=a+b&failed=true&before=x~y"
    assert asked.query(failed=False, before="") == "?model=a+b"
    assert RequestFilter().query() == ""
    assert RequestFilter(status="5xx").query() == "?status=5xx"
    statuses = {"5XX": "5xx", "404": "404", "": "", "9xx": "", "40": "", "5xy": "", "\u0665xx": "", "4040": ""}
    assert {text: RequestFilter.read_status(text) for text in statuses} == statuses
