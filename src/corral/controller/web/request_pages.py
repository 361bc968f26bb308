"""`/fleet/requests`: requests for models with filters in the address, those under way, and one of them whole."""

from __future__ import annotations

from typing import Annotated

from litestar import get
from litestar.di import Provide
from litestar.exceptions import HTTPException
from litestar.params import Parameter

from corral.contract.receipts import is_failure
from corral.controller.api.auth import viewers
from corral.controller.gateways.receipts import ReceiptService
from corral.controller.gateways.running import RunningRequests
from corral.controller.replicas.listing import ReplicaListing
from corral.controller.web.navigation import REQUESTS
from corral.controller.web.page_context import Page, PageContext, Shown
from corral.controller.web.requests import (
    SINCE,
    STATUS_CLASSES,
    RequestFilter,
    facts_of,
    in_flight_rows,
    request_lines,
    running_lines,
)
from corral.controller.web.words import ago, parse_moment

_SHOWN = 50
Text = Annotated[str, Parameter(max_length=255)]


@get(REQUESTS)
async def requests_page(
    context: PageContext,
    receipts: ReceiptService,
    running: RunningRequests,
    replica_rows: ReplicaListing,
    request_filters: RequestFilter,
) -> Page:
    part = f"/page/requests{request_filters.query()}"
    return await context.page(
        "requests.html", REQUESTS, part, lambda: _requests(receipts, running, replica_rows, request_filters, context)
    )


@get("/page/requests", guards=[viewers])
async def requests_part(
    context: PageContext,
    receipts: ReceiptService,
    running: RunningRequests,
    replica_rows: ReplicaListing,
    request_filters: RequestFilter,
) -> Page:
    return await context.part(
        "requests_part.html", lambda: _requests(receipts, running, replica_rows, request_filters, context)
    )


@get(f"{REQUESTS}/{{request_id:str}}")
async def request_page(context: PageContext, receipts: ReceiptService, request_id: str, at: Text = "") -> Page:
    async def fill() -> Shown:
        moment = parse_moment(at)
        found = await receipts.find_at(request_id, moment) if moment else None
        if found is None:
            raise HTTPException(status_code=404, detail="There is no such request, or its receipt was deleted by now.")
        failed = is_failure(found.status, found.ending)
        return {"request": found, "failed": failed, "facts_list": facts_of(found), "when": ago(moment, context.now())}

    return await context.page("request.html", REQUESTS, "", fill)


async def _requests(
    receipts: ReceiptService,
    running: RunningRequests,
    replica_rows: ReplicaListing,
    wanted: RequestFilter,
    context: PageContext,
) -> Shown:
    now = context.now()
    in_progress = await running.list_views(model=wanted.model, key=wanted.key, node=wanted.node)
    found = await receipts.list_views(
        limit=_SHOWN,
        failed=wanted.failed,
        status=wanted.status,
        model=wanted.model,
        key=wanted.key,
        node=wanted.node,
        since=wanted.since_moment(now),
        before=wanted.before,
    )
    return {
        "lines": request_lines(found.requests, now),
        "running": running_lines(in_progress.requests),
        "running_more": in_progress.total - len(in_progress.requests),
        # Without reports of the gateways: what nodes count.
        "in_flight": () if in_progress.total else in_flight_rows(await replica_rows.list_(), wanted),
        "filters": wanted,
        "older": found.next,
        "spans": tuple(SINCE),
        "status_classes": STATUS_CLASSES,
    }


async def _filters(
    model: Text = "",
    key: Text = "",
    node: Text = "",
    since: Text = "",
    failed: bool = False,
    status: Text = "",
    before: Annotated[str, Parameter(max_length=300)] = "",
) -> RequestFilter:
    return RequestFilter(
        model, key, node, since if since in SINCE else "", failed, RequestFilter.read_status(status.strip()), before
    )


PAGES = (requests_page, request_page)
PARTS = (requests_part,)
DEPENDENCIES = {"request_filters": Provide(_filters)}
