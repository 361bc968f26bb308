"""`/api/operations/…`: operations on backends, their progress on each node, cancel and retry
(docs/reference/wire/operations.md#routes). All controllers give the same responses: requests are stored in the
database, and every controller receives the progress events.

The functions above the routes turn the body of a request into an operation, for all routes of backends.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from litestar import Controller, Request, Response, delete, get, post
from litestar.di import Provide
from litestar.params import Parameter
from litestar.response import Stream

from corral.contract.admin import (
    BackendBody,
    BackendJob,
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
from corral.controller.api.events import operation_frames, stream_of
from corral.controller.operations.requests import OperationKind, OperationRequest, parse_request
from corral.controller.operations.service import Operations
from corral.controller.rollouts.options import parse_rollout
from corral.controller.runtime.change_feed import ChangeFeed
from corral.kit.errors import Invalid
from corral.store.records import BackendRequest

AnyRequest = Request[Any, Any, Any]
Plan = Annotated[bool, Parameter(description="Return the plan per node; change nothing")]
Force = Annotated[bool, Parameter(description="Reinstall; for a delete: delete although a model uses it")]
Node = Annotated[str, Parameter(max_length=255, description="Only this node, by id or name")]
Selector = Annotated[str, Parameter(description="Only nodes with these labels: `tier=fast,!old`")]
JobId = Annotated[str, Parameter(max_length=100, description="Id of the operation")]
MaxParallel = Annotated[str, Parameter(description="Number of nodes that switch at the same time: `25%`, `3`")]

_NODE_MAX = 255
_SELECTOR_MAX = 512
_DOING = {
    OperationKind.INSTALL: "installation",
    OperationKind.UPGRADE: "upgrade",
    OperationKind.DELETE: "deletion",
    OperationKind.ROLLBACK: "rollback",
}


def _deletion(name: str, node: Node = "", selector: Selector = "", force: Force = False) -> BackendBody:
    return BackendBody(backend=plain_name(name), node=node, selector=selector, force=force)


def _version_change(name: str, node: Node = "", selector: Selector = "", max_parallel: MaxParallel = "") -> BackendBody:
    return BackendBody(backend=plain_name(name), node=node, selector=selector, max_parallel=max_parallel)


# Handlers that name the backend in the path receive the body that path and query stand for, as `wanted`.
DELETION = {"wanted": Provide(_deletion, sync_to_thread=False)}
VERSION_CHANGE = {"wanted": Provide(_version_change, sync_to_thread=False)}


def plain_name(path: str) -> str:
    """A name from the path: one with a slash arrives as several segments."""
    return path.removeprefix("/")


async def read_operation_request(
    request: AnyRequest, operations: Operations, kind: OperationKind, body: BackendBody
) -> OperationRequest:
    """Raises Invalid for a request that makes no sense, NotFound for an unknown node."""
    # Without a backend or a uri there is no reason to look up the node.
    if not (body.backend or body.id or body.uri):
        raise Invalid("name a backend, or give a uri")
    _check_text("node", body.node, _NODE_MAX)
    _check_text("selector", body.selector, _SELECTOR_MAX)
    scope = await operations.scope(node=body.node, selector=body.selector)
    by = principal_of(request).name
    rollout = parse_rollout(
        soak=body.soak,
        max_errors=body.max_errors,
        max_slowdown=body.max_slowdown,
        min_requests=body.min_requests,
    )
    return parse_request(
        kind,
        backend_request_of(kind, body),
        scope=scope,
        force=body.force,
        max_parallel=body.max_parallel,
        by=by,
        rollout=rollout,
    )


def backend_request_of(kind: OperationKind, body: BackendBody) -> BackendRequest:
    """With a uri `name` is the name of the backend; without one the backend has its name in the gallery."""
    backend = body.backend or body.id
    if not body.uri:
        if body.name or body.alias:
            raise Invalid("name and alias go with a uri: what comes from a gallery has its own")
        return BackendRequest(backend, galleries=galleries_of(body.backend_galleries))
    if kind is not OperationKind.INSTALL:
        raise Invalid("a uri is for installing; say which backend by its name")
    return BackendRequest(backend=body.name or backend, uri=body.uri, alias=body.alias)


def galleries_of(given: object) -> str:
    """An array of galleries as JSON text (the wire format); any other value is ignored."""
    try:
        read = msgspec.json.decode(given) if isinstance(given, str) and given else given
    except (msgspec.DecodeError, RecursionError):
        return ""
    if not isinstance(read, list) or not all(isinstance(each, dict) and each.get("url") for each in read):
        return ""
    return msgspec.json.encode(read).decode() if read else ""


async def answer_job(
    operations: Operations, operation_request: OperationRequest, *, plan: bool, status: int
) -> Response[JobAccepted | PlanView]:
    """`{jobID, statusUrl, message}`: the format of the page and of the nodes' routes."""
    if plan:
        return Response(await operations.plan(operation_request), status_code=200)
    return Response(await accept(operations, operation_request), status_code=status)


async def accept(operations: Operations, operation_request: OperationRequest) -> JobAccepted:
    accepted = await operations.accept(operation_request)
    name = operation_request.backend_request.backend or operation_request.backend_request.uri
    status_url = f"/api/backends/job/{accepted.operation_id}"
    if accepted.unchanged:
        return JobAccepted(accepted.operation_id, accepted.unchanged, status_url, unchanged=True)
    words = (
        f"{_DOING[operation_request.kind]} of {name} is already under way"
        if accepted.joined
        else (f"{_DOING[operation_request.kind]} of {name} started")
    )
    return JobAccepted(accepted.operation_id, words, status_url, accepted.joined)


def not_done_yet(job: JobAccepted, view: OperationView, words: str) -> Response[JobAccepted]:
    """202 for a client that waited for the end, with the state of each node."""
    unfinished = msgspec.structs.replace(job, message=f"accepted, not done yet: {words}", nodes=view.nodes)
    return Response(unfinished, status_code=202)


async def answer_backend_job(
    request: AnyRequest, operations: Operations, operation_request: OperationRequest, *, plan: bool
) -> Response[BackendJob | PlanView]:
    """`{id, status_url}`: the format under `/backends/`."""
    if plan:
        return Response(await operations.plan(operation_request), status_code=200)
    accepted = await operations.accept(operation_request)
    return Response(BackendJob(accepted.operation_id, _here(request, f"/backends/jobs/{accepted.operation_id}")))


def _check_text(field: str, text: str, most: int) -> None:
    if len(text) > most:
        raise Invalid(f"{field} is longer than {most} characters")
    if any(ord(letter) < 0x20 or ord(letter) == 0x7F for letter in text):
        raise Invalid(f"{field} must not hold control characters")


def _here(request: AnyRequest, path: str) -> str:
    """An absolute URL, with the host by which the client reached us."""
    scheme = request.headers.get("x-forwarded-proto", request.url.scheme)
    host = request.headers.get("x-forwarded-host") or request.headers.get("host") or ""
    return f"{scheme}://{host}{path}" if host else path


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
        found = await operations.list_views(everything=all, limit=limit, after=after, rows=rows, loads=True)
        return OperationList(tuple(found))

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
