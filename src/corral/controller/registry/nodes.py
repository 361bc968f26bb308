"""Nodes as people steer them: approve, drain, resume, delete, replace, labels, budgets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from corral.contract.admin import NodeView
from corral.contract.budget import capped, ceiling_bytes, parse_budget
from corral.contract.labels import check_labels
from corral.controller.access.bus_issuer import BusIssuer
from corral.controller.access.revocations import Revocations
from corral.controller.registry.changes import NodeChanges
from corral.controller.registry.transitions import NodeEvent
from corral.controller.runtime.node_views import InFlightOf, not_counted, read_node_view, read_node_views
from corral.kit.errors import Invalid, NotFound
from corral.kit.humanize import did_you_mean
from corral.kit.log import get_log
from corral.store.engine.transactions import Store, Transaction
from corral.store.tables import node_events, node_labels, nodes, revisions
from corral.store.tables.node_events import StatusChange
from corral.store.tables.nodes import Node

log = get_log(__name__)

REPLICA_SLOTS = "node.replica-slots"
_LONGEST_NAME = 255


class NodeAdmin:
    def __init__(
        self,
        store: Store,
        changes: NodeChanges,
        issuer: BusIssuer,
        revoked: Revocations,
        in_flight_of: InFlightOf = not_counted,
    ) -> None:
        self._store = store
        self._changes = changes
        self._issuer = issuer
        self._revocations = revoked
        self._in_flight_of = in_flight_of

    async def list_views(self, *, limit: int | None = None, after: str | None = None) -> list[NodeView]:
        async with self._store.read() as tx:
            return list((await read_node_views(tx, self._in_flight_of, limit=limit, after=after)).values())

    async def view(self, id_or_name: str) -> NodeView:
        async with self._store.read() as tx:
            node = await _find(tx, id_or_name)
            return await read_node_view(tx, node, self._in_flight_of)

    async def node(self, id_or_name: str) -> Node:
        return await self._found(id_or_name)

    async def history(self, node_id: str) -> list[StatusChange]:
        """The last changes of its status, the newest first."""
        async with self._store.read() as tx:
            return await node_events.list_(tx, node_id)

    async def approve(self, id_or_name: str) -> NodeView:
        node = await self._found(id_or_name)
        if node.approved:
            raise Invalid(f"{node.name} is {node.status}, not pending")
        await self._changes.apply(node.id, NodeEvent.APPROVED)
        return await self.view(node.id)

    async def drain(self, id_or_name: str) -> None:
        await self._changes.apply((await self._found(id_or_name)).id, NodeEvent.DRAIN_REQUESTED)

    async def resume(self, id_or_name: str) -> None:
        await self._changes.apply((await self._found(id_or_name)).id, NodeEvent.RESUME_REQUESTED)

    async def delete(self, id_or_name: str) -> None:
        """Row, labels and credentials go; a tombstone stays so that the worker can be told."""
        async with self._store.write() as tx:
            node = await _find(tx, id_or_name)
            await nodes.delete(tx, node.id)
            await self._revocations.add(tx, self._issuer.user_key(node.id, node.token_hash), node.id)
            await revisions.bump(tx, "nodes")
        log.info("node deleted", node=node.name, node_id=node.id)
        self._changes.notify(node.id)
        self._revocations.push_soon()

    async def open_for_replacement(self, id_or_name: str) -> NodeView:
        async with self._store.write() as tx:
            node = await _find(tx, id_or_name)
            if node.auth == "shared":
                raise Invalid(f"{node.name} joined with the shared token; whoever shows that token is the node")
            opened: dict[str, Any] = {
                "token_hash": "",
                "enrolment_hash": "",
                "status": "offline",
                "left": True,
                "status_reason": "waits for the machine that replaces it",
                "status_changed_at": await tx.now(),
            }
            await self._changes.write(tx, node, opened)
            await self._revocations.add(tx, self._issuer.user_key(node.id, node.token_hash), node.id)
            await revisions.bump(tx, "nodes")
        self._changes.notify(node.id)
        self._revocations.push_soon()
        return await self.view(node.id)

    async def labels(self, id_or_name: str) -> dict[str, str]:
        """The contract answers `{}` for a node it does not know."""
        async with self._store.read() as tx:
            node = await _lookup(tx, id_or_name)
            return await node_labels.get(tx, node.id) if node else {}

    async def replace_labels(self, id_or_name: str, labels: Mapping[str, str]) -> dict[str, str]:
        return await self._label(id_or_name, labels, replace=True)

    async def merge_labels(self, id_or_name: str, labels: Mapping[str, str]) -> dict[str, str]:
        return await self._label(id_or_name, labels, replace=False)

    async def delete_label(self, id_or_name: str, key: str) -> None:
        async with self._store.write() as tx:
            node = await _find(tx, id_or_name)
            await node_labels.delete(tx, node.id, key)
            await self._touch(tx, node)
        self._changes.notify(node.id)

    async def set_max_replicas(self, id_or_name: str, value: int) -> int:
        if not 1 <= value <= 1000:
            raise Invalid(f"{value} replicas of one model on a node: give a number from 1 to 1000")
        async with self._store.write() as tx:
            node = await _find(tx, id_or_name)
            columns = {"max_replicas_per_model": value, "max_replicas_per_model_manually_set": True}
            await self._changes.write(tx, node, columns)
            await node_labels.merge(tx, node.id, {REPLICA_SLOTS: str(value)}, origin="auto")
            await revisions.bump(tx, "nodes")
        self._changes.notify(node.id)
        return value

    async def reset_max_replicas(self, id_or_name: str) -> None:
        """The value stays until the worker registers again and says its own."""
        await self._set(id_or_name, {"max_replicas_per_model_manually_set": False})

    async def set_vram_budget(self, id_or_name: str, value: str) -> str:
        try:
            budget = parse_budget(value)
        except ValueError as error:
            raise Invalid(str(error)) from error
        async with self._store.write() as tx:
            node = await _find(tx, id_or_name)
            ceiling = ceiling_bytes(budget, node.total_vram)
            columns: dict[str, Any] = {
                "vram_budget": value.strip(),
                "vram_budget_bytes": ceiling or 0,
                "vram_budget_manually_set": True,
                "available_vram": capped(node.available_vram, ceiling),
            }
            await self._changes.write(tx, node, columns)
            await revisions.bump(tx, "nodes")
        self._changes.notify(node.id)
        return value.strip()

    async def reset_vram_budget(self, id_or_name: str) -> None:
        await self._set(id_or_name, {"vram_budget_manually_set": False})

    async def _set(self, id_or_name: str, columns: Mapping[str, Any]) -> None:
        async with self._store.write() as tx:
            node = await _find(tx, id_or_name)
            await self._changes.write(tx, node, columns)
            await revisions.bump(tx, "nodes")
        self._changes.notify(node.id)

    async def _label(self, id_or_name: str, labels: Mapping[str, str], *, replace: bool) -> dict[str, str]:
        try:
            check_labels(labels)
        except ValueError as error:
            raise Invalid(str(error)) from error
        async with self._store.write() as tx:
            node = await _find(tx, id_or_name)
            change = node_labels.replace_all if replace else node_labels.merge
            await change(tx, node.id, labels, origin="admin")
            await self._touch(tx, node)
            result = await node_labels.get(tx, node.id)
        self._changes.notify(node.id)
        return result

    async def _touch(self, tx: Transaction, node: Node) -> None:
        """A label is part of what people see of the node, so its version moves too."""
        await self._changes.write(tx, node, {})
        await revisions.bump(tx, "nodes")

    async def _found(self, id_or_name: str) -> Node:
        async with self._store.read() as tx:
            return await _find(tx, id_or_name)


async def _lookup(tx: Transaction, id_or_name: str) -> Node | None:
    return await nodes.find(tx, id_or_name) or await nodes.find_by_name(tx, id_or_name)


async def _find(tx: Transaction, id_or_name: str) -> Node:
    node = await _lookup(tx, id_or_name)
    if node is not None:
        return node
    names = [outline.name for outline in await nodes.list_outlines(tx)]
    next_step = did_you_mean(id_or_name, names) or "; `corral nodes list` shows which there are"
    raise NotFound(f"there is no node {id_or_name[:_LONGEST_NAME]!r}{next_step}")
