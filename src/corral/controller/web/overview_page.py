"""`/`: the start page. What needs a person, what goes on, the last requests."""

from __future__ import annotations

from litestar import get

from corral.controller.api.auth import viewers
from corral.controller.api.overview import Overview
from corral.controller.gateways.receipts import ReceiptService
from corral.controller.operations.service import Operations
from corral.controller.web.attention import attention_of
from corral.controller.web.navigation import OVERVIEW
from corral.controller.web.operations import running_of
from corral.controller.web.page_context import Page, PageContext, Shown
from corral.controller.web.requests import request_lines

_REQUESTS_SHOWN = 8
_OPERATIONS_SHOWN = 6


async def _fill(context: PageContext, overview: Overview, operations: Operations, receipts: ReceiptService) -> Shown:
    cluster, nodes = await overview.read_with_nodes()
    running, more = running_of(await operations.list_views(rows=False), context.now(), _OPERATIONS_SHOWN)
    latest = await receipts.list_views(
        limit=_REQUESTS_SHOWN, failed=False, model="", key="", node="", since=None, before=""
    )
    return {
        "cluster": cluster,
        "attention": attention_of(nodes, cluster.notices, context.now()),
        "running": running,
        "running_more": more,
        "latest": request_lines(latest.requests, context.now()),
        "has_nodes": bool(nodes),
    }


@get(OVERVIEW)
async def overview_page(
    context: PageContext, overview: Overview, operations: Operations, receipts: ReceiptService
) -> Page:
    return await context.page(
        "overview.html", OVERVIEW, "/page/overview", lambda: _fill(context, overview, operations, receipts)
    )


@get("/page/overview", guards=[viewers])
async def overview_part(
    context: PageContext, overview: Overview, operations: Operations, receipts: ReceiptService
) -> Page:
    return await context.part("overview_part.html", lambda: _fill(context, overview, operations, receipts))


PAGES = (overview_page,)
PARTS = (overview_part,)
