"""A stored node as people and peers see it. Pure but for the one reading function."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from corral.contract.admin import NodeView
from corral.store import node_labels, nodes
from corral.store.api import Transaction
from corral.store.nodes import Node


async def read_node_views(
    tx: Transaction, *, limit: int | None = None, after: str | None = None
) -> dict[str, NodeView]:
    """By id, in name order."""
    rows = await nodes.list_(tx, limit=limit, after_name=after)
    labels = await node_labels.list_for(tx, [row.id for row in rows] if limit else None)
    return {row.id: node_view(row, labels.get(row.id, {})) for row in rows}


def node_view(node: Node, labels: Mapping[str, str]) -> NodeView:
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
    )


def rfc3339(moment: datetime | None) -> str:
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z") if moment else ""
