"""Responses of the gateway itself: errors in OpenAI's envelope under `/v1/…`, in Corral's own elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from corral.contract.codec import encode
from corral.contract.http import Headers, Responder, UpstreamFailed
from corral.contract.loads import LoadStatus
from corral.contract.receipts import MAX_ERROR_TEXT
from corral.kit.log import mask_secrets, printable

JSON = (b"content-type", b"application/json")
HTML = (b"content-type", b"text/html; charset=utf-8")
TEXT = (b"content-type", b"text/plain; charset=utf-8")

INVALID = "invalid_request_error"
SERVER = "server_error"
_TRY_AGAIN = " Try again shortly."


class _Error(msgspec.Struct, frozen=True):
    message: str = ""
    type: str = ""
    code: str | int | None = None


class _ErrorBody(msgspec.Struct, frozen=True):
    error: _Error = _Error()


_error_of = msgspec.json.Decoder(_ErrorBody).decode


@dataclass(frozen=True, slots=True)
class Response:
    """A whole response, which can be sent any number of times."""

    status: int
    body: bytes
    headers: Headers = (JSON,)


async def send(responder: Responder, response: Response, extra: Headers = ()) -> int:
    await responder.send(response.status, (*response.headers, *extra), response.body)
    return response.status


def status_for(failure: UpstreamFailed) -> int:
    """503: nothing was sent, the client may retry. 504 and 502: the upstream received the request and may have
    acted."""
    if failure.refused:
        return 503
    return 504 if failure.timed_out else 502


class ReceiptError(NamedTuple):
    """What a receipt says of a request that failed."""

    code: str = ""
    text: str = ""


NO_ERROR = ReceiptError()


def receipt_error(response: Response, reason: str = "") -> ReceiptError:
    """Of an error response of the gateway, read from its body: it may come from another process. `reason`: what the
    client is not told."""
    error = _error_of(response.body).error
    text = f"{error.message.removesuffix(_TRY_AGAIN)} ({reason})" if reason else error.message
    line = " ".join(printable(mask_secrets(text), keep_lines=True).split())
    cut = line if len(line) <= MAX_ERROR_TEXT else line[: MAX_ERROR_TEXT - 1] + "…"
    return ReceiptError(str(error.code or error.type), cut)


def openai_error(
    status: int,
    message: str,
    *,
    kind: str = INVALID,
    code: str | None = None,
    param: str | None = None,
    headers: Headers = (),
) -> Response:
    """`{"error": {"message", "type", "param", "code"}}`: OpenAI's clients turn it into their exceptions."""
    error = {"message": message, "type": kind, "param": param, "code": code}
    return Response(status, encode({"error": error}), (JSON, *headers))


def _try_later(message: str, code: str, retry_after_s: float) -> Response:
    """503 for a request that may succeed a moment later."""
    headers = (retry_after(retry_after_s),)
    return openai_error(503, f"{message}{_TRY_AGAIN}", kind=SERVER, code=code, headers=headers)


def corral_error(status: int, message: str, kind: str, headers: Headers = ()) -> Response:
    """The envelope of the controller's own API, for the routes that are relayed to it."""
    return Response(status, encode({"error": {"code": status, "message": message, "type": kind}}), (JSON, *headers))


def page(status: int, sentence: str, headers: Headers = ()) -> Response:
    """An error page for browsers, which reloads itself. `sentence` is not escaped: pass no text of a client."""
    body = (
        f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>Corral</title><h1>Corral</h1><p>{sentence}</p><p>This page reloads every few seconds.</p></html>"
    )
    reload = ((b"refresh", b"3"), (b"cache-control", b"no-store"), (b"content-security-policy", b"default-src 'none'"))
    return Response(status, body.encode(), (HTML, *reload, *headers))


def retry_after(seconds: float) -> tuple[bytes, bytes]:
    return b"retry-after", str(max(1, round(seconds))).encode()


def missing_key() -> Response:
    return openai_error(
        401,
        "You didn't provide an API key. Send it as `Authorization: Bearer KEY` (or `x-api-key: KEY`); "
        "`corral keys create` makes one.",
        headers=((b"www-authenticate", b"Bearer"),),
    )


def wrong_key() -> Response:
    # Unknown and revoked keys get the same error: the view no longer has a revoked key, and guessing reveals nothing.
    return openai_error(
        401,
        "Incorrect API key provided: this key is unknown or was revoked.",
        code="invalid_api_key",
        headers=((b"www-authenticate", b'Bearer error="invalid_token"'),),
    )


def expired_key() -> Response:
    return openai_error(
        401,
        "This API key has expired.",
        code="expired_api_key",
        headers=((b"www-authenticate", b'Bearer error="invalid_token"'),),
    )


def wrong_token() -> Response:
    return openai_error(
        401,
        "This token of the playground is not valid: its session has ended. Sign in on the page again.",
        code="invalid_playground_token",
        headers=((b"www-authenticate", b'Bearer error="invalid_token"'),),
    )


def expired_token() -> Response:
    return openai_error(
        401,
        "This token of the playground has expired. The page requests a new one.",
        code="expired_playground_token",
        headers=((b"www-authenticate", b'Bearer error="invalid_token"'),),
    )


