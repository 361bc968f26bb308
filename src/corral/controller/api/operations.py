"""`/api/operations/…`: what was asked of backends, how far it is on each node, and the levers
(docs/reference/wire/operations.md#routes).

The same from every controller: what is said here is in the database, and progress is heard by all.
"""

from __future__ import annotations

from typing import Annotated

from litestar import Controller, Response, delete, get, post
from litestar.params import Parameter
from litestar.response import Stream

from corral.contract.admin import (
    JobAccepted,
    OperationBody,
    OperationHistory,
    OperationList,
    OperationView,
    PlanView,
    Steered,
)
from corral.controller.access.keys import Access
from corral.controller.api.auth import admins, principal_of, viewers
from corral.controller.api.backend_requests import AnyRequest, JobId, Node, Plan, answer_job, read_operation_request
from corral.controller.api.events import operation_frames, stream_of
from corral.controller.operations.requests import OperationKind
from corral.controller.operations.service import Operations
from corral.controller.runtime.change_feed import ChangeFeed
from corral.kit.errors import Invalid

All = Annotated[bool, Parameter(description="Include ended and dismissed operations, newest first")]
Limit = Annotated[int, Parameter(ge=1, le=1000, description="Maximum number of entries")]
After = Annotated[
    str, Parameter(description="With `all`: only operations before this one, the last of the previous page")
]
Rows = Annotated[bool, Parameter(description="false: only counts of nodes per state, which is fast for large fleets")]


class OperationRoutes(Controller):
    path = "/api/operations"
    tags = ("operations",)
    guards = (viewers,)

    @get("/", summary="List operations that run, wait or fail; with `all` also ended ones")
    async def list_operations(
        self, operations: Operations, all: All = False, limit: Limit = 50, after: After = "", rows: Rows = True
    ) -> OperationList:
        return OperationList(tuple(await operations.list_views(everything=all, limit=limit, after=after, rows=rows)))

    @post(
        "/",
        guards=(admins,),
        status_code=202,
        summary="Install, upgrade, roll back or delete a backend on all nodes, some, or one",
    )
    async def create(
        self, request: AnyRequest, operations: Operations, data: OperationBody, plan: Plan = False
    ) -> Response[JobAccepted | PlanView]:
        operation_request = await read_operation_request(request, operations, kind_of(data.kind), data)
        return await answer_job(operations, operation_request, plan=plan, status=202)

    @get("/history", summary="List the last 50 ended operations, newest first")
    async def history(self, operations: Operations) -> OperationHistory:
        return await operations.history()

    @delete("/history", guards=(admins,), status_code=200, summary="Delete the history of ended operations")
    async def clear_history(self, operations: Operations) -> dict[str, bool]:
        await operations.clear_history()
        return {"success": True}

    @get("/{job_id:str}", summary="Get an operation with one row per node")
    async def show(self, operations: Operations, job_id: JobId) -> OperationView:
        return await operations.view(job_id)

    @get(
        "/{job_id:str}/events",
        summary="Follow an operation: `operation` events, at most 4 per second, until it ends",
        media_type="text/event-stream",
    )
    async def follow(
        self, request: AnyRequest, operations: Operations, feed: ChangeFeed, access: Access, job_id: JobId
    ) -> Stream:
        await operations.view(job_id)  # so that an unknown one is a 404, not a stream that ends
        return stream_of(feed, access, principal_of(request), operation_frames(operations, job_id))

    @post(
        "/{job_id:str}/cancel",
        guards=(admins,),
        status_code=200,
        summary="Cancel an operation: stop transfers and withdraw its rule; with `node`, on that node only",
    )
    async def cancel(self, operations: Operations, job_id: JobId, node: Node = "") -> Steered:
        notes = await operations.cancel(job_id, node=node)
        return _taken_back(f"cancelled on {node}" if node else "operation cancelled", job_id, notes)

    @post(
        "/{job_id:str}/pause",
        guards=(admins,),
        status_code=200,
        summary="Pause an operation: cancel it and keep the bytes that were fetched; a retry resumes there",
    )
    async def pause(self, operations: Operations, job_id: JobId, node: Node = "") -> Steered:
        notes = await operations.pause(job_id, node=node)
        return _taken_back("operation paused: retry goes on with what was fetched", job_id, notes)

    @post(
        "/{job_id:str}/retry",
        guards=(admins,),
        status_code=200,
        summary="Retry failing nodes now; with `node`, that node only. A cancelled operation is requested again",
    )
    async def retry(self, request: AnyRequest, operations: Operations, job_id: JobId, node: Node = "") -> Steered:
        again = await operations.retry(job_id, node=node, by=principal_of(request).name)
        where = f" on {node}" if node else ""
        words = "tried again now" if again.operation_id == job_id else "asked for anew"
        return Steered(True, words + where, again.operation_id)

    @post(
        "/{job_id:str}/withdraw",
        guards=(admins,),
        status_code=200,
        summary="Withdraw an operation: running nodes finish, no other node starts",
    )
    async def withdraw(self, operations: Operations, job_id: JobId) -> Steered:
        notes = await operations.withdraw(job_id)
        return _taken_back("operation withdrawn", job_id, notes)

    @post(
        "/{job_id:str}/dismiss",
        guards=(admins,),
        status_code=200,
        summary="Dismiss an operation: hide it; the operation itself continues",
    )
    async def dismiss(self, operations: Operations, job_id: JobId) -> Steered:
        await operations.dismiss(job_id)
        return Steered(True, "operation dismissed", job_id)


def _taken_back(words: str, job_id: str, notes: tuple[str, ...]) -> Steered:
    return Steered(True, "; ".join((words, *notes)), job_id, notes)


def kind_of(word: str) -> OperationKind:
    try:
        return OperationKind(word)
    except ValueError as error:
        known = ", ".join(kind.value for kind in OperationKind)
        raise Invalid(f"there is no operation {word[:40]!r}; choose among {known}") from error
