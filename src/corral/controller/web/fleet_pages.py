"""`/`, `/fleet/backends`, `/fleet/operations`, and the parts of them that their scripts fetch again. They ask who it
is, read what the admin API reads, fill a page."""

from __future__ import annotations

from typing import Annotated, Any

from litestar import Response, get
from litestar.params import Parameter

from corral.contract.admin import Cluster, NodeView
from corral.controller.access.keys import Access
from corral.controller.access.principal import Principal, Role
from corral.controller.api.auth import SESSION_COOKIE, principal_of, viewers
from corral.controller.operations.installed import InstalledBackends
from corral.controller.operations.service import Operations
from corral.controller.overview import Overview
from corral.controller.web import door as doors
from corral.controller.web.attention import attention_of, facts_of
from corral.controller.web.door import AnyRequest, Door
from corral.controller.web.matrix import Look, matrix_of
from corral.controller.web.operations import blank_line, blank_node_line, lines_of, past_of, work_of
from corral.controller.web.pages import load_pages, see_other, trouble
from corral.controller.web.rows import STATUSES, blank_row, rows_of
from corral.controller.web.words import ago, parse_moment

ENDED = "/login?why=ended"
BACKENDS = "/fleet/backends"
OPERATIONS = "/fleet/operations"
_ROWS = 200  # drawn by the server; the script brings the rest, and without it there is a link
Page = Response[str] | Response[bytes]
Only = Annotated[str, Parameter(max_length=20)]
Find = Annotated[str, Parameter(max_length=255)]
At = Annotated[int, Parameter(ge=0, le=1_000_000)]


@get("/")
async def fleet(
    request: AnyRequest, access: Access, overview: Overview, operations: Operations, door: Door, after: str = ""
) -> Page:
    who = await doors.signed_in(request, access)
    if who is None:
        return send_away(request, "/")
    cluster, views = await overview.read_with_nodes()
    common = await _common(who, cluster, operations, door)
    attention = attention_of(views, cluster.notices, door.now())
    return load_pages().page(
        "fleet.html", here="/", part="/page/overview", attention=attention, **common, **_table(views, after, door)
    )


@get(BACKENDS)
async def backends(
    request: AnyRequest,
    access: Access,
    overview: Overview,
    operations: Operations,
    installed: InstalledBackends,
    door: Door,
    only: Only = "",
    find: Find = "",
    at: At = 0,
) -> Page:
    who = await doors.signed_in(request, access)
    if who is None:
        return send_away(request, BACKENDS)
    look = Look(only, find, at)
    common = await _common(who, await overview.read(), operations, door)
    shown = await _matrix(installed, look, door)
    part = f"/page/backends{look.query()}"
    return load_pages().page("backends.html", here=BACKENDS, part=part, **common, **shown)


@get(OPERATIONS)
async def operations_page(
    request: AnyRequest, access: Access, overview: Overview, operations: Operations, door: Door
) -> Page:
    who = await doors.signed_in(request, access)
    if who is None:
        return send_away(request, OPERATIONS)
    views = await operations.list_views()
    common = await _common(who, await overview.read(), operations, door)
    return load_pages().page(
        "operations.html",
        here=OPERATIONS,
        part="/page/operations",
        lines=lines_of(views, door.now()),
        blank=blank_line(),
        blank_node=blank_node_line(),
        **common,
        **await _history(operations, door),
    )


@get("/page/overview", guards=[viewers])
async def overview_part(request: AnyRequest, overview: Overview, door: Door) -> Page:
    """What stands above the table of nodes."""
    cluster, views = await overview.read_with_nodes()
    attention = attention_of(views, cluster.notices, door.now())
    who = principal_of(request)
    return load_pages().page("overview.html", attention=attention, **_head(who, cluster, door))


@get("/page/backends", guards=[viewers])
async def backends_part(
    request: AnyRequest,
    overview: Overview,
    installed: InstalledBackends,
    door: Door,
    only: Only = "",
    find: Find = "",
    at: At = 0,
) -> Page:
    shown = await _matrix(installed, Look(only, find, at), door)
    head = _head(principal_of(request), await overview.read(), door)
    return load_pages().page("backends_part.html", **head, **shown)


@get("/page/operations", guards=[viewers])
async def operations_part(request: AnyRequest, overview: Overview, operations: Operations, door: Door) -> Page:
    head = _head(principal_of(request), await overview.read(), door)
    return load_pages().page("operations_part.html", **head, **await _history(operations, door))


def send_away(request: AnyRequest, wanted: str) -> Page:
    if SESSION_COOKIE in request.cookies:
        response = see_other(ENDED)
        doors.drop_session(response)
        return response
    # A strict cookie stays at home when somebody follows a link from another site. Our own page asking again brings it.
    if request.headers.get("sec-fetch-site") == "cross-site" and "again" not in request.query_params:
        return trouble(200, "One moment", "Opening Corral.", refresh=f"0; url={wanted}?again")
    return see_other("/login" if wanted == "/" else f"/login?next={wanted}")


def _head(who: Principal, cluster: Cluster, door: Door) -> dict[str, Any]:
    now = door.now()
    return {"who": who, "admin": who.role is Role.ADMIN, "now": now.isoformat(), "facts": facts_of(cluster)}


async def _common(who: Principal, cluster: Cluster, operations: Operations, door: Door) -> dict[str, Any]:
    work, more = work_of(await operations.list_views(rows=False))
    return _head(who, cluster, door) | {"work": work, "work_more": more}


async def _matrix(installed: InstalledBackends, look: Look, door: Door) -> dict[str, Any]:
    shown = matrix_of(await installed.matrix(), look)
    return {"matrix": shown, "checked": ago(parse_moment(shown.checked_at), door.now())}


async def _history(operations: Operations, door: Door) -> dict[str, Any]:
    return {"past": past_of(await operations.history(), door.now())}


def _table(views: list[NodeView], after: str, door: Door) -> dict[str, Any]:
    rest = [view for view in views if view.name > after]
    shown = rest[:_ROWS]
    return {
        "rows": rows_of(shown, door.now()),
        "blank": blank_row(),
        "total": len(views),
        "counts": {status: sum(view.status == status for view in views) for status in STATUSES},
        "after": shown[-1].name if len(rest) > _ROWS else "",
    }
