"""Backends × nodes, and pages of what can be installed: pure, from rows as the store has them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from msgspec.structs import replace

from corral.contract.messages.backends import NodeBackend, NodeDrift, UpgradeInfo
from corral.controller.operations.available import Busy, Query, available_entries, known_entries, page_of
from corral.controller.operations.backend_matrix import matrix_of, pending_of
from corral.kit.errors import Invalid
from corral.store.records import (
    BackendIntent,
    BackendRequest,
    IntentStage,
    OperationNode,
    OperationNodeStatus,
    OrderKind,
)
from corral.store.tables.node_backends import Inventory
from corral.store.tables.nodes import NodeOutline
from corral.store.tables.operations import Operation, StoredRequest

NOON = datetime(2026, 11, 15, 12, tzinfo=UTC)


def outline(name: str, status: str = "healthy") -> NodeOutline:
    known: dict[str, Any] = {
        "id": f"id-{name}",
        "name": name,
        "node_type": "backend",
        "status": status,
        "approved": True,
        "bus_down": False,
        "protocol": 1,
        "boot_id": "b",
        "capability": "default",
        "os": "linux",
        "arch": "amd64",
        "total_disk": 0,
        "available_disk": 0,
        "last_heartbeat": NOON,
    }
    names = NodeOutline.__struct_fields__
    return NodeOutline(**{name: known.get(name, "") for name in names})


def having(name: str, *rows: NodeBackend) -> dict[str, Inventory]:
    return {f"id-{name}": Inventory(node_id=f"id-{name}", boot_id="b", seq=1, seen_at=NOON, backends=rows)}


def operation(id: str, backend: str = "vllm", kind: str = "install", generation: int = 1) -> Operation:
    return Operation(
        id=id,
        kind=kind,
        backend=backend,
        scope_kind="all",
        scope_value="",
        generation=generation,
        created_at=NOON,
        request=StoredRequest(BackendRequest(backend)),
    )


def test_a_build_behind_another_name_is_told_there() -> None:
    meta = NodeBackend("vllm", is_meta=True, meta_backend_for="cpu-vllm")
    build = NodeBackend("cpu-vllm", version="2", digest="sha256:b", alias="vllm", previous=("sha256:a",))
    own = NodeBackend("espeak", is_system=True)
    matrix = matrix_of([outline("barn")], having("barn", meta, build, own), {}, {})
    assert [row.backend for row in matrix.backends] == ["espeak", "vllm"]
    cell = matrix.backends[1].nodes["id-barn"]
    assert (cell.version, cell.digest, cell.variant, cell.can_roll_back) == ("2", "sha256:b", "cpu-vllm", True)
    assert matrix.backends[0].nodes["id-barn"].is_system


def test_what_is_newer_and_who_differs() -> None:
    found = UpgradeInfo("vllm", "1", "2", "sha256:a", "sha256:b", (NodeDrift("id-odd", "odd", "0.9", "sha256:z"),))
    inventories = (
        having("old", NodeBackend("vllm", version="1", digest="sha256:a"))
        | having("odd", NodeBackend("vllm", version="0.9", digest="sha256:z"))
        | having("new", NodeBackend("vllm", version="2", digest="sha256:b"))
    )
    names = [outline(name) for name in ("new", "odd", "old", "silent")]
    matrix = matrix_of(names, inventories, {}, {"vllm": found}, "2026-11-15T12:00:00Z")
    (row,) = matrix.backends
    cells = {name.removeprefix("id-"): (cell.outdated, cell.drift) for name, cell in row.nodes.items()}
    assert cells == {"new": (False, False), "odd": (True, True), "old": (True, False)}
    assert (row.upgrade_available, row.available_version, row.drift) == (True, "2", True)
    assert [(node.name, node.told) for node in matrix.nodes][-1] == ("silent", False)
    assert matrix.checked_at == "2026-11-15T12:00:00Z"


def test_what_is_still_to_be_done_comes_from_the_newest_open_row() -> None:
    row = OperationNode(
        operation_id="o1",
        node_id="id-barn",
        node_name="barn",
        status=OperationNodeStatus("queued"),
        updated_at=NOON,
    )
    failing = replace(row, status=OperationNodeStatus.ERROR, reason="disk full", failures=2, next_try_at=NOON)
    parked = replace(row, status=OperationNodeStatus.ERROR, reason="no build", failures=1)
    moving = replace(row, status=OperationNodeStatus.DOWNLOADING, phase="extracting", percentage=41.26)
    ended = replace(row, status=OperationNodeStatus.SUCCESS)
    for given, stage in ((row, "waiting"), (failing, "waiting"), (parked, "parked"), (moving, "sent")):
        (told,) = pending_of([operation("o1")], {"o1": [given]}, [])["id-barn"].values()
        assert told.stage == stage
        assert (told.kind, told.operation, told.reason) == ("install", "o1", given.reason)
    assert pending_of([operation("o1")], {"o1": [ended]}, []) == {}
    both = pending_of(
        [operation("o2", kind="delete", generation=2), operation("o1")], {"o1": [failing], "o2": [row]}, []
    )
    assert both["id-barn"]["vllm"].operation == "o2"


def test_an_intent_without_an_operation_is_shown_too() -> None:
    intent = BackendIntent(
        node_id="id-barn",
        backend="vllm",
        kind=OrderKind("install"),
        stage=IntentStage("waiting"),
        generation=1,
        operation_id="pruned",
        attempt=1,
        updated_at=NOON,
        reason="disk full",
    )
    done = BackendIntent(
        node_id="id-barn",
        backend="old",
        kind=OrderKind("install"),
        stage=IntentStage("done"),
        generation=1,
        operation_id="pruned",
        attempt=1,
        updated_at=NOON,
    )
    pending = pending_of([], {}, [intent, done])
    assert list(pending["id-barn"]) == ["vllm"]
    (row,) = matrix_of([outline("barn")], {}, pending, {}).backends
    cell = row.nodes["id-barn"]
    assert cell.intent is not None
    assert (cell.installed, cell.intent.reason) == (False, "disk full")


ENTRIES: list[dict[str, Any]] = [
    {"name": "vllm", "description": "Fast serving", "tags": ["LLM", "gpu"], "gallery": {"name": "b"}, "license": "mit"},
    {"name": "piper", "description": "Speech", "tags": ["tts"], "gallery": {"name": "a"}, "license": "gpl"},
    {"name": "Bark", "description": "More speech", "tags": ["tts"], "gallery": {"name": "b"}, "license": "bsd"},
]
INSTALLED: list[dict[str, Any]] = [
    {"Name": "piper", "nodes": [{"node_name": "barn"}], "upgrade_available": True},
    {"Name": "own", "nodes": []},
]


def names(**query: Any) -> list[str]:
    return [row["name"] for row in page_of(ENTRIES, INSTALLED, {}, [], Query(**query))["backends"]]


def test_pages_are_sorted_searched_and_cut() -> None:
    assert names() == ["Bark", "piper", "vllm"]
    assert names(order="desc") == ["vllm", "piper", "Bark"]
    assert names(sort="repository") == ["piper", "Bark", "vllm"]
    assert names(sort="license") == ["Bark", "piper", "vllm"]
    assert names(sort="status") == ["piper", "Bark", "vllm"]
    assert names(term="SPEECH") == ["Bark", "piper"]
    assert names(tag="llm") == ["vllm"]
    assert names(items=2, page=2) == ["vllm"]
    assert names(items=2, page=7) == ["vllm"], "beyond the last page is the last page"
    assert names(term="nothing like it") == []
    for wrong in ({"sort": "colour"}, {"order": "up"}):
        with pytest.raises(Invalid):
            names(**wrong)


def test_a_row_says_where_it_is_and_what_is_being_done() -> None:
    page = page_of(ENTRIES, INSTALLED, {"piper": Busy("o1", "delete")}, [{"name": "a"}], Query(term="piper"))
    (row,) = page["backends"]
    assert (row["installed"], row["nodes"], row["upgrade_available"]) == (True, [{"node_name": "barn"}], True)
    assert (row["processing"], row["jobID"], row["isDeletion"], row["gallery"]) == (True, "o1", True, "a")
    assert page["taskTypes"] == {"piper": "Deletion"}
    assert page["repositories"] == [{"name": "a"}]


def test_lists_of_what_is_available_and_known() -> None:
    assert [row["installed"] for row in available_entries(ENTRIES, INSTALLED)] == [False, True, False]
    known = {row["name"]: row["installed"] for row in known_entries([*ENTRIES, ENTRIES[0]], INSTALLED)}
    assert known == {"Bark": False, "own": True, "piper": True, "vllm": False}
