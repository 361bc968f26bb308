"""`/api/backends/…`: the same for pages and people (docs/reference/wire/http-backends.md#routes), and what LocalAI
lacks: the matrix of backends × nodes, rollback, every upgrade at once."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from litestar import Controller, Response, get, post
from litestar.params import Parameter

from corral.contract.admin import (
    BackendBody,
    BackendMatrix,
    BackendUpgrades,
    JobAccepted,
    JobsAccepted,
    OperationView,
    PlanView,
    ScopeBody,
)
from corral.contract.messages.backends import UpgradeInfo
from corral.controller.api.auth import admins, viewers
from corral.controller.api.errors import plain as refuse
from corral.controller.api.operations import (
    DELETION,
    VERSION_CHANGE,
    AnyRequest,
    JobId,
    Node,
    Plan,
    Selector,
    accept,
    answer_job,
    not_done_yet,
    plain_name,
    read_operation_request,
)
from corral.controller.backends.catalogue import Catalogue
from corral.controller.backends.upgrades import UpgradeCheck
from corral.controller.operations.available import Busy, Query, available_entries, page_of
from corral.controller.operations.backend_views import BackendViews
from corral.controller.operations.requests import OperationKind
from corral.controller.operations.service import Operations
from corral.controller.operations.views import job_status
from corral.kit.errors import CorralError, Invalid

Term = Annotated[str, Parameter(description="Only entries with this text in name, description, tags or gallery")]
Tag = Annotated[str, Parameter(description="Only entries with this tag")]
Page = Annotated[int, Parameter(ge=1, le=1_000_000)]
Items = Annotated[int, Parameter(ge=1, le=10_000, description="Entries per page")]
Sort = Annotated[str, Parameter(description="name, repository, license or status")]
Order = Annotated[str, Parameter(description="asc or desc")]
Wait = Annotated[bool, Parameter(description="Answer after the galleries were read")]


class BackendRoutes(Controller):
    path = "/api/backends"
    tags = ("backends",)
    guards = (viewers,)

    @get("/", summary="List the backends in the galleries by page, with the nodes that have them")
    async def list_page(
        self,
        installed: BackendViews,
        catalogue: Catalogue,
        operations: Operations,
        term: Term = "",
        tag: Tag = "",
        page: Page = 1,
        items: Items = 9,
        sort: Sort = "",
        order: Order = "",
    ) -> dict[str, Any]:
        busy = {name: Busy(row.id, row.kind) for name, row in (await operations.busy()).items()}
        entries = await catalogue.available(await installed.kinds())
        there = await installed.everywhere()
        return page_of(entries, there, busy, catalogue.galleries(), Query(term, tag, page, items, sort, order))

    @get("/available", summary="The backends in the galleries that a healthy node can use")
    async def available(self, installed: BackendViews, catalogue: Catalogue) -> list[dict[str, Any]]:
        return available_entries(await catalogue.available(await installed.kinds()), await installed.everywhere())

    @get("/matrix", summary="Get the matrix of backends and nodes: versions, upgrades, drift, pending work")
    async def matrix(self, installed: BackendViews) -> BackendMatrix:
        return await installed.matrix()

    @get("/upgrades", summary="List the newer versions found by the last check, by backend")
    async def list_upgrades(self, upgrades: UpgradeCheck) -> dict[str, UpgradeInfo]:
        return (await upgrades.read()).upgrades

    @get("/upgrades/checked", summary="List the newer versions found by the last check, with the time of the check")
    async def checked_upgrades(self, upgrades: UpgradeCheck) -> BackendUpgrades:
        found = await upgrades.read()
        return BackendUpgrades(found.checked_at, found.upgrades)

    @post(
        "/upgrades/check",
        guards=(admins,),
        status_code=200,
        summary="Check for newer versions now; answers with the last result, or with `wait` with the new one",
    )
    async def check_upgrades(self, upgrades: UpgradeCheck, wait: Wait = False) -> dict[str, UpgradeInfo]:
        if wait:
            return await upgrades.check(refresh=True)
        await upgrades.request_check()
        return (await upgrades.read()).upgrades

    @post(
        "/upgrades/apply", guards=(admins,), status_code=202, summary="Upgrade every backend that has a newer version"
    )
    async def apply_upgrades(
        self, request: AnyRequest, operations: Operations, upgrades: UpgradeCheck, data: ScopeBody
    ) -> JobsAccepted:
        jobs, refused = [], {}
        for name in (await upgrades.read()).upgrades:
            body = BackendBody(backend=name, node=data.node, selector=data.selector, max_parallel=data.max_parallel)
            operation_request = await read_operation_request(request, operations, OperationKind.UPGRADE, body)
            try:
                jobs.append(await accept(operations, operation_request))
            except CorralError as error:  # one that is gone since must not keep the others
                refused[name] = error.message
        return JobsAccepted(tuple(jobs), refused)

    @get("/job/{job_id:str}", summary="Get the state of a job; an unknown one counts as queued")
    async def job(self, operations: Operations, job_id: JobId) -> dict[str, Any]:
        view = await operations.find_view(job_id)
        # A page may ask before the controller it reaches has seen what another one accepted.
        return job_status(view if view is not None else OperationView(message="queued", is_queued=True))

    @post("/install/{name:path}", guards=(admins,), status_code=200, summary="Install a backend, or reinstall it")
    async def install(
        self,
        request: AnyRequest,
        operations: Operations,
        name: str,
        node: Node = "",
        selector: Selector = "",
        plan: Plan = False,
    ) -> Response[JobAccepted | PlanView]:
        body = BackendBody(backend=plain_name(name), node=node, selector=selector, force=True)
        return await _ask(request, operations, OperationKind.INSTALL, body, plan)

    @post("/install-external", guards=(admins,), status_code=200, summary="Install a backend from a URI")
    async def install_external(
        self, request: AnyRequest, operations: Operations, data: BackendBody, plan: Plan = False
    ) -> Response[JobAccepted | PlanView]:
        if not data.uri:
            raise Invalid("uri is required")
        return await _ask(request, operations, OperationKind.INSTALL, data, plan)

    @post(
        "/delete/{name:path}",
        guards=(admins,),
        dependencies=DELETION,
        status_code=200,
        summary="Delete a backend on all nodes or some",
    )
    async def delete(
        self, request: AnyRequest, operations: Operations, wanted: BackendBody, plan: Plan = False
    ) -> Response[JobAccepted | PlanView]:
        return await _ask(request, operations, OperationKind.DELETE, wanted, plan)

    @post(
        "/system/delete/{name:path}",
        guards=(admins,),
        status_code=200,
        summary="Delete a backend on every node; answers when it is deleted, or 202 if a node is away or needs long",
    )
    async def delete_now(self, request: AnyRequest, operations: Operations, name: str) -> Response[Any]:
        body = BackendBody(backend=plain_name(name))
        job = await accept(operations, await read_operation_request(request, operations, OperationKind.DELETE, body))
        view = await operations.wait_settled(job.job_id, timeout_s=request.app.state.settle_s)
        if view.state == "done":
            nodes = [msgspec.to_builtins(row) for row in view.nodes]
            return Response({"success": True, "message": "Backend deleted successfully", "nodes": nodes})
        if view.state == "failing":
            words = f"{view.error}; will be tried again, see operation {job.job_id}"
            return refuse(500, words, "failed", nodes=view.nodes)
        return not_done_yet(job, view, view.message)

    @post(
        "/upgrade/{name:path}",
        guards=(admins,),
        dependencies=VERSION_CHANGE,
        status_code=200,
        summary="Upgrade a backend on every node that has it",
    )
    async def upgrade(
        self, request: AnyRequest, operations: Operations, wanted: BackendBody, plan: Plan = False
    ) -> Response[JobAccepted | PlanView]:
        return await _ask(request, operations, OperationKind.UPGRADE, wanted, plan)

    @post(
        "/rollback/{name:path}",
        guards=(admins,),
        dependencies=VERSION_CHANGE,
        status_code=200,
        summary="Roll a backend back to its previous version",
    )
    async def rollback(
        self, request: AnyRequest, operations: Operations, wanted: BackendBody, plan: Plan = False
    ) -> Response[JobAccepted | PlanView]:
        return await _ask(request, operations, OperationKind.ROLLBACK, wanted, plan)


async def _ask(
    request: AnyRequest, operations: Operations, kind: OperationKind, body: BackendBody, plan: bool
) -> Response[JobAccepted | PlanView]:
    operation_request = await read_operation_request(request, operations, kind, body)
    return await answer_job(operations, operation_request, plan=plan, status=200)
