"""`/api/nodes/…`: nodes as people see and steer them (docs/reference/wire/http-nodes.md#routes). `:id` may be an id or
a name."""

from __future__ import annotations

from typing import Annotated

from litestar import Controller, Response, delete, get, patch, post, put
from litestar.params import Parameter
from prometheus_client import CONTENT_TYPE_LATEST

from corral.contract.admin import BudgetBody, MaxReplicasBody, NodeView
from corral.controller.api.auth import admins, viewers
from corral.controller.registry.ingress_client import IngressClient
from corral.controller.registry.nodes import NodeAdmin

Limit = Annotated[int | None, Parameter(ge=1, le=10_000, description="Maximum number of nodes, by name")]
After = Annotated[str | None, Parameter(description="Only names after this one: the last name of the previous page")]


class NodeRoutes(Controller):
    path = "/api/nodes"
    tags = ("nodes",)
    guards = (viewers,)

    @get("/", summary="List nodes by name")
    async def list_nodes(self, nodes: NodeAdmin, limit: Limit = None, after: After = None) -> list[NodeView]:
        return await nodes.list_views(limit=limit, after=after)

    @get("/{node:str}", summary="Get a node")
    async def show(self, nodes: NodeAdmin, node: str) -> NodeView:
        return await nodes.view(node)

    @get(
        "/{node:str}/metrics", summary="Get the metrics of a worker in Prometheus text format", media_type="text/plain"
    )
    async def metrics(self, nodes: NodeAdmin, ingresses: IngressClient, node: str) -> Response[bytes]:
        return Response(await ingresses.metrics(await nodes.node(node)), media_type=CONTENT_TYPE_LATEST)

    @delete("/{node:str}", guards=(admins,), status_code=200, summary="Delete a node; its credentials end at once")
    async def remove(self, nodes: NodeAdmin, node: str) -> dict[str, str]:
        await nodes.delete(node)
        return {"message": "node deregistered"}

    @post("/{node:str}/approve", guards=(admins,), status_code=200, summary="Approve a pending node")
    async def approve(self, nodes: NodeAdmin, node: str) -> dict[str, str]:
        view = await nodes.approve(node)
        return {
            "id": view.id,
            "name": view.name,
            "node_type": view.node_type,
            "status": view.status,
            "message": "node approved",
        }

    @post("/{node:str}/drain", guards=(admins,), status_code=200, summary="Drain a node: it gets no new work")
    async def drain(self, nodes: NodeAdmin, node: str) -> dict[str, str]:
        await nodes.drain(node)
        return {"message": "node set to draining"}

    @post("/{node:str}/resume", guards=(admins,), status_code=200, summary="Resume a drained node")
    async def resume(self, nodes: NodeAdmin, node: str) -> dict[str, str]:
        await nodes.resume(node)
        return {"message": "node resumed"}

    @post(
        "/{node:str}/replace",
        guards=(admins,),
        status_code=200,
        summary="Let another machine take over the node's name; the old machine's credentials end at once",
    )
    async def replace(self, nodes: NodeAdmin, node: str) -> dict[str, str]:
        view = await nodes.open_for_replacement(node)
        return {"message": f"the next machine that joins as {view.name} with a valid token becomes this node"}

    @get("/{node:str}/labels", summary="Get the labels of a node")
    async def labels(self, nodes: NodeAdmin, node: str) -> dict[str, str]:
        return await nodes.labels(node)

    @put("/{node:str}/labels", guards=(admins,), summary="Replace the labels of a node")
    async def put_labels(self, nodes: NodeAdmin, node: str, data: dict[str, str]) -> dict[str, str]:
        return await nodes.replace_labels(node, data)

    @patch("/{node:str}/labels", guards=(admins,), summary="Add labels to a node")
    async def patch_labels(self, nodes: NodeAdmin, node: str, data: dict[str, str]) -> dict[str, str]:
        return await nodes.merge_labels(node, data)

    @delete("/{node:str}/labels/{key:path}", guards=(admins,), status_code=204, summary="Remove a label from a node")
    async def delete_label(self, nodes: NodeAdmin, node: str, key: str) -> None:
        await nodes.delete_label(node, key.lstrip("/"))

    @put("/{node:str}/max-replicas-per-model", guards=(admins,), summary="Limit the replicas per model on a node")
    async def put_max_replicas(self, nodes: NodeAdmin, node: str, data: MaxReplicasBody) -> dict[str, int]:
        return {"max_replicas_per_model": await nodes.set_max_replicas(node, data.value)}

    @delete(
        "/{node:str}/max-replicas-per-model",
        guards=(admins,),
        status_code=200,
        summary="Return to the worker's own limit of replicas per model",
    )
    async def reset_max_replicas(self, nodes: NodeAdmin, node: str) -> dict[str, bool]:
        await nodes.reset_max_replicas(node)
        return {"reset": True}

    @put(
        "/{node:str}/vram-budget",
        guards=(admins,),
        summary="Set how much VRAM Corral may use on a node: 80%, 12GiB, or empty",
    )
    async def put_budget(self, nodes: NodeAdmin, node: str, data: BudgetBody) -> dict[str, str]:
        return {"vram_budget": await nodes.set_vram_budget(node, data.value)}

    @delete(
        "/{node:str}/vram-budget", guards=(admins,), status_code=200, summary="Return to the worker's own VRAM budget"
    )
    async def reset_budget(self, nodes: NodeAdmin, node: str) -> dict[str, bool]:
        await nodes.reset_vram_budget(node)
        return {"reset": True}
