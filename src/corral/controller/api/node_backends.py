"""`/api/nodes/:id/backends…`: backends of one node (docs/reference/wire/http-nodes.md#routes)."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Controller, Response, get, post

from corral.contract.admin import BackendBody, BackendVerified, JobAccepted, PlanView
from corral.controller.api.auth import admins, viewers
from corral.controller.api.errors import answer
from corral.controller.api.operations import (
    AnyRequest,
    Plan,
    accept,
    answer_job,
    not_done_yet,
    read_operation_request,
)
from corral.controller.inventory.verify import BackendVerifier
from corral.controller.operations.backend_views import BackendViews
from corral.controller.operations.requests import OperationKind
from corral.controller.operations.service import Operations


class NodeBackendRoutes(Controller):
    path = "/api/nodes/{node:str}/backends"
    tags = ("backends of a node",)
    guards = (viewers,)

    @get("/", summary="List the backends of a node: installed and pending")
    async def list_backends(self, installed: BackendViews, node: str) -> list[dict[str, Any]]:
        return await installed.on_node(node)

    @post("/install", guards=(admins,), status_code=202, summary="Install a backend on a node, from a gallery or a URI")
    async def install(
        self, request: AnyRequest, operations: Operations, node: str, data: BackendBody, plan: Plan = False
    ) -> Response[JobAccepted | PlanView]:
        return await self._ask(request, operations, OperationKind.INSTALL, node, data, plan)

    @post("/upgrade", guards=(admins,), status_code=202, summary="Upgrade a backend on a node")
    async def upgrade(
        self, request: AnyRequest, operations: Operations, node: str, data: BackendBody, plan: Plan = False
    ) -> Response[JobAccepted | PlanView]:
        return await self._ask(request, operations, OperationKind.UPGRADE, node, data, plan)

    @post(
        "/rollback", guards=(admins,), status_code=202, summary="Roll a backend back to its previous version on a node"
    )
    async def rollback(
        self, request: AnyRequest, operations: Operations, node: str, data: BackendBody, plan: Plan = False
    ) -> Response[JobAccepted | PlanView]:
        return await self._ask(request, operations, OperationKind.ROLLBACK, node, data, plan)

    @post(
        "/delete",
        guards=(admins,),
        status_code=200,
        summary="Delete a backend on a node; answers when it is deleted, or 202 if the node is away or needs long",
    )
    async def delete(
        self, request: AnyRequest, operations: Operations, node: str, data: BackendBody, plan: Plan = False
    ) -> Response[Any]:
        operation_request = await read_operation_request(request, operations, OperationKind.DELETE, _on(node, data))
        if plan:
            return Response(await operations.plan(operation_request))
        job = await accept(operations, operation_request)
        view = await operations.wait_settled(job.job_id, timeout_s=request.app.state.settle_s)
        if view.state == "done":
            return Response({"message": "backend deleted"})
        if view.state == "failing":  # it is retried; the waiting client gets the present state
            words = f"{view.error}; will be tried again, see operation {job.job_id}"
            return answer(500, words, "node_error", nodes=view.nodes)
        return not_done_yet(job, view, next((row.error for row in view.nodes if row.error), view.message))

    @post("/verify", guards=(admins,), status_code=200, summary="Verify the installed files of a backend on a node")
    async def verify(self, integrity: BackendVerifier, node: str, data: BackendBody) -> BackendVerified:
        return await integrity.verify(node, data.backend or data.name)

    async def _ask(
        self,
        request: AnyRequest,
        operations: Operations,
        kind: OperationKind,
        node: str,
        body: BackendBody,
        plan: bool,
    ) -> Response[JobAccepted | PlanView]:
        operation_request = await read_operation_request(request, operations, kind, _on(node, body))
        return await answer_job(operations, operation_request, plan=plan, status=202)


def _on(node: str, body: BackendBody) -> BackendBody:
    return msgspec.structs.replace(body, node=node, selector="")
