"""`/backends/…`: backends of the whole fleet, as LocalAI's own API has them
(docs/reference/wire/http-backends.md#routes)."""

from __future__ import annotations

from typing import Any

from litestar import Controller, Response, get, post

from corral.contract.admin import BackendBody, BackendJob, PlanView
from corral.contract.messages.backends import UpgradeInfo
from corral.controller.api.auth import admins, viewers
from corral.controller.api.operations import (
    DELETION,
    VERSION_CHANGE,
    AnyRequest,
    JobId,
    Plan,
    answer_backend_job,
    read_operation_request,
)
from corral.controller.backends.catalogue import Catalogue
from corral.controller.backends.upgrades import UpgradeCheck
from corral.controller.operations.available import available_entries, known_entries
from corral.controller.operations.backend_views import BackendViews
from corral.controller.operations.requests import OperationKind
from corral.controller.operations.service import Operations
from corral.controller.operations.views import op_status


class LocalAIBackendRoutes(Controller):
    path = "/backends"
    tags = ("backends",)
    guards = (viewers,)

    @get("/", summary="List installed backends with their nodes")
    async def list_installed(self, installed: BackendViews) -> list[dict[str, Any]]:
        return await installed.everywhere()

    @get("/available", summary="List the backends in the galleries that a healthy node can use")
    async def available(self, installed: BackendViews, catalogue: Catalogue) -> list[dict[str, Any]]:
        return available_entries(await catalogue.available(await installed.kinds()), await installed.everywhere())

    @get("/known", summary="List the names of the backends in the galleries")
    async def known(self, installed: BackendViews, catalogue: Catalogue) -> list[dict[str, Any]]:
        return known_entries(await catalogue.available(await installed.kinds()), await installed.everywhere())

    @get("/galleries", summary="List the galleries of backends")
    async def galleries(self, catalogue: Catalogue) -> list[dict[str, Any]]:
        return list(catalogue.galleries())

    @get("/upgrades", summary="List the newer versions found by the last check, by backend")
    async def list_upgrades(self, upgrades: UpgradeCheck) -> dict[str, UpgradeInfo]:
        return (await upgrades.read()).upgrades

    @post(
        "/upgrades/check",
        guards=(admins,),
        status_code=200,
        summary="Start a check for newer versions; answers with the result of the last one",
    )
    async def check_upgrades(self, upgrades: UpgradeCheck) -> dict[str, UpgradeInfo]:
        await upgrades.request_check()
        return (await upgrades.read()).upgrades

    @get("/jobs/{job_id:str}", summary="Get the state of a job")
    async def job(self, operations: Operations, job_id: JobId) -> dict[str, Any]:
        return op_status(await operations.view(job_id))

    @post("/apply", guards=(admins,), status_code=200, summary="Install a backend by `id` or URI, on all nodes or some")
    async def apply(
        self, request: AnyRequest, operations: Operations, data: BackendBody, plan: Plan = False
    ) -> Response[BackendJob | PlanView]:
        operation_request = await read_operation_request(request, operations, OperationKind.INSTALL, data)
        return await answer_backend_job(request, operations, operation_request, plan=plan)

    @post(
        "/delete/{name:path}",
        guards=(admins,),
        dependencies=DELETION,
        status_code=200,
        summary="Delete a backend on all nodes or some",
    )
    async def delete(
        self, request: AnyRequest, operations: Operations, wanted: BackendBody, plan: Plan = False
    ) -> Response[BackendJob | PlanView]:
        operation_request = await read_operation_request(request, operations, OperationKind.DELETE, wanted)
        return await answer_backend_job(request, operations, operation_request, plan=plan)

    @post(
        "/upgrade/{name:path}",
        guards=(admins,),
        dependencies=VERSION_CHANGE,
        status_code=200,
        summary="Upgrade a backend on every node that has it",
    )
    async def upgrade(
        self, request: AnyRequest, operations: Operations, wanted: BackendBody, plan: Plan = False
    ) -> Response[BackendJob | PlanView]:
        operation_request = await read_operation_request(request, operations, OperationKind.UPGRADE, wanted)
        return await answer_backend_job(request, operations, operation_request, plan=plan)
