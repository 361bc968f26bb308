"""What a person should know about a node first, the same in the CLI and on the page. Pure.

Imports no message: the list of the nodes is printed without them (`cli/lists.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from corral.contract.admin import NodeView


def main_problem(node: NodeView, *, pending: str, bus_down: str) -> str:
    """What a person should know about the node first, or nothing. The two texts are the caller's own."""
    if node.status == "pending":
        return pending
    if node.status == "offline":
        return node.status_reason
    if node.ingress_error:
        return node.ingress_error
    if node.bus_down:
        return bus_down
    return "" if node.status == "healthy" else node.status_reason
