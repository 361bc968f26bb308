"""Signing in and out on the page: cookies, the form's token, how often one may try. Rights are `access`'s business."""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import parse_qsl

from litestar import Request, Response
from litestar.datastructures import Cookie

from corral.controller.access.keys import Access
from corral.controller.access.principal import Principal
from corral.controller.api.auth import SESSION_COOKIE, seen_from
from corral.controller.web.attempts import Attempts
from corral.kit.clock import Clock
from corral.kit.errors import Unauthenticated
from corral.kit.log import get_log

log = get_log(__name__)

AnyRequest = Request[Any, Any, Any]
FORM_COOKIE = "corral_form"
LARGEST_FORM = 16 * 1024


@dataclass(frozen=True)
class SignedIn:
    secret: str
    principal: Principal


@dataclass(frozen=True)
class SignInRefused:
    status: int
    sentence: str
    retry_after_s: float = 0.0


class SignIn:
    def __init__(self, clock: Clock, attempts: Attempts | None = None) -> None:
        self._clock = clock
        self._attempts = attempts or Attempts()

    def now(self) -> datetime:
        return self._clock.now()

    async def sign_in(self, request: AnyRequest, access: Access, form: dict[str, str]) -> SignedIn | SignInRefused:
        if not is_our_form(request, form):
            return SignInRefused(403, "This form was not made for this browser, or cookies are off. Please try again.")
        address = await seen_from(request, access)
        wait_s = self._attempts.spend(address, self._clock.monotonic())
        if wait_s > 0:
            return SignInRefused(429, f"Too many tries. Wait {max(1, round(wait_s))} s, then try again.", wait_s)
        key = form.get("key", "").strip()
        try:
            if not key:
                raise Unauthenticated("enter an API key")
            secret, principal = await access.open_session(key)
        except Unauthenticated as error:
            log.warning("sign-in refused", address=address, reason=error.message)
            return SignInRefused(401, _sentence(error.message))
        self._attempts.give_back(address)
        # Whoever was signed in here before is not any more: a session never outlives a change of person.
        before = await signed_in(request, access)
        if before is not None:
            await access.close_session(before)
        log.info("signed in", address=address, key=principal.name, role=principal.role.value)
        return SignedIn(secret, principal)


async def signed_in(request: AnyRequest, access: Access) -> Principal | None:
    """Who this browser is; None without a session, or when it has ended."""
    session = request.cookies.get(SESSION_COOKIE)
    if not session:
        return None
    try:
        return await access.by_session(session)
    except Unauthenticated:
        return None


async def read_form(request: AnyRequest) -> dict[str, str]:
    """The fields of a posted form; nothing from what is none."""
    try:
        return dict(parse_qsl((await request.body()).decode(), max_num_fields=10))
    except ValueError:
        return {}


def form_token(request: AnyRequest) -> str:
    """What the form must show and the cookie must match. Kept while the browser has one, so two open tabs both work.

    The address a form came from is no help here: under `Referrer-Policy: no-referrer` browsers send `Origin: null`.
    """
    known = request.cookies.get(FORM_COOKIE, "")
    return known if 32 <= len(known) <= 64 and known.isascii() else secrets.token_hex(16)


def is_our_form(request: AnyRequest, form: dict[str, str]) -> bool:
    if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return False
    cookie, shown = request.cookies.get(FORM_COOKIE, ""), form.get("form", "")
    return len(cookie) >= 32 and hmac.compare_digest(cookie.encode(), shown.encode())


def is_secure(request: AnyRequest) -> bool:
    """The gateway says how the client came; whoever lies about it here harms nobody's cookie but their own."""
    return request.headers.get("x-forwarded-proto", request.url.scheme) == "https"


def is_in_clear(request: AnyRequest) -> bool:
    """Whether the key would cross a network unencrypted."""
    host: str = request.headers.get("x-forwarded-host") or request.headers.get("host") or ""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    try:
        local = ipaddress.ip_address(name).is_loopback
    except ValueError:
        local = name == "localhost" or name.endswith(".localhost")
    return not local and not is_secure(request)


def keep_session(response: Response[Any], request: AnyRequest, secret: str) -> None:
    response.set_cookie(_cookie(SESSION_COOKIE, secret, request))


def keep_form(response: Response[Any], request: AnyRequest, token: str) -> None:
    response.set_cookie(_cookie(FORM_COOKIE, token, request, path="/login"))


def drop_session(response: Response[Any]) -> None:
    response.delete_cookie(SESSION_COOKIE, path="/")


def _cookie(name: str, value: str, request: AnyRequest, *, path: str = "/") -> Cookie:
    return Cookie(key=name, value=value, path=path, httponly=True, samesite="strict", secure=is_secure(request))


def _sentence(message: str) -> str:
    return f"{message[0].upper()}{message[1:]}."
