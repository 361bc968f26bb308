"""A request about backends, from its body to the operation that it becomes: shared by all routes of backends."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from litestar import Request, Response
from litestar.params import Parameter

from corral.contract.admin import BackendBody, BackendJob, JobAccepted, OperationView, PlanView
from corral.controller.api.auth import principal_of
from corral.controller.operations.requests import OperationKind, OperationRequest, parse_request
from corral.controller.operations.service import Operations
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


async def read_operation_request(
    request: AnyRequest, operations: Operations, kind: OperationKind, body: BackendBody
) -> OperationRequest:
    """Raises Invalid for what cannot be meant, NotFound for a node that is not there."""
    # With no backend or uri at all there is nothing to look a node up for.
    if not (body.backend or body.id or body.uri):
        raise Invalid("name a backend, or give a uri")
    _check_text("node", body.node, _NODE_MAX)
    _check_text("selector", body.selector, _SELECTOR_MAX)
    scope = await operations.scope(node=body.node, selector=body.selector)
    by = principal_of(request).name
    return parse_request(
        kind, backend_request_of(kind, body), scope=scope, force=body.force, max_parallel=body.max_parallel, by=by
    )


def backend_request_of(kind: OperationKind, body: BackendBody) -> BackendRequest:
    """With a uri the backend's own name is `name`; without one it is what the gallery calls it."""
    backend = body.backend or body.id
    if not body.uri:
        if body.name or body.alias:
            raise Invalid("name and alias go with a uri: what comes from a gallery has its own")
        return BackendRequest(backend, galleries=galleries_of(body.backend_galleries))
    if kind is not OperationKind.INSTALL:
        raise Invalid("a uri is for installing; say which backend by its name")
    return BackendRequest(backend=body.name or backend, uri=body.uri, alias=body.alias)


def galleries_of(given: object) -> str:
    """The contract: an array of galleries as JSON text; whatever is not that is ignored."""
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
    """`{jobID, statusUrl, message}`: the family the pages and the nodes' routes speak."""
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
    """202, for whoever waited for the end: with how it stands on each node."""
    unfinished = msgspec.structs.replace(job, message=f"accepted, not done yet: {words}", nodes=view.nodes)
    return Response(unfinished, status_code=202)


async def answer_backend_job(
    request: AnyRequest, operations: Operations, operation_request: OperationRequest, *, plan: bool
) -> Response[BackendJob | PlanView]:
    """`{id, status_url}`: the family under `/backends/`."""
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
    """Absolute, as the contract has it, and as the caller reached us."""
    scheme = request.headers.get("x-forwarded-proto", request.url.scheme)
    host = request.headers.get("x-forwarded-host") or request.headers.get("host") or ""
    return f"{scheme}://{host}{path}" if host else path
