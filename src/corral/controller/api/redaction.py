"""No answer that people see carries a secret of a URL: not the API's, not the page's, not an error's.

Definitions, galleries, operations, inventories and messages of nodes all may have such URLs, so they are redacted once,
where answers leave. What workers and gateways need in order to work is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from litestar.enums import ScopeType
from litestar.types import ASGIApp, Receive, Scope, Send

from corral.kit.redact import redact_url_bytes

_FOR_PROCESSES = ("/api/node/", "/internal/view", "/internal/gateway/")
_SHOWN_TYPES = (b"application/json", b"text/html", b"text/event-stream", b"text/plain", b"application/problem+json")


_LINES_TYPE = b"application/x-ndjson"
_MAX_LINE = 1024 * 1024  # a longer one is redacted in parts


class Redaction:
    """For HTTP; `redacted_frames.py` redacts WebSockets."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != ScopeType.HTTP or scope["path"].startswith(_FOR_PROCESSES):
            await self._app(scope, receive, send)
            return
        held: Any = None
        redact: Callable[[bytes, bool], bytes] | None = None

        async def redacted(message: Any) -> None:
            """A head with a length waits for its body, which redaction may shorten. A stream's pieces (whole events)
            are redacted one by one, lines when they are whole."""
            nonlocal held, redact
            if message["type"] == "http.response.start":
                redact = _redactor(_header(message, b"content-type"))
                if redact is not None and _header(message, b"content-length"):
                    held = message
                    return
            elif message["type"] == "http.response.body" and redact is not None:
                body, more = message.get("body", b""), message.get("more_body", False)
                message = {**message, "body": redact(body, more)}
                if held is not None:
                    await send(_with_length(held, len(message["body"])) if message["body"] != body else held)
                    held = None
            await send(message)

        await self._app(scope, receive, redacted)


def _redactor(content_type: bytes) -> Callable[[bytes, bool], bytes] | None:
    """Takes a piece of the body and whether there are more. None: bodies of this type are left as they are."""
    if content_type.startswith(_LINES_TYPE):
        return LineRedactor()
    return (lambda body, _: redact_url_bytes(body)) if content_type.startswith(_SHOWN_TYPES) else None


class LineRedactor:
    """Gives whole lines: pieces are as the network cut them, perhaps in the middle of a URL."""

    def __init__(self) -> None:
        self._kept = b""

    def __call__(self, piece: bytes, more: bool) -> bytes:
        text = self._kept + piece
        end = text.rfind(b"\n") + 1
        if not more or len(text) - end > _MAX_LINE:
            end = len(text)
        self._kept = text[end:]
        return redact_url_bytes(text[:end])


def _header(start: Any, wanted: bytes) -> bytes:
    return next((bytes(value) for name, value in start.get("headers", ()) if name.lower() == wanted), b"")


def _with_length(start: Any, length: int) -> Any:
    headers = [
        (name, str(length).encode() if name.lower() == b"content-length" else value) for name, value in start["headers"]
    ]
    return {**start, "headers": headers}
