"""Which nodes have an inventory, and whether the stored one is current. Pure."""

from __future__ import annotations

from corral.contract.messages.nodes import NodeType
from corral.store.tables.node_backends import Inventory
from corral.store.tables.nodes import NodeOutline


def takes_backends(outline: NodeOutline) -> bool:
    """Agent nodes do not, nor does a node before its approval."""
    return outline.approved and outline.node_type in ("", NodeType.BACKEND)


def is_current(inventory: Inventory | None, outline: NodeOutline) -> bool:
    """Whether the worker that runs now reported it: a restarted worker has to report it again."""
    return inventory is not None and inventory.boot_id in ("", outline.boot_id)
