"""Tables, records and migrations agree with each other by their names alone; no database is needed to see it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
from sqlalchemy import Table

import corral
from corral.store import records
from corral.store.engine import leases
from corral.store.engine.migrate import SCRIPTS, head_of
from corral.store.records import LoadJob
from corral.store.tables import (
    MODULES,
    all_tables,
    api_keys,
    backend_intents,
    backend_rules,
    backend_targets,
    bus_credentials,
    controllers,
    due_switches,
    join_tokens,
    load_jobs,
    model_files,
    model_revisions,
    model_schedules,
    models,
    node_backends,
    node_events,
    node_files,
    node_labels,
    node_tombstones,
    nodes,
    operation_nodes,
    operations,
    peer_processes,
    process_peaks,
    release_keys,
    releases,
    rollouts,
    samples,
    web_sessions,
)
from corral.store.tables.heartbeats import Heartbeat

MAX_POSITIONAL = 4


@pytest.mark.parametrize(
    ("table", "kind"),
    [
        (api_keys.table, api_keys.ApiKey),
        (backend_intents.table, records.BackendIntent),
        (backend_rules.table, records.BackendRule),
        (backend_targets.table, records.BackendTarget),
        (bus_credentials.table, bus_credentials.BusCredential),
        (controllers.table, controllers.Controller),
        (due_switches.table, records.DueSwitch),
        (join_tokens.table, join_tokens.JoinToken),
        (leases.table, leases.Lease),
        (load_jobs.table, LoadJob),
        (model_files.table, model_files.StoredFile),
        (process_peaks.table, process_peaks.Peak),
        (rollouts.table, records.Rollout),
        (model_schedules.table, model_schedules.Schedule),
        (models.table, models.StoredModel),
        (model_revisions.table, model_revisions.ModelRevision),
        (node_events.table, node_events.StatusChange),
        (node_backends.table, node_backends.Inventory),
        (node_files.table, node_files.NodeFile),
        (node_labels.table, node_labels.NodeLabel),
        (node_tombstones.table, node_tombstones.NodeTombstone),
        (nodes.table, nodes.Node),
        (operation_nodes.table, records.OperationNode),
        (operations.table, operations.Operation),
        (peer_processes.table, peer_processes.PeerProcess),
        (release_keys.table, release_keys.ReleaseKey),
        (releases.table, releases.Release),
        (samples.table, samples.Sample),
        (web_sessions.table, web_sessions.WebSession),
    ],
    ids=lambda value: value.name if isinstance(value, Table) else "",
)
def test_a_records_fields_are_its_tables_columns_in_order(table: Table, kind: type[msgspec.Struct]) -> None:
    assert kind.__struct_fields__ == tuple(column.key for column in table.columns)


def test_an_outline_is_part_of_a_node() -> None:
    assert set(nodes.NodeOutline.__struct_fields__) <= set(nodes.table.columns.keys())


def test_a_heartbeat_brings_only_columns_of_a_node() -> None:
    assert set(Heartbeat.__struct_fields__) - {"node_id"} <= set(nodes.table.columns.keys())


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_one_module_per_table(module: ModuleType) -> None:
    package = "engine" if module is leases else "tables"
    assert module.__name__ == f"corral.store.{package}.{module.table.name}"


def test_no_table_is_forgotten() -> None:
    assert {module.table.name for module in MODULES} == {table.name for table in all_tables()}


def test_a_table_comes_after_what_it_refers_to() -> None:
    names = [table.name for table in all_tables()]
    assert names.index("nodes") < names.index("node_labels")


def test_migrations_are_numbered_without_a_gap_and_say_which_half_of_a_pair_they_are() -> None:
    names = sorted(file.name for file in (SCRIPTS / "versions").glob("[0-9]*.py"))
    assert [name[:4] for name in names] == [f"{number:04}" for number in range(1, len(names) + 1)]
    assert head_of() == names[-1][:4]
    for name in names[1:]:
        assert re.fullmatch(r"\d{4}_(create|add|replace|drop)_[a-z0-9_]+\.py", name), name
        assert re.match(r'"""(Before|After): ', (SCRIPTS / "versions" / name).read_text()), name
    for name in names:
        text = (SCRIPTS / "versions" / name).read_text()
        assert f'revision = "{name[:4]}"' in text


def _calls_of_records(path: Path) -> Iterator[tuple[int, ast.Call]]:
    tree = ast.parse(path.read_text())
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("corral.store.tables.")
        for alias in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in imported:
            yield node.lineno, node


def test_records_are_built_by_keyword() -> None:
    """Only `engine/schema.py` builds them by position, from whole rows: keywords would take twenty times as long."""
    source = Path(corral.__file__).parent
    found = [
        f"{path.relative_to(source)}:{line}"
        for path in source.rglob("*.py")
        for line, call in _calls_of_records(path)
        if len(call.args) > MAX_POSITIONAL
    ]
    assert not found


def test_stored_requests_keep_the_names_that_older_releases_wrote() -> None:
    request = operations.StoredRequest(backend=records.BackendRequest("vllm", alias="v"), force=True)
    assert msgspec.json.encode(request) == b'{"asked":{"backend":"vllm","alias":"v"},"force":true}'
    assert [column.name for column in (backend_rules.table.c.request, models.table.c.previous_revisions)] == [
        "asked",
        "formers",
    ]
