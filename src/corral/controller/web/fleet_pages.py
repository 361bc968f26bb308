"""`/`, `/fleet/backends`, `/fleet/operations`, and the parts of them that their scripts fetch again. They read what the
admin API reads, and fill a page."""

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
from corral.controller.web.inside import Inside, Page, Shown
from corral.controller.web.looks import Look
from corral.controller.web.matrix import matrix_of
from corral.controller.web.operations import blank_line, blank_node_line, lines_of, past_of
from corral.controller.web.rows import STATUSES, blank_row, rows_of
from corral.controller.web.words import ago, parse_moment

BACKENDS = "/fleet/backends"
OPERATIONS = "/fleet/operations"
_ROWS = 200  # drawn by the server; the script brings the rest, and without it there is a link


@get("/")
async def fleet(inside: Inside, overview: Overview, after: str = "") -> Page:
    async def fill() -> Shown:
        cluster, views = await overview.read_with_nodes()
        attention = attention_of(views, cluster.notices, inside.now())
        return {"cluster": cluster, "attention": attention, **_table(views, after, inside)}

    return await inside.page("fleet.html", "/", "/page/overview", fill)


@get(BACKENDS)
async def backends(inside: Inside, installed: BackendViews, gallery_status: GalleryStatus, look: Look) -> Page:
    part = f"/page/backends{look.query()}"
    return await inside.page("backends.html", BACKENDS, part, lambda: _matrix(installed, gallery_status, look, inside))


@get(OPERATIONS)
async def operations_page(inside: Inside, operations: Operations) -> Page:
    async def fill() -> Shown:
        lines = lines_of(await operations.list_views(), inside.now())
        blanks = {"blank": blank_line(), "blank_node": blank_node_line()}
        return {"lines": lines, **blanks, **await _history(operations, inside)}

    return await inside.page("operations.html", OPERATIONS, "/page/operations", fill)


@get("/page/overview", guards=[viewers])
async def overview_part(inside: Inside, overview: Overview) -> Page:
    """What stands above the table of nodes."""

    async def fill() -> Shown:
        cluster, views = await overview.read_with_nodes()
        return {"cluster": cluster, "attention": attention_of(views, cluster.notices, inside.now())}

    return await inside.part("overview.html", fill)


@get("/page/backends", guards=[viewers])
async def backends_part(inside: Inside, installed: BackendViews, gallery_status: GalleryStatus, look: Look) -> Page:
    return await inside.part("backends_part.html", lambda: _matrix(installed, gallery_status, look, inside))


@get("/page/operations", guards=[viewers])
async def operations_part(inside: Inside, operations: Operations) -> Page:
    return await inside.part("operations_part.html", lambda: _history(operations, inside))


async def _matrix(installed: BackendViews, gallery_status: GalleryStatus, look: Look, inside: Inside) -> Shown:
    shown = matrix_of(await installed.matrix(), look)
    checked = ago(parse_moment(shown.checked_at), inside.now())
    return {"matrix": shown, "checked": checked, "notices": gallery_status.notices(BACKEND_GALLERIES)}


async def _history(operations: Operations, inside: Inside) -> Shown:
    return {"past": past_of(await operations.history(), inside.now())}


def _table(views: list[NodeView], after: str, inside: Inside) -> Shown:
    rest = [view for view in views if view.name > after]
    shown = rest[:_ROWS]
    return {
        "rows": rows_of(shown, inside.now()),
        "blank": blank_row(),
        "total": len(views),
        "counts": {status: sum(view.status == status for view in views) for status in STATUSES},
        "after": shown[-1].name if len(rest) > _ROWS else "",
    }


PAGES = (fleet, backends, operations_page)
PARTS = (overview_part, backends_part, operations_part)
