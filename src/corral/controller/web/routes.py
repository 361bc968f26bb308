"""`/login`, `/logout`, `/docs`, `/static/…`, and the list of all pages with what becomes of errors in them."""

from __future__ import annotations

import hmac
from typing import Any

from litestar import Response, Router, get, post
from litestar.exceptions import HTTPException

from corral.controller.access.keys import Access
from corral.controller.api.auth import authenticate
from corral.controller.api.errors import status_of
from corral.controller.web import (
    catalogue_page,
    fleet_pages,
    key_pages,
    log_pages,
    model_page,
    model_pages,
    node_page,
    overview_page,
    playground_page,
    request_pages,
    search_page,
)
from corral.controller.web.assets import cache_rule
from corral.controller.web.navigation import SHORT, is_place, places_for
from corral.controller.web.page_context import DEPENDENCIES, ENDED, Page
from corral.controller.web.pages import SAFE_HEADERS, load_pages, see_other, trouble
from corral.controller.web.reference import read_reference, roles_needed
from corral.controller.web.shared_parts import SharedParts
from corral.controller.web.sign_in import (
    LARGEST_FORM,
    AnyRequest,
    SignIn,
    SignInRefused,
    drop_session,
    form_token,
    is_in_clear,
    is_secure,
    keep_form,
    keep_session,
    read_form,
    signed_in,
)
from corral.kit.clock import Clock
from corral.kit.errors import CorralError, Denied, NotFound, Unauthenticated, Unavailable
from corral.kit.log import get_log

log = get_log(__name__)

_WHY = {"ended": "Your session has ended. Please sign in again.", "out": "You are signed out."}


def dependencies(clock: Clock) -> dict[str, Any]:
    """The services of these routes beside those of the API."""
    return {"sign_in_service": SignIn(clock), "shared_parts": SharedParts(clock)}


@get("/login")
async def login_form(request: AnyRequest, access: Access, why: str = "", next: str = "/") -> Page:
    if await signed_in(request, access):
        return see_other(_place(next))
    return _login(request, next, sentence=_WHY.get(why, ""))


@post("/login", status_code=200, request_max_body_size=LARGEST_FORM)
async def sign_in(request: AnyRequest, access: Access, sign_in_service: SignIn) -> Page:
    form = await read_form(request)
    outcome = await sign_in_service.sign_in(request, access, form)
    if isinstance(outcome, SignInRefused):
        return _login(request, form.get("next", ""), refused=outcome)
    response = see_other(_place(form.get("next", "")))
    keep_session(response, request, outcome.secret)
    return response


@post("/logout", status_code=200, request_max_body_size=LARGEST_FORM)
async def sign_out(request: AnyRequest, access: Access) -> Page:
    who = await signed_in(request, access)
    if who is not None:
        shown = (await read_form(request)).get("csrf", "")
        if not hmac.compare_digest(shown.encode(), who.csrf.encode()):
            raise Denied("the page is out of date; reload it and try again")
        await access.close_session(who)
        log.info("signed out", key=who.name)
    response = see_other("/login?why=out")
    drop_session(response)
    return response


@get("/docs")
async def reference(request: AnyRequest, access: Access) -> Page:
    try:
        who = await authenticate(request, access)
    except Unauthenticated:
        return see_other("/login?next=/docs")
    base = f"{'https' if is_secure(request) else 'http'}://{request.headers.get('host', 'localhost')}"
    sections, shapes = read_reference(request.app.openapi_schema.to_schema(), roles_needed(request.app.routes), base)
    head: dict[str, Any] = {"here": "/docs", "places": places_for(who.role), "who": who, "facts": ()}
    return load_pages().page("docs.html", **head, sections=sections, shapes=shapes, base=base)


@get(list(SHORT), include_in_schema=False)
async def short_address(request: AnyRequest) -> Page:
    """Of a browser only: to a program these addresses are none, as before."""
    if "text/html" not in request.headers.get("accept", ""):
        raise HTTPException(status_code=404)
    query = request.scope["query_string"].decode("latin-1")
    return see_other(f"/fleet{request.url.path}{f'?{query}' if query else ''}")


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


def _login(request: AnyRequest, next: str, *, sentence: str = "", refused: SignInRefused | None = None) -> Page:
    token = form_token(request)
    response = load_pages().page(
        "login.html",
        status=refused.status if refused else 200,
        headers={"Retry-After": str(max(1, round(refused.retry_after_s)))} if refused and refused.retry_after_s else {},
        sentence=refused.sentence if refused else sentence,
        bad=refused is not None,
        in_clear=is_in_clear(request),
        form=token,
        next=_place(next),
    )
    keep_form(response, request, token)
    return response


def _place(next: str) -> str:
    return next if is_place(next) else "/"


def _on_corral_error(_: AnyRequest, error: CorralError) -> Page:
    if isinstance(error, Unauthenticated):
        return see_other(ENDED)
    if isinstance(error, Unavailable):
        words = f"Corral is here, but something it needs is not: {error.message}. This page tries again by itself."
        return trouble(503, "Not ready", words, refresh="5")
    if isinstance(error, NotFound):
        return trouble(404, "Not found", f"{error.message}.")
    return trouble(status_of(error), "That did not work", f"{error.message}.")


def _on_http_exception(_: AnyRequest, error: HTTPException) -> Page:
    words = error.detail or "The request could not be read."
    if error.status_code == 400:  # the framework repeats the whole address, which may be long
        words = "A name or a filter in the address cannot be read."
    return trouble(error.status_code, "That did not work", words)


_GIVEN = {
    **DEPENDENCIES,
    **overview_page.DEPENDENCIES,
    **node_page.DEPENDENCIES,
    **model_page.DEPENDENCIES,
    **search_page.DEPENDENCIES,
    **fleet_pages.DEPENDENCIES,
    **model_pages.DEPENDENCIES,
    **request_pages.DEPENDENCIES,
}
_pages = Router(
    path="/",
    route_handlers=[
        *overview_page.PAGES,
        *node_page.PAGES,
        *model_page.PAGES,
        *search_page.PAGES,
        *fleet_pages.PAGES,
        *model_pages.PAGES,
        *playground_page.PAGES,
        *request_pages.PAGES,
        *log_pages.PAGES,
        *key_pages.PAGES,
        *catalogue_page.PAGES,
        login_form,
        sign_in,
        sign_out,
        reference,
    ],
    dependencies=_GIVEN,
    exception_handlers={CorralError: _on_corral_error, HTTPException: _on_http_exception},
    include_in_schema=False,
)
_parts = Router(
    path="/",
    route_handlers=[
        *overview_page.PARTS,
        *node_page.PARTS,
        *model_page.PARTS,
        *search_page.PARTS,
        *fleet_pages.PARTS,
        *model_pages.PARTS,
        *request_pages.PARTS,
        *key_pages.PARTS,
        short_address,
        static_file,
    ],
    dependencies=_GIVEN,
    include_in_schema=False,
)

ROUTES: tuple[Any, ...] = (_pages, _parts)
