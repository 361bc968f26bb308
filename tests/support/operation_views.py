"""Operations as the API shows them, for tests of those who read them."""

from __future__ import annotations

from typing import Any

from corral.contract.admin import OperationNodeView, OperationView

OPERATION = "3f2a91c0-0000-4000-8000-000000000000"


def on(name: str, status: str = "downloading", **more: Any) -> OperationNodeView:
    """One node's row."""
    return OperationNodeView(node_id=f"id-{name}", node_name=name, status=status, **more)


def operation(*nodes: OperationNodeView, state: str = "under_way", **more: Any) -> OperationView:
    known: dict[str, Any] = {
        "id": "vllm",
        "job_id": OPERATION,
        "backend": "vllm",
        "kind": "install",
        "scope": "all",
        "created_at": "2026-11-15T11:59:00Z",
        "settled": state != "under_way",
    }
    return OperationView(**(known | more), state=state, nodes=nodes)
