"""`/api/requests`: the receipts of requests for models, as users see them."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from litestar import get
from litestar.params import Parameter

from corral.contract.receipts import RequestList
from corral.controller.api.auth import viewers
from corral.controller.gateways.receipts import ReceiptService
from corral.kit.errors import Invalid

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


ROUTES: tuple[Any, ...] = (list_requests,)
