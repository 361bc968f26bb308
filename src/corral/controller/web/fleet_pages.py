"""`/nodes`, `/fleet/backends`, `/fleet/operations`, and the parts of them that their scripts fetch again. They read
what the admin API reads, and fill a page."""

from __future__ import annotations

from litestar import get

from corral.contract.admin import NodeView
from corral.controller.api.auth import viewers
from corral.controller.api.overview import Overview
from corral.controller.backends.gallery_status import BACKENDS as BACKEND_GALLERIES
from corral.controller.backends.gallery_status import GalleryStatus
from corral.controller.operations.backend_views import BackendViews
from corral.controller.operations.service import Operations
from corral.controller.web.attention import attention_of
from corral.controller.web.list_filter import ListFilter
from corral.controller.web.matrix import matrix_of
from corral.controller.web.navigation import BACKENDS, NODES, OPERATIONS
from corral.controller.web.operations import blank_line, blank_node_line, lines_of, past_of
from corral.controller.web.page_context import Page, PageContext, Shown
from corral.controller.web.rows import STATUSES, blank_row, rows_of
from corral.controller.web.words import ago, parse_moment

_ROWS = 200  # drawn by the server; the script brings the rest, and without it there is a link


@get(NODES)
async def nodes(context: PageContext, overview: Overview, after: str = "") -> Page:
    async def fill() -> Shown:
        cluster, views = await overview.read_with_nodes()
        attention = attention_of(views, cluster.notices, context.now())
        return {"cluster": cluster, "attention": attention, **_table(views, after, context)}

    return await context.page("nodes.html", NODES, "/page/nodes", fill)


@get(BACKENDS)
async def backends(
    context: PageContext, installed: BackendViews, gallery_status: GalleryStatus, filters: ListFilter
) -> Page:
    part = f"/page/backends{filters.query()}"
    return await context.page(
        "backends.html", BACKENDS, part, lambda: _matrix(installed, gallery_status, filters, context)
    )


@get(OPERATIONS)
async def operations_page(context: PageContext, operations: Operations) -> Page:
    async def fill() -> Shown:
        lines = lines_of(await operations.list_views(), context.now())
        blanks = {"blank": blank_line(), "blank_node": blank_node_line()}
        return {"lines": lines, **blanks, **await _history(operations, context)}

    return await context.page("operations.html", OPERATIONS, "/page/operations", fill)


@get("/page/nodes", guards=[viewers])
async def nodes_part(context: PageContext, overview: Overview) -> Page:
    """What stands above the table of nodes."""

    async def fill() -> Shown:
        cluster, views = await overview.read_with_nodes()
        return {"cluster": cluster, "attention": attention_of(views, cluster.notices, context.now())}

    return await context.part("nodes_part.html", fill)


@get("/page/backends", guards=[viewers])
async def backends_part(
    context: PageContext, installed: BackendViews, gallery_status: GalleryStatus, filters: ListFilter
) -> Page:
    return await context.part("backends_part.html", lambda: _matrix(installed, gallery_status, filters, context))


@get("/page/operations", guards=[viewers])
async def operations_part(context: PageContext, operations: Operations) -> Page:
    return await context.part("operations_part.html", lambda: _history(operations, context))


async def _matrix(
    installed: BackendViews, gallery_status: GalleryStatus, filters: ListFilter, context: PageContext
) -> Shown:
    shown = matrix_of(await installed.matrix(), filters)
    checked = ago(parse_moment(shown.checked_at), context.now())
    return {"matrix": shown, "checked": checked, "notices": gallery_status.notices(BACKEND_GALLERIES)}


async def _history(operations: Operations, context: PageContext) -> Shown:
    return {"past": past_of(await operations.history(), context.now())}


def _table(views: list[NodeView], after: str, context: PageContext) -> Shown:
    rest = [view for view in views if view.name > after]
    shown = rest[:_ROWS]
    return {
        "rows": rows_of(shown, context.now()),
        "blank": blank_row(),
        "total": len(views),
        "counts": {status: sum(view.status == status for view in views) for status in STATUSES},
        "after": shown[-1].name if len(rest) > _ROWS else "",
    }


PAGES = (nodes, backends, operations_page)
PARTS = (nodes_part, backends_part, operations_part)
