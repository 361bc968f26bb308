"""One line per request, with the id that follows it from the gateway. No query string, no headers, no secrets."""

from __future__ import annotations

import time
import uuid
from typing import Any

import structlog
from litestar.enums import ScopeType
from litestar.types import ASGIApp, Receive, Scope, Send

from corral.controller.api.path_segments import whole_name
from corral.kit.log import get_log

log = get_log(__name__)

_QUIET = frozenset({"/healthz", "/readyz", "/internal/view"})


class RequestLog:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != ScopeType.HTTP:
            await self._app(scope, receive, send)
            return
        request_id = _header(scope, b"x-request-id") or uuid.uuid4().hex
        status = 500
        started = time.perf_counter()

        async def watched(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id.encode())]
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                await self._app(scope, receive, watched)
            finally:
                took_ms = round((time.perf_counter() - started) * 1000, 1)
                tell = log.debug if status < 500 or scope["path"] in _QUIET else log.warning
                tell("request", method=scope["method"], path=whole_name(scope["path"]), status=status, took_ms=took_ms)


def _header(scope: Any, name: bytes) -> str:
    value = next((value for key, value in scope["headers"] if key == name), b"").decode("latin-1")
    return value if 0 < len(value) <= 128 and value.isprintable() else ""