def forbidden(role: str, action: str) -> Response:
    return openai_error(403, f"A key of role {role!r} may not {action}.", code="insufficient_permissions")


def unknown_model(model: str, installed: int, suggestions: Sequence[str] = ()) -> Response:
    """`suggestions`: similar names of models that this client may use."""
    shown = model if len(model) <= 200 else model[:200] + "…"
    if installed:
        meant = f" Did you mean {' or '.join(f'`{name}`' for name in suggestions)}?" if suggestions else ""
        message = (
            f"The model `{shown}` does not exist or you do not have access to it.{meant} GET /v1/models lists yours."
        )
    else:
        message = f"The model `{shown}` does not exist: no model is installed; an administrator has to install one."
    return openai_error(404, message, code="model_not_found", param="model")


def unknown_route(method: bytes, route: bytes, suggestion: bytes = b"") -> Response:
    """`suggestion`: the path that the client probably meant."""
    shown = f"{method.decode('latin-1')} {route[:200].decode('latin-1')}"
    if suggestion:
        help_ = f"the path is {suggestion.decode('latin-1')}. The base URL of a client ends with /v1."
    else:
        help_ = "no route has this path, and the request names no `model`, in a JSON body or as ?model=NAME."
    return openai_error(404, f"Invalid URL ({shown}): {help_}", code="unknown_url")


def wrong_method(method: bytes, allowed: bytes) -> Response:
    message = f"Method {method.decode('latin-1')} is not allowed here; use {allowed.decode('latin-1')}."
    return openai_error(405, message, code="method_not_allowed", headers=((b"allow", allowed),))


def compressed(encoding: bytes) -> Response:
    shown = encoding[:40].decode("latin-1")
    return openai_error(
        415,
        f"The body is compressed (Content-Encoding: {shown}), which the gateway cannot read. Send it uncompressed.",
        code="unsupported_encoding",
        headers=((b"accept-encoding", b"identity"),),
    )


def too_large(limit_bytes: int) -> Response:
    message = f"The body is larger than {limit_bytes} bytes, the limit of this gateway."
    return openai_error(413, message, code="request_too_large")


def not_ready(retry_after_s: float) -> Response:
    return _try_later(
        "The gateway has not reached the controller yet, so it cannot check any key.", "not_ready", retry_after_s
    )


# Errors for a model that cannot be served now (docs/reference/wire/routing.md#answer-while-a-model-loads).

MIN_RETRY_S, MAX_RETRY_S = 5, 300


def model_loading(model: str, status: LoadStatus | None, budget_s: float) -> Response:
    """`status`: the last known status of the load, if there is one."""
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
    step = f": {known.message}" if known.message else f" ({known.state})"
    message = f"The model `{model}` is being loaded{step}. Try again shortly."
    wait_s = budget_s if known.eta_seconds is None else known.eta_seconds
    retry = str(min(MAX_RETRY_S, max(MIN_RETRY_S, math.ceil(wait_s)))).encode()
    error = {"message": message, "code": "model_loading", "type": "model_loading"}
    return Response(503, encode({"error": error, "loading": loading}), (JSON, (b"retry-after", retry)))


def load_failed(model: str, status: LoadStatus, *, failed_before: bool) -> Response:
    """The cause of the failure. `failed_before`: the load failed before this request, which is told when the next
    attempt is due."""
    cause = status.error or status.message or "no reason was reported"
    wait = (retry_after(status.retry_after_s),) if status.retry_after_s > 0 else ()
    return openai_error(
        503 if failed_before and wait else 500,
        f"The model `{model}` could not be loaded: {cause}",
        kind=SERVER,
        code="model_load_failed",
        headers=wait,
    )


def all_busy(model: str, retry_after_s: float) -> Response:
    return _try_later(
        f"All replicas of `{model}` were busy until the request's wait time ended.", "model_busy", retry_after_s
    )


def unreachable(model: str, retry_after_s: float) -> Response:
    return _try_later(
        f"No replica of `{model}` could be reached until the request's wait time ended.",
        "upstream_failed",
        retry_after_s,
    )


def queue_full(model: str, limit: int, retry_after_s: float) -> Response:
    return _try_later(f"The queue for `{model}` is full: {limit} requests wait already.", "queue_full", retry_after_s)


def at_limit(model: str, limit: int, retry_after_s: float) -> Response:
    """The model's definition limits concurrent requests (`limits`)."""
    return _try_later(
        f"{limit} requests for `{model}` are in progress, the limit of its definition.", "model_busy", retry_after_s
    )


def rate_limited(kind: str, limit: int, retry_after_s: float) -> Response:
    messages = {
        "requests": f"this key may make {limit} requests a minute",
        "tokens": f"this key may use {limit} tokens a minute",
        "concurrent": f"this key may have {limit} requests in progress at once",
    }
    return openai_error(
        429,
        f"Rate limit reached: {messages[kind]}. Try again in {max(1, math.ceil(retry_after_s))} s.",
        kind=kind,
        code="rate_limit_exceeded",
        headers=((b"retry-after", str(max(1, math.ceil(retry_after_s))).encode()),),
    )


def no_space(where: str, retry_after_s: float) -> Response:
    return _try_later(f"The gateway has not enough {where} for this body right now.", "no_room", retry_after_s)
