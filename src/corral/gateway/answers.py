"""Answers the gateway gives itself: OpenAI's error envelope under `/v1/…`, the house's own elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from corral.contract.codec import encode
from corral.contract.http import Headers
from corral.contract.loads import LoadStatus

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


def unknown_model(model: str, installed: int, near: Sequence[str] = ()) -> Answer:
    """`near`: what may have been meant, of the names this client may know."""
    shown = model if len(model) <= 200 else model[:200] + "…"
    if installed:
        meant = f" Did you mean {' or '.join(f'`{name}`' for name in near)}?" if near else ""
        message = (
            f"The model `{shown}` does not exist or you do not have access to it.{meant} GET /v1/models lists yours."
        )
    else:
        message = f"The model `{shown}` does not exist: no model is installed; an administrator has to install one."
    return openai_error(404, message, code="model_not_found", param="model")


def unknown_route(method: bytes, route: bytes, meant: bytes = b"") -> Answer:
    """`meant`: what it may have been, had it been written otherwise."""
    shown = f"{method.decode('latin-1')} {route[:200].decode('latin-1')}"
    if meant:
        help_ = f"it is {meant.decode('latin-1')}. The base URL of a client ends with /v1."
    else:
        help_ = "nothing here has this path, and it names no `model`, in a JSON body or as ?model=NAME."
    return openai_error(404, f"Invalid URL ({shown}): {help_}", code="unknown_url")


def wrong_method(method: bytes, allowed: bytes) -> Answer:
    message = f"Method {method.decode('latin-1')} is not allowed here; use {allowed.decode('latin-1')}."
    return openai_error(405, message, code="method_not_allowed", headers=((b"allow", allowed),))


def compressed(encoding: bytes) -> Answer:
    shown = encoding[:40].decode("latin-1")
    return openai_error(
        415,
        f"The body is compressed (Content-Encoding: {shown}), and is not unpacked here: send it as it is.",
        code="unsupported_encoding",
        headers=((b"accept-encoding", b"identity"),),
    )


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


# What a request for a model gets that cannot be served now (docs/reference/wire/routing.md#answer-while-a-model-loads).

_LEAST_RETRY_S, _MOST_RETRY_S = 5, 300


def model_loading(model: str, status: LoadStatus | None, budget_s: float) -> Answer:
    """`status`: what was heard of its load last, if anything."""
    known = status or LoadStatus(model=model, state="pending")
    loading: dict[str, object] = {"model": model, "state": known.state}
    if known.node:
        loading["node"] = known.node
    loading |= {
        "progress": known.progress,
        "bytes_sent": known.bytes_sent,
        "total_bytes": known.total_bytes,
        "file_index": known.file_index,
        "total_files": known.total_files,
    }
    if known.eta_seconds is not None:
        loading["eta_seconds"] = known.eta_seconds
    doing = f": {known.message}" if known.message else f" ({known.state})"
    message = f"The model `{model}` is being loaded{doing}. Try again shortly."
    wait_s = budget_s if known.eta_seconds is None else known.eta_seconds
    retry = str(min(_MOST_RETRY_S, max(_LEAST_RETRY_S, math.ceil(wait_s)))).encode()
    error = {"message": message, "code": "model_loading", "type": "model_loading"}
    return Answer(503, encode({"error": error, "loading": loading}), (JSON, (b"retry-after", retry)))


def load_failed(model: str, status: LoadStatus, *, before: bool) -> Answer:
    """The real cause; whoever comes after it (`before`), while the next try is not due yet, is told when it is."""
    cause = status.error or status.message or "nobody said why"
    wait = (retry_after(status.retry_after_s),) if status.retry_after_s > 0 else ()
    return openai_error(
        503 if before and wait else 500,
        f"The model `{model}` could not be loaded: {cause}",
        kind=SERVER,
        code="model_load_failed",
        headers=wait,
    )


def all_busy(model: str, retry_after_s: float) -> Answer:
    return openai_error(
        503,
        f"All replicas of `{model}` were busy for as long as a request may wait. Try again shortly.",
        kind=SERVER,
        code="model_busy",
        headers=(retry_after(retry_after_s),),
    )


def unreachable(model: str, retry_after_s: float) -> Answer:
    return openai_error(
        503,
        f"No replica of `{model}` could be reached for as long as a request may wait. Try again shortly.",
        kind=SERVER,
        code="upstream_failed",
        headers=(retry_after(retry_after_s),),
    )


def queue_full(model: str, limit: int, retry_after_s: float) -> Answer:
    return openai_error(
        503,
        f"{limit} requests for `{model}` wait already, the most that may. Try again shortly.",
        kind=SERVER,
        code="queue_full",
        headers=(retry_after(retry_after_s),),
    )


def at_limit(model: str, limit: int, retry_after_s: float) -> Answer:
    """What its definition says may be under way at once (`limits`) is."""
    return openai_error(
        503,
        f"{limit} requests for `{model}` are under way, the most its definition allows. Try again shortly.",
        kind=SERVER,
        code="model_busy",
        headers=(retry_after(retry_after_s),),
    )


def rate_limited(what: str, limit: int, retry_after_s: float) -> Answer:
    words = {
        "requests": f"this key may make {limit} requests a minute",
        "tokens": f"this key may use {limit} tokens a minute",
        "concurrent": f"this key may have {limit} requests under way at once",
    }
    return openai_error(
        429,
        f"Rate limit reached: {words[what]}. Try again in {max(1, math.ceil(retry_after_s))} s.",
        kind=what,
        code="rate_limit_exceeded",
        headers=((b"retry-after", str(max(1, math.ceil(retry_after_s))).encode()),),
    )


def no_room(where: str, retry_after_s: float) -> Answer:
    return openai_error(
        503,
        f"The gateway has no room to keep this body {where} right now. Try again shortly.",
        kind=SERVER,
        code="no_room",
        headers=(retry_after(retry_after_s),),
    )
