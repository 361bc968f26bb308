"""Nodes (docs/reference/wire/http-nodes.md). A node may be named by its id or its name everywhere."""

from __future__ import annotations

from collections.abc import Mapping

from corral.client.connection import ApiConnection, segment
from corral.contract.admin import BudgetBody, MaxReplicasBody, NodeView
from corral.contract.codec import Message, always


class Approved(Message, frozen=True):
    """The answer also contains the node's credentials, which are not needed here and not read."""

    id: str = always(str)
    name: str = always(str)
    status: str = always(str)
    message: str = always(str)


class Nodes:
    def __init__(self, api: ApiConnection) -> None:
        self._api = api

    async def list(self) -> tuple[NodeView, ...]:
        """In the order of their names."""
        return await self._api.call("GET", "/api/nodes", tuple[NodeView, ...])

    async def get(self, node: str) -> NodeView:
        return await self._api.call("GET", f"/api/nodes/{segment(node)}", NodeView)

    async def approve(self, node: str) -> Approved:
        return await self._api.call("POST", f"/api/nodes/{segment(node)}/approve", Approved)

    async def drain(self, node: str) -> None:
        await self._api.call_raw("POST", f"/api/nodes/{segment(node)}/drain")

    async def resume(self, node: str) -> None:
        await self._api.call_raw("POST", f"/api/nodes/{segment(node)}/resume")

    async def delete(self, node: str) -> None:
        await self._api.call_raw("DELETE", f"/api/nodes/{segment(node)}")

    async def replace(self, node: str) -> None:
        """The next machine that registers under this name takes its place."""
        await self._api.call_raw("POST", f"/api/nodes/{segment(node)}/replace")

    async def labels(self, node: str) -> dict[str, str]:
        return await self._api.call("GET", f"/api/nodes/{segment(node)}/labels", dict[str, str])

    async def merge_labels(self, node: str, labels: Mapping[str, str]) -> None:
        await self._api.call_raw("PATCH", f"/api/nodes/{segment(node)}/labels", dict(labels))

    async def remove_label(self, node: str, key: str) -> None:
        await self._api.call_raw("DELETE", f"/api/nodes/{segment(node)}/labels/{segment(key)}")

    async def set_budget(self, node: str, value: str) -> None:
        await self._api.call_raw("PUT", f"/api/nodes/{segment(node)}/vram-budget", BudgetBody(value=value))

    async def reset_budget(self, node: str) -> None:
        """Back to the worker's own value."""
        await self._api.call_raw("DELETE", f"/api/nodes/{segment(node)}/vram-budget")

    async def set_max_replicas(self, node: str, value: int) -> None:
        path = f"/api/nodes/{segment(node)}/max-replicas-per-model"
        await self._api.call_raw("PUT", path, MaxReplicasBody(value=value))

    async def reset_max_replicas(self, node: str) -> None:
        await self._api.call_raw("DELETE", f"/api/nodes/{segment(node)}/max-replicas-per-model")
