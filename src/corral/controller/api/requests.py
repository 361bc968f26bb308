"""`/api/requests`: the receipts of requests for models, as users see them."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from litestar import Request, get
from litestar.params import Parameter

from corral.contract.receipts import RequestList, RunningList
from corral.controller.access.principal import Role
from corral.controller.api.auth import anybody_known, principal_of, viewers
from corral.controller.gateways.receipts import ReceiptService
from corral.controller.gateways.running import RunningRequests
from corral.kit.errors import Invalid

_FIRST_WAIT_S = 0.7  # for the first reports of the gateways
FLEET_ROLES = (Role.ADMIN, Role.VIEWER)
Limit = Annotated[int, Parameter(ge=1, le=1000, description="Maximum number of entries")]
Before = Annotated[str, Parameter(max_length=300, description="Continue here: the `next` of the previous page")]
Since = Annotated[datetime | None, Parameter(description="Only requests since this time (RFC 3339)")]
OfModel = Annotated[str, Parameter(max_length=255, description="Only requests for this model, or answered by it")]
OfKey = Annotated[str, Parameter(max_length=255, description="Only requests of this key, by id or name")]
OnNode = Annotated[str, Parameter(max_length=255, description="Only requests answered by this node, by id or name")]
Failed = Annotated[bool, Parameter(description="Only requests answered with status 400 or higher")]

Status = Annotated[str, Parameter(max_length=255, description="Only requests with this status: `503`, `4xx`, `5xx`")]


@get(
    "/api/requests",
    guards=[viewers],
    tags=["requests"],
    summary="List requests for models with their outcome, newest first",
)
async def list_requests(
    receipts: ReceiptService,
    limit: Limit = 50,
    before: Before = "",
    since: Since = None,
    model: OfModel = "",
    key: OfKey = "",
    node: OnNode = "",
    failed: Failed = False,
    status: Status = "",
) -> RequestList:
    if since is not None and since.tzinfo is None:
        raise Invalid("since: say in which time zone, like 2026-01-31T12:00:00Z")
    return await receipts.list_views(
        limit=limit, failed=failed, status=status, model=model, key=key, node=node, since=since, before=before
    )


@get(
    "/api/requests/running",
    guards=[anybody_known],
    tags=["requests"],
    summary="List the requests under way, the oldest 200; a key of role inference gets its own",
)
async def list_running(
    request: Request[Any, Any, Any],
    running: RunningRequests,
    model: OfModel = "",
    key: OfKey = "",
    node: OnNode = "",
) -> RunningList:
    who = principal_of(request)
    own = None if who.role in FLEET_ROLES else who.key_id
    return await running.list_views(model=model, key=key, node=node, key_id=own, wait_s=_FIRST_WAIT_S)


ROUTES: tuple[Any, ...] = (list_requests, list_running)
