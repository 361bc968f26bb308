"""`/nodes`, `/fleet/backends`, `/fleet/operations`, and the parts of them that their scripts fetch again. They read
what the admin API reads, and fill a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated
from urllib.parse import urlencode

from litestar import get
from litestar.di import Provide
from litestar.params import Parameter

from corral.contract.admin import NodeView
from corral.controller.api.auth import viewers
from corral.controller.api.overview import Overview
from corral.controller.backends.gallery_status import BACKENDS as BACKEND_GALLERIES
from corral.controller.backends.gallery_status import GalleryStatus
from corral.controller.operations.backend_views import BackendViews
from corral.controller.operations.rollouts import Rollouts
from corral.controller.operations.service import Operations
from corral.controller.web.attention import attention_of
from corral.controller.web.list_filter import ListFilter
from corral.controller.web.matrix import matrix_of
from corral.controller.web.navigation import BACKENDS, NODES, OPERATIONS
from corral.controller.web.operations import lines_of, parse_opened, past_of
from corral.controller.web.page_context import Page, PageContext, Shown
from corral.controller.web.rollouts import HEIGHT, SHOWN, WIDTH, rollout_lines
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


class OperationList:
    """What the page of operations shows: those that have not ended, those that ended since the page was opened, and
    the nodes of those that a person opened in it."""

    def __init__(
        self, operations: Operations, rollouts: Rollouts, context: PageContext, opened: Sequence[str], since: str
    ) -> None:
        self._operations = operations
        self._rollouts = rollouts
        self._context = context
        self._opened = parse_opened(opened)
        self.since = parse_moment(since) or context.now()

    def query(self) -> str:
        return "?" + urlencode([("since", self.since.isoformat()), *(("open", str(o)) for o in self._opened.values())])

    async def fill(self) -> Shown:
        views = await self._operations.list_views(ended_since=self.since)
        past = past_of(await self._operations.history(), self._context.now(), {view.job_id for view in views})
        tried = rollout_lines(await self._rollouts.list_views(limit=2 * SHOWN, windows=True), self._context.now())
        drawn = {"rollouts": tried, "width": WIDTH, "height": HEIGHT}
        return {"lines": lines_of(views, self._context.now(), self._opened), "past": past, **drawn}


@get(OPERATIONS)
async def operations_page(context: PageContext, listed: OperationList) -> Page:
    return await context.page("operations.html", OPERATIONS, f"/page/operations{listed.query()}", listed.fill)


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
async def operations_part(context: PageContext, listed: OperationList) -> Page:
    return await context.part("operations_part.html", listed.fill)


@get("/page/work", guards=[viewers])
async def work_part(context: PageContext) -> Page:
    """The strip of what goes on, which every page has."""
    return await context.strip()


async def _matrix(
    installed: BackendViews, gallery_status: GalleryStatus, filters: ListFilter, context: PageContext
) -> Shown:
    shown = matrix_of(await installed.matrix(), filters)
    checked = ago(parse_moment(shown.checked_at), context.now())
    return {"matrix": shown, "checked": checked, "notices": gallery_status.notices(BACKEND_GALLERIES)}


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


async def _operation_list(
    operations: Operations,
    rollouts: Rollouts,
    context: PageContext,
    open: Annotated[list[str] | None, Parameter(max_items=200)] = None,
    since: Annotated[str, Parameter(max_length=40)] = "",
) -> OperationList:
    return OperationList(operations, rollouts, context, open or (), since)


DEPENDENCIES = {"listed": Provide(_operation_list)}
PARTS = (nodes_part, backends_part, operations_part, work_part)
