"""Views of stored nodes for users and gateways. Pure, except for what reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime

from corral.contract.admin import NodeView
from corral.contract.messages.nodes import NodeStatus
from corral.store.engine.transactions import Transaction
from corral.store.tables import node_labels, nodes, replicas
from corral.store.tables.nodes import Node

InFlightOf = Callable[[str], tuple[int, bool]]  # of a node: requests in flight, and whether that is known
_MadeOf = tuple[Node, Mapping[str, str], int, tuple[int, bool]]
ViewOf = Callable[[Node, Mapping[str, str], int, tuple[int, bool]], NodeView]


def not_counted(_node_id: str) -> tuple[int, bool]:
    return 0, False


async def read_node_views(
    tx: Transaction,
    in_flight_of: InFlightOf = not_counted,
    *,
    limit: int | None = None,
    after: str | None = None,
    view_of: ViewOf | None = None,
) -> dict[str, NodeView]:
    """By id, in name order. `view_of`: makes the views."""
    make = view_of or node_view
    rows = await nodes.list_(tx, limit=limit, after_name=after)
    page = [row.id for row in rows] if limit else None
    labels = await node_labels.list_for(tx, page)
    held = await replicas.count_running(tx, page)
    return {row.id: make(row, labels.get(row.id, {}), held.get(row.id, 0), in_flight_of(row.id)) for row in rows}


class NodeViewCache:
    """Keeps the views of nodes that did not change since they were last read. They are compared, not dated: a view is
    never older than its row."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[_MadeOf, NodeView]] = {}

    async def read(self, tx: Transaction) -> dict[str, NodeView]:
        views = await read_node_views(tx, view_of=self._view)
        if len(self._kept) > len(views):
            self._kept = {node_id: kept for node_id, kept in self._kept.items() if node_id in views}
        return views

    def _view(self, node: Node, labels: Mapping[str, str], replica_count: int, in_flight: tuple[int, bool]) -> NodeView:
        made_of = (node, labels, replica_count, in_flight)
        kept = self._kept.get(node.id)
        if kept is None or kept[0] != made_of:
            kept = self._kept[node.id] = (made_of, node_view(*made_of))
        return kept[1]


async def read_node_view(tx: Transaction, node: Node, in_flight_of: InFlightOf) -> NodeView:
    held = await replicas.count_running(tx, [node.id])
    return node_view(node, await node_labels.get(tx, node.id), held.get(node.id, 0), in_flight_of(node.id))


def node_view(node: Node, labels: Mapping[str, str], replica_count: int, in_flight: tuple[int, bool]) -> NodeView:
    count, is_known = in_flight
    return NodeView(
        id=node.id,
        name=node.name,
        node_type=node.node_type,
        address=node.address,
        http_address=node.http_address,
        status=node.status,
        total_vram=node.total_vram,
        available_vram=node.available_vram,
        reserved_vram=node.reserved_vram,
        total_ram=node.total_ram,
        available_ram=node.available_ram,
        total_disk=node.total_disk,
        available_disk=node.available_disk,
        gpu_vendor=node.gpu_vendor,
        gpu_compute_capability=node.gpu_compute_capability,
        capability=node.capability,
        max_replicas_per_model=node.max_replicas_per_model,
        max_replicas_per_model_manually_set=node.max_replicas_per_model_manually_set,
        vram_budget=node.vram_budget,
        vram_budget_bytes=node.vram_budget_bytes,
        vram_budget_manually_set=node.vram_budget_manually_set,
        last_heartbeat=rfc3339(node.last_heartbeat),
        created_at=rfc3339(node.created_at),
        updated_at=rfc3339(node.updated_at),
        model_count=replica_count,
        in_flight_count=count,
        labels=dict(labels),
        status_reason=node.status_reason,
        platform=f"{node.os}/{node.arch}" if node.os else "",
        devices=node.devices,
        ingress_url=node.ingress_url,
        ingress_error=node.ingress_error,
        bus_down=node.bus_down,
        compat=node.auth == "shared",
        version=node.version,
        row_version=node.row_version,
        backend_user=node.backend_user,
        backend_user_warning=node.backend_user_warning,
        backend_user_fix=node.backend_user_fix,
        in_flight_unknown="" if count else _why_unknown(node, is_known),
    )


def _why_unknown(node: Node, is_known: bool) -> str:
    """Zero requests are known only of a node that reports requests, to a controller that was subscribed."""
    if node.status == NodeStatus.PENDING or not node.approved:
        return ""
    if node.status in (NodeStatus.OFFLINE, NodeStatus.UNHEALTHY):
        return f"the node is {node.status}"
    if node.bus_down:
        return "the node cannot reach the bus"
    return "" if is_known else "the controller has not listened to the nodes for long enough; ask again in some seconds"


def rfc3339(moment: datetime | None) -> str:
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z") if moment else ""
