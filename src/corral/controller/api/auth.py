"""Authenticates every call: by API key, or by web session with its CSRF token. A unix socket grants no rights."""

from __future__ import annotations

import hmac
from typing import Any

import structlog
from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler

from corral.controller.access.keys import Access
from corral.controller.access.principal import Principal, Role, require
from corral.kit.errors import Denied, Unauthenticated

SESSION_COOKIE = "corral_session"
CSRF_HEADER = "x-csrf-token"
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})

Connection = ASGIConnection[Any, Any, Any, Any]


def bearer_of(connection: Connection) -> str | None:
    """The bearer token, or the value of `x-api-key`."""
    scheme, _, value = connection.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and value.strip():
        return value.strip()
    return connection.headers.get("x-api-key") or None


async def authenticate(connection: Connection, access: Access) -> Principal:
    secret = bearer_of(connection)
    if secret is not None:
        return await access.by_key(secret)
    session = connection.cookies.get(SESSION_COOKIE)
    if not session:
        raise Unauthenticated("send an API key as `Authorization: Bearer …`, or sign in on the page")
    principal = await access.by_session(session)
    # A browser sends the cookie with any form, also of a foreign page; only our page can read the CSRF token.
    shown = connection.headers.get(CSRF_HEADER, "")
    if connection.scope.get("method", "GET") not in _SAFE_METHODS and not hmac.compare_digest(
        shown.encode(), principal.csrf.encode()
    ):
        raise Denied("the page is out of date; reload it and try again")
    return principal


async def _guard(connection: Connection, *roles: Role) -> None:
    access: Access = connection.app.state.access
    principal = await authenticate(connection, access)
    require(principal, *roles)
    connection.scope["state"]["principal"] = principal
    structlog.contextvars.bind_contextvars(by=principal.name)  # who deleted that node? The log knows


async def viewers(connection: Connection, _: BaseRouteHandler) -> None:
    await _guard(connection, Role.VIEWER)


async def admins(connection: Connection, _: BaseRouteHandler) -> None:
    await _guard(connection, Role.ADMIN)


async def gateways(connection: Connection, _: BaseRouteHandler) -> None:
    await _guard(connection, Role.GATEWAY)


async def model_users(connection: Connection, _: BaseRouteHandler) -> None:
    """Keys that may use models."""
    await _guard(connection, Role.INFERENCE, Role.ADMIN)


async def anybody_known(connection: Connection, _: BaseRouteHandler) -> None:
    await _guard(connection, *Role)


def principal_of(connection: Connection) -> Principal:
    principal = connection.scope["state"]["principal"]
    assert isinstance(principal, Principal)
    return principal


async def seen_from(connection: Connection, access: Access) -> str:
    """The address of the client. Only a gateway with a valid key may report the address of its client."""
    address = connection.headers.get("x-corral-client", "")
    gateway_key = connection.headers.get("x-corral-gateway", "")
    if address and gateway_key:
        try:
            require(await access.by_key(gateway_key), Role.GATEWAY)
        except (Unauthenticated, Denied):
            return ""
        return address
    return connection.client.host if connection.client else ""
