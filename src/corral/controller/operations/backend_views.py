"""Lists installed backends by node or by backend, in LocalAI's form
(docs/reference/wire/http-backends.md#installed-backends)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from corral.contract.admin import BackendMatrix, MatrixIntent
from corral.contract.messages.backends import NodeBackend
from corral.controller.backends.rules import without_overruled
from corral.controller.backends.upgrades import UpgradeCheck
from corral.controller.inventory.nodes import takes_backends
from corral.controller.operations.backend_matrix import Pending, matrix_of, pending_deletes, pending_of
from corral.kit.errors import NotFound
from corral.kit.humanize import did_you_mean
from corral.store.engine.transactions import Store, Transaction
from corral.store.records import OperationNode
from corral.store.tables import (
    backend_intents,
    backend_rules,
    node_backends,
    node_labels,
    nodes,
    operation_nodes,
    operations,
)
from corral.store.tables.node_backends import Inventory
from corral.store.tables.nodes import NodeOutline


class BackendViews:
    def __init__(self, store: Store, upgrades: UpgradeCheck) -> None:
        self._store = store
        self._upgrades = upgrades

    async def on_node(self, id_or_name: str) -> list[dict[str, Any]]:
        """The backends of one node, each with its pending work."""
        async with self._store.read() as tx:
            outlines = {row.id: row for row in await nodes.list_outlines(tx)}
            chosen = outlines.get(id_or_name) or next(
                (row for row in outlines.values() if row.name == id_or_name), None
            )
            if chosen is None:
                names = [row.name for row in outlines.values()]
                raise NotFound(f"there is no node {id_or_name!r}{did_you_mean(id_or_name, names)}")
            inventory = await node_backends.find(tx, chosen.id)
            pending = (await self._pending(tx, [chosen.id])).get(chosen.id, {})
        rows = [_listed(row, pending.get(row.name)) for row in (inventory.backends if inventory else ())]
        there = {row["name"] for row in rows}
        for backend, intent in sorted(pending.items()):
            if backend not in there:
                row = {"name": backend, "is_system": False, "is_meta": False, "installed": False}
                rows.append(row | {"intent": msgspec.to_builtins(intent)})
        return rows

    async def everywhere(self) -> list[dict[str, Any]]:
        """All backends in name order; the metadata is that of the first node with the backend."""
        async with self._store.read() as tx:
            inventories = {row.node_id: row for row in await node_backends.list_(tx)}
            outlines = [row for row in await nodes.list_outlines(tx) if takes_backends(row) and row.id in inventories]
        newer = (await self._upgrades.read()).upgrades
        found: dict[str, dict[str, Any]] = {}
        for outline in outlines:
            for row in inventories[outline.id].backends:
                entry = found.setdefault(row.name, _entry(row))
                entry["nodes"].append(node_reference(outline, row))
        for name, entry in found.items():
            if name in newer:
                entry |= {"upgrade_available": True, "available_version": newer[name].available_version}
        return [found[name] for name in sorted(found)]

    async def matrix(self) -> BackendMatrix:
        """The matrix of backends and nodes."""
        async with self._store.read() as tx:
            outlines = [row for row in await nodes.list_outlines(tx) if takes_backends(row)]
            inventories = {row.node_id: row for row in await node_backends.list_(tx)}
            pending = await self._pending(tx)
            gone = await self._away_with(tx, outlines, inventories)
        pending = {node_id: {**gone.get(node_id, {}), **pending.get(node_id, {})} for node_id in {*gone, *pending}}
        checked = await self._upgrades.read()
        return matrix_of(outlines, inventories, pending, checked.upgrades, checked.checked_at)

    async def _pending(self, tx: Transaction, node_ids: Sequence[str] | None = None) -> Pending:
        rows: dict[str, list[OperationNode]] = {}
        for record in await operation_nodes.list_open(tx, node_ids):
            rows.setdefault(record.operation_id, []).append(record)
        chosen = await operations.list_for(tx, sorted(rows))
        return pending_of(chosen, rows, await backend_intents.list_(tx, node_ids))

    async def _away_with(
        self, tx: Transaction, outlines: Sequence[NodeOutline], inventories: Mapping[str, Inventory]
    ) -> Pending:
        away = [row for row in outlines if row.status != "healthy"]
        if not away:
            return {}
        rules = without_overruled(await backend_rules.list_live(tx))
        return pending_deletes(away, await node_labels.list_for(tx, [row.id for row in away]), inventories, rules)

    async def nodes_by_kind(self) -> dict[tuple[str, str], list[str]]:
        """The names of healthy nodes by the kind of machine: a backend fits on all of a kind, or on none."""
        async with self._store.read() as tx:
            outlines = await nodes.list_outlines(tx)
        found: dict[tuple[str, str], list[str]] = {}
        for row in outlines:
            if takes_backends(row) and row.status == "healthy":
                found.setdefault((row.capability, row.platform), []).append(row.name)
        return found

    async def kinds(self) -> set[tuple[str, str]]:
        """The kinds of machine among the healthy nodes: a backend is available if one of them can use it."""
        async with self._store.read() as tx:
            outlines = await nodes.list_outlines(tx)
        return {(row.capability, row.platform) for row in outlines if takes_backends(row) and row.status == "healthy"}


def node_reference(outline: NodeOutline, row: NodeBackend) -> dict[str, Any]:
    inventories = {"version": row.version, "digest": row.digest, "uri": row.uri, "installed_at": row.installed_at}
    named = {"node_id": outline.id, "node_name": outline.name, "node_status": outline.status}
    return named | {key: value for key, value in inventories.items() if value}


def _entry(row: NodeBackend) -> dict[str, Any]:
    metadata = {
        "name": row.name,
        "alias": row.alias,
        "meta_backend_for": row.meta_backend_for,
        "gallery_url": row.gallery_url,
        "installed_at": row.installed_at,
        "version": row.version,
        "uri": row.uri,
        "digest": row.digest,
    }
    return {
        "Name": row.name,
        "RunFile": "",  # the file is on the nodes
        "IsMeta": row.is_meta,
        "IsSystem": row.is_system,
        "Metadata": {key: value for key, value in metadata.items() if value},
        "nodes": [],
    }


def _listed(row: NodeBackend, intent: MatrixIntent | None) -> dict[str, Any]:
    inventories: dict[str, Any] = {
        "name": row.name,
        "is_system": row.is_system,
        "is_meta": row.is_meta,
        "installed_at": row.installed_at,
        "gallery_url": row.gallery_url,
        "version": row.version,
        "uri": row.uri,
        "digest": row.digest,
        "alias": row.alias,
        "meta_backend_for": row.meta_backend_for,
        "previous": list(row.previous),
    }
    kept = {key: value for key, value in inventories.items() if value or key in ("name", "is_system", "is_meta")}
    if intent is not None:
        kept["intent"] = msgspec.to_builtins(intent)
    return kept
