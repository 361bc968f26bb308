"""Which nodes have an inventory, and whether the one on file is of the worker that runs now. Pure."""

from __future__ import annotations

from corral.contract.messages.nodes import NodeType
from corral.store.tables.node_backends import Inventory
from corral.store.tables.nodes import NodeOutline


def takes_backends(outline: NodeOutline) -> bool:
    """Agents do not, and a node nobody approved does not yet."""
    return outline.approved and outline.node_type in ("", NodeType.BACKEND)


def is_current(inventory: Inventory | None, outline: NodeOutline) -> bool:
    """Whether it was told by the worker that runs now: after a restart, or on another machine, it must be told anew."""
    return inventory is not None and inventory.boot_id in ("", outline.boot_id)
