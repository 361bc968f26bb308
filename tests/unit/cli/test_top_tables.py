"""Rows, filters and columns of `corral top`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from rich.cells import cell_len

from corral.cli.top.state import FleetState
from corral.cli.top.tables import TABLES, LogSource, Row, fit, log_rows, matching, model_rows, node_rows, operation_rows
from corral.contract.admin import NodeView, OperationView
from corral.contract.catalogue import ModelView

NOW = datetime(2026, 11, 19, 12, 0, tzinfo=UTC)
LOADED = {"state": "loaded", "process_state": "ready"}


def node(name: str, status: str = "healthy", **more: Any) -> NodeView:
    return msgspec.convert({"id": f"id-{name}", "name": name, "status": status, **more}, NodeView)


def fleet_of(*nodes: NodeView, **more: Any) -> FleetState:
    fleet = FleetState(role="admin", **more)
    fleet.nodes.replace({each.id: each for each in nodes})
    return fleet


def test_nodes_that_need_a_person_are_first() -> None:
    fleet = fleet_of(
        node("a"), node("b", "draining"), node("c", "offline"), node("d", "pending"), node("e", "unhealthy")
    )
    assert [row.item.name for row in node_rows(fleet)] == ["d", "e", "c", "b", "a"]


def test_replicas_stand_below_their_model_and_strangers_at_the_end() -> None:
    models = tuple(
        msgspec.convert({"id": name, "ready": ready}, ModelView) for name, ready in (("b", 0), ("a", 0), ("z", 2))
    )
    replicas = tuple(
        {"model_name": model, "node_name": place, "node_id": place, "replica_index": 0, **LOADED}
        for model, place in (("z", "north"), ("gone", "north"), ("z", "attic"))
    )
    fleet = fleet_of(models=models, replicas=replicas)
    cells = [TABLES["models"].cells(row.item, NOW)[:3] for row in model_rows(fleet)]
    assert cells == [
        ("z", "", "2 ready"),
        ("  #0", "attic", "loaded"),
        ("  #0", "north", "loaded"),
        ("a", "", "not loaded"),
        ("b", "", "not loaded"),
        ("gone#0", "north", "loaded"),
    ]
    assert [row.key for row in matching(model_rows(fleet), "NORTH")] == ["z", "z#0@north", "gone#0@north"]


def test_operations_that_fail_are_first_and_those_that_ended_last() -> None:
    fleet = FleetState()
    for id, state, created, finished in (
        ("1", "under_way", "2026-11-19T11:00:00Z", ""),
        ("2", "done", "2026-11-19T11:50:00Z", "2026-11-19T11:51:00Z"),
        ("3", "failing", "2026-11-19T10:00:00Z", ""),
        ("4", "under_way", "2026-11-19T11:30:00Z", ""),
    ):
        view = {"jobID": id, "state": state, "created_at": created, "finished_at": finished}
        fleet.operations.put(id, msgspec.convert(view, OperationView))
    assert [row.key for row in operation_rows(fleet)] == ["3", "4", "1", "2"]


def test_logs_of_replicas_and_of_nodes_that_were_asked_are_listed_once() -> None:
    replica = {"model_name": "tiny", "node_name": "attic", "replica_index": 0, "state": "loaded"}
    fleet = FleetState(replicas=(replica,), node_logs={"attic": ("tiny", "llama-cpp"), "barn": ("tiny",)})
    assert [row.item for row in log_rows(fleet)] == [
        LogSource("llama-cpp", "attic"),
        LogSource("tiny", "barn"),
        LogSource("tiny#0", "attic", "loaded"),
    ]


@pytest.mark.parametrize(
    ("words", "found"), [("", "abc"), ("red", "ab"), ("RED big", "b"), ("green", "c"), ("none", "")]
)
def test_a_filter_wants_every_word_in_any_case(words: str, found: str) -> None:
    rows = [Row("a", "red", None), Row("b", "Red Big", None), Row("c", "green", None)]
    assert "".join(row.key for row in matching(rows, words)) == found


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_lines_are_exactly_as_wide_as_the_screen(width: int) -> None:
    table = TABLES["nodes"]
    nodes = [
        node(
            "attic", total_ram=2**34, available_ram=2**33, capability="default", last_heartbeat="2026-11-19T11:59:00Z"
        ),
        node("wide-日本語", "pending", total_vram=2**36, available_vram=2**35, total_disk=2**40, available_disk=2**39),
    ]
    fitted = fit(table, [table.cells(each, NOW) for each in nodes], width)
    assert {cell_len(line) for line in (fitted.header, *fitted.lines)} == {width}


def test_a_narrow_screen_drops_the_less_important_columns() -> None:
    table = TABLES["nodes"]
    one = node("attic", "pending", total_disk=2**40, available_disk=2**39, total_ram=2**34, available_ram=2**33)
    cells = [table.cells(one, NOW)]
    wide, narrow = fit(table, cells, 200), fit(table, cells, 60)
    assert wide.header.split("  ")[0] == narrow.header.split("  ")[0] == "NAME"
    assert "DISK FREE" in wide.header
    assert "DISK FREE" not in narrow.header
    assert "VRAM" not in wide.header, "nobody has any"
    assert "needs approval" in narrow.lines[0]


def test_what_other_machines_say_stays_on_its_line() -> None:
    fitted = fit(TABLES["nodes"], [("a\x1b[2J\nb", *[""] * 8, "note\r\nmore")], 80)
    assert fitted.lines[0].startswith("a\ufffd[2J b")
    assert fitted.lines[0].rstrip().endswith("note more")
