"""Answers the gateway gives itself: OpenAI's error envelope under `/v1/…`, the house's own elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

from corral.contract.codec import encode
from corral.contract.http import Headers

JSON = (b"content-type", b"application/json")
HTML = (b"content-type", b"text/html; charset=utf-8")
TEXT = (b"content-type", b"text/plain; charset=utf-8")

INVALID = "invalid_request_error"
SERVER = "server_error"


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer, ready to be sent any number of times."""

    status: int
    body: bytes
    headers: Headers = (JSON,)


def openai_error(
    status: int,
    message: str,
    *,
    kind: str = INVALID,
    code: str | None = None,
    param: str | None = None,
    headers: Headers = (),
) -> Answer:
    """`{"error": {"message", "type", "param", "code"}}`: what OpenAI's clients turn into their exceptions."""
    error = {"message": message, "type": kind, "param": param, "code": code}
    return Answer(status, encode({"error": error}), (JSON, *headers))


def corral_error(status: int, message: str, kind: str, headers: Headers = ()) -> Answer:
    """The envelope of the controller's own API, for routes a client believes to be the controller's."""
    return Answer(status, encode({"error": {"code": status, "message": message, "type": kind}}), (JSON, *headers))


def page(status: int, sentence: str, headers: Headers = ()) -> Answer:
    """The same for a person with a browser: it looks again by itself. The sentence is ours, never a client's."""
    body = (
        f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>Corral</title><h1>Corral</h1><p>{sentence}</p><p>This page looks again every few seconds.</p></html>"
    )
    own = ((b"refresh", b"3"), (b"cache-control", b"no-store"), (b"content-security-policy", b"default-src 'none'"))
    return Answer(status, body.encode(), (HTML, *own, *headers))


def retry_after(seconds: float) -> tuple[bytes, bytes]:
    return b"retry-after", str(max(1, round(seconds))).encode()


def missing_key() -> Answer:
    return openai_error(
        401,
        "You didn't provide an API key. Send it as `Authorization: Bearer KEY` (or `x-api-key: KEY`); "
        "`corral keys create` makes one.",
        headers=((b"www-authenticate", b"Bearer"),),
    )


def wrong_key() -> Answer:
    # Unknown and revoked look alike: the view no longer holds a revoked key, and a guesser learns nothing.
    return openai_error(
        401,
        "Incorrect API key provided: it is unknown here or was revoked.",
        code="invalid_api_key",
        headers=((b"www-authenticate", b'Bearer error="invalid_token"'),),
    )


def expired_key() -> Answer:
    return openai_error(
        401,
        "This API key has expired.",
        code="expired_api_key",
        headers=((b"www-authenticate", b'Bearer error="invalid_token"'),),
    )


def forbidden(role: str, what: str) -> Answer:
    return openai_error(403, f"A key of role {role!r} may not {what}.", code="insufficient_permissions")


def unknown_model(model: str, installed: int) -> Answer:
    shown = model if len(model) <= 200 else model[:200] + "…"
    if installed:
        message = f"The model `{shown}` does not exist or you do not have access to it. GET /v1/models lists yours."
    else:
        message = f"The model `{shown}` does not exist: no model is installed; an administrator has to install one."
    return openai_error(404, message, code="model_not_found", param="model")


def unknown_route(method: bytes, route: bytes) -> Answer:
    shown = f"{method.decode('latin-1')} {route[:200].decode('latin-1')}"
    return openai_error(404, f"Invalid URL ({shown})", code="unknown_url")


def wrong_method(method: bytes, allowed: bytes) -> Answer:
    message = f"Method {method.decode('latin-1')} is not allowed here; use {allowed.decode('latin-1')}."
    return openai_error(405, message, code="method_not_allowed", headers=((b"allow", allowed),))


def too_large(limit_bytes: int) -> Answer:
    message = f"The body is larger than {limit_bytes} bytes, the most this gateway takes."
    return openai_error(413, message, code="request_too_large")


def not_ready(retry_after_s: float) -> Answer:
    return openai_error(
        503,
        "The gateway has not heard from the controller yet, so it cannot check any key. Try again shortly.",
        kind=SERVER,
        code="not_ready",
        headers=(retry_after(retry_after_s),),
    )
