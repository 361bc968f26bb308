"""Responses that the ingress makes itself; errors are JSON."""

from __future__ import annotations

from corral.contract.codec import encode
from corral.contract.http import Headers, Responder

TEXT: Headers = ((b"content-type", b"text/plain; charset=utf-8"),)
JSON: Headers = ((b"content-type", b"application/json"),)
_CHALLENGE: Headers = (*JSON, (b"www-authenticate", b"Bearer"))
READING = (b"GET", b"HEAD")


async def send_wrong_method(responder: Responder) -> int:
    body = encode({"error": {"code": 405, "message": "only GET and HEAD are served here", "type": "invalid"}})
    await responder.send(405, (*JSON, (b"allow", b"GET, HEAD")), body)
    return 405


async def send_error(responder: Responder, status: int, message: str, kind: str, more: Headers = ()) -> int:
    body = encode({"error": {"code": status, "message": message, "type": kind}})
    await responder.send(status, (*(_CHALLENGE if status == 401 else JSON), *more), body)
    return status


async def send_upstream_failed(responder: Responder, status: int, message: str, more: Headers = ()) -> int:
    """An error of a process reaches the client of a model: in OpenAI's format, like the gateway's errors."""
    error = {"message": message, "type": "server_error", "param": None, "code": "upstream_failed"}
    await responder.send(status, (*JSON, *more), encode({"error": error}))
    return status
