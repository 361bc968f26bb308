"""`/`, `/login`, `/logout`, `/docs`, `/static/…`. They ask who it is, read what the admin API reads, fill a page."""

from __future__ import annotations

import hmac
from typing import Any, Literal

from litestar import Response, Router, get, post
from litestar.exceptions import HTTPException

from corral.contract.admin import Cluster, NodeView
from corral.controller.access.keys import Access
from corral.controller.access.principal import Principal, Role
from corral.controller.api.auth import SESSION_COOKIE, authenticate, principal_of, viewers
from corral.controller.overview import Overview
from corral.controller.web import door as doors
from corral.controller.web.assets import cache_rule
from corral.controller.web.attention import attention_of, facts_of
from corral.controller.web.door import AnyRequest, Door, Refused
from corral.controller.web.pages import SAFE_HEADERS, load_pages, see_other
from corral.controller.web.reference import read_reference
from corral.controller.web.roles import roles_needed
from corral.controller.web.rows import STATUSES, blank_row, rows_of
from corral.kit.clock import Clock
from corral.kit.errors import CorralError, Denied, Unauthenticated, Unavailable
from corral.kit.log import get_log

log = get_log(__name__)

_ROWS = 200  # drawn by the server; the script brings the rest, and without it there is a link
_ENDED = "/login?why=ended"
_WHY = {"ended": "Your session has ended. Please sign in again.", "out": "You are signed out."}
Page = Response[str] | Response[bytes]


def dependencies(clock: Clock) -> dict[str, Any]:
    """What these doors need besides the services every door has."""
    return {"door": Door(clock)}


@get("/")
async def fleet(request: AnyRequest, access: Access, overview: Overview, door: Door, after: str = "") -> Page:
    who = await doors.signed_in(request, access)
    if who is None:
        return _send_away(request)
    cluster, views = await overview.read_with_nodes()
    above = _overview(who, cluster, views, door)
    return load_pages().page("fleet.html", here="/", **above, **_table(views, after, door))


@get("/page/overview", guards=[viewers])
async def page_overview(request: AnyRequest, overview: Overview, door: Door) -> Page:
    """What stands above the table, for the script."""
    cluster, views = await overview.read_with_nodes()
    return load_pages().page("overview.html", **_overview(principal_of(request), cluster, views, door))


@get("/login")
async def login_form(request: AnyRequest, access: Access, why: str = "", next: str = "/") -> Page:
    if await doors.signed_in(request, access):
        return see_other(_place(next))
    return _login(request, next, sentence=_WHY.get(why, ""))


@post("/login", status_code=200, request_max_body_size=doors.LARGEST_FORM)
async def sign_in(request: AnyRequest, access: Access, door: Door) -> Page:
    form = await doors.read_form(request)
    outcome = await door.sign_in(request, access, form)
    if isinstance(outcome, Refused):
        return _login(request, form.get("next", ""), refused=outcome)
    response = see_other(_place(form.get("next", "")))
    doors.keep_session(response, request, outcome.secret)
    return response


@post("/logout", status_code=200, request_max_body_size=doors.LARGEST_FORM)
async def sign_out(request: AnyRequest, access: Access) -> Page:
    who = await doors.signed_in(request, access)
    if who is not None:
        shown = (await doors.read_form(request)).get("csrf", "")
        if not hmac.compare_digest(shown.encode(), who.csrf.encode()):
            raise Denied("the page is out of date; reload it and try again")
        await access.close_session(who)
        log.info("signed out", key=who.name)
    response = see_other("/login?why=out")
    doors.drop_session(response)
    return response


@get("/docs")
async def reference(request: AnyRequest, access: Access) -> Page:
    try:
        who = await authenticate(request, access)
    except Unauthenticated:
        return see_other("/login?next=/docs")
    base = f"{'https' if doors.is_secure(request) else 'http'}://{request.headers.get('host', 'localhost')}"
    sections, shapes = read_reference(request.app.openapi_schema.to_schema(), roles_needed(request.app.routes), base)
    return load_pages().page("docs.html", here="/docs", who=who, facts=(), sections=sections, shapes=shapes, base=base)


@get("/static/{name:str}", cache_control=None)
async def static_file(request: AnyRequest, name: str, v: str = "") -> Response[bytes]:
    asset = load_pages().assets.find(name)
    if asset is None:
        raise HTTPException(status_code=404)
    tag = f'"{asset.tag}"'
    headers = {**SAFE_HEADERS, "ETag": tag, "Cache-Control": cache_rule(asset, v)}
    if request.headers.get("if-none-match") == tag:
        return Response(b"", status_code=304, headers=headers)
    return Response(asset.content, media_type=asset.media_type, headers=headers)


def _overview(who: Principal, cluster: Cluster, views: list[NodeView], door: Door) -> dict[str, Any]:
    now = door.now()
    return {
        "who": who,
        "admin": who.role is Role.ADMIN,
        "now": now.isoformat(),
        "facts": facts_of(cluster),
        "attention": attention_of(views, cluster.notices, now),
    }


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


def _login(request: AnyRequest, next: str, *, sentence: str = "", refused: Refused | None = None) -> Page:
    token = doors.form_token(request)
    response = load_pages().page(
        "login.html",
        status=refused.status if refused else 200,
        headers={"Retry-After": str(max(1, round(refused.retry_after_s)))} if refused and refused.retry_after_s else {},
        sentence=refused.sentence if refused else sentence,
        bad=refused is not None,
        in_clear=doors.is_in_clear(request),
        form=token,
        next=_place(next),
    )
    doors.keep_form(response, request, token)
    return response


def _send_away(request: AnyRequest) -> Page:
    if SESSION_COOKIE in request.cookies:
        response = see_other(_ENDED)
        doors.drop_session(response)
        return response
    # A strict cookie stays at home when somebody follows a link from another site. Our own page asking again brings it.
    if request.headers.get("sec-fetch-site") == "cross-site" and "again" not in request.query_params:
        return _trouble(200, "One moment", "Opening Corral.", refresh="0; url=/?again")
    return see_other("/login")


def _place(next: str) -> str:
    return next if next in doors.PLACES else "/"


def _on_corral_error(_: AnyRequest, error: CorralError) -> Page:
    if isinstance(error, Unauthenticated):
        return see_other(_ENDED)
    if isinstance(error, Unavailable):
        words = f"Corral is here, but something it needs is not: {error.message}. This page tries again by itself."
        return _trouble(503, "Not ready", words, refresh="5")
    return _trouble(403 if isinstance(error, Denied) else 500, "That did not work", f"{error.message}.")


def _on_http_exception(_: AnyRequest, error: HTTPException) -> Page:
    return _trouble(error.status_code, "That did not work", error.detail or "The request could not be read.")


def _trouble(status: int, title: str, sentence: str, *, refresh: Literal["0; url=/?again", "5", ""] = "") -> Page:
    return load_pages().page(
        "trouble.html", status=status, headers={"Refresh": refresh} if refresh else {}, title=title, sentence=sentence
    )


_pages = Router(
    path="/",
    route_handlers=[fleet, login_form, sign_in, sign_out, reference],
    exception_handlers={CorralError: _on_corral_error, HTTPException: _on_http_exception},
    include_in_schema=False,
)
_parts = Router(path="/", route_handlers=[page_overview, static_file], include_in_schema=False)

ROUTES: tuple[Any, ...] = (_pages, _parts)
