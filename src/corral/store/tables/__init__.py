"""One module per table: its record type, its columns, its statements and the functions that use them.

`all_tables()` is for code that handles the database as a whole: opening, copying, tests."""

from __future__ import annotations

from sqlalchemy import Table

from corral.store.engine import leases
from corral.store.engine.schema import metadata
from corral.store.tables import (
    api_keys,
    backend_intents,
    backend_rules,
    backend_targets,
    bus_credentials,
    cluster_secrets,
    controllers,
    join_tokens,
    load_jobs,
    model_files,
    model_schedules,
    models,
    node_backends,
    node_files,
    node_labels,
    node_tombstones,
    nodes,
    operation_nodes,
    operations,
    peer_processes,
    process_peaks,
    receipts,
    replicas,
    revisions,
    settings_kv,
    web_sessions,
)

MODULES = (
    api_keys,
    backend_intents,
    backend_rules,
    backend_targets,
    bus_credentials,
    cluster_secrets,
    controllers,
    join_tokens,
    leases,
    load_jobs,
    model_files,
    model_schedules,
    models,
    node_backends,
    node_files,
    node_labels,
    node_tombstones,
    nodes,
    operation_nodes,
    operations,
    peer_processes,
    process_peaks,
    receipts,
    replicas,
    revisions,
    settings_kv,
    web_sessions,
)


def all_tables() -> list[Table]:
    """A table comes after those it refers to."""
    return list(metadata.sorted_tables)
