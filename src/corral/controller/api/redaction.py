"""No answer that people see carries the user and password of a URL: not the API's, not the page's, not an error's.

Definitions, galleries, operations, inventories and messages of nodes all may have such URLs, so they are redacted once,
where answers leave. What workers and gateways need in order to work is left as it is.
"""

from __future__ import annotations

from typing import Any

from litestar.enums import ScopeType
from litestar.types import ASGIApp, Receive, Scope, Send

from corral.kit.redact import redact_url_bytes

_FOR_PROCESSES = ("/api/node/", "/internal/view", "/internal/gateway/")
_SHOWN_TYPES = (b"application/json", b"text/html", b"text/event-stream", b"text/plain", b"application/problem+json")


class Redaction:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != ScopeType.HTTP or scope["path"].startswith(_FOR_PROCESSES):
            await self._app(scope, receive, send)
            return
        held: Any = None
        is_shown = False

        async def redacted(message: Any) -> None:
            """A head with a length waits for its body, which redaction may shorten. A stream's pieces (whole events)
            are redacted one by one."""
            nonlocal held, is_shown
            if message["type"] == "http.response.start":
                is_shown = _header(message, b"content-type").startswith(_SHOWN_TYPES)
                if is_shown and _header(message, b"content-length"):
                    held = message
                    return
            elif message["type"] == "http.response.body" and is_shown:
                body = message.get("body", b"")
                message = {**message, "body": redact_url_bytes(body)}
                if held is not None:
                    await send(_with_length(held, len(message["body"])) if message["body"] != body else held)
                    held = None
            await send(message)

        await self._app(scope, receive, redacted)


def _header(start: Any, wanted: bytes) -> bytes:
    return next((bytes(value) for name, value in start.get("headers", ()) if name.lower() == wanted), b"")


def _with_length(start: Any, length: int) -> Any:
    headers = [
        (name, str(length).encode() if name.lower() == b"content-length" else value) for name, value in start["headers"]
    ]
    return {**start, "headers": headers}
