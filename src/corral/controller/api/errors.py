"""Translates our errors into HTTP responses. No other module does."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Request, Response
from litestar.exceptions import HTTPException

from corral.contract.codec import encode
from corral.controller.operations.requests import ConcreteNeedsTarget
from corral.kit import errors
from corral.kit.log import get_log

log = get_log(__name__)

_STATUS: dict[type[errors.CorralError], int] = {
    errors.Invalid: 400,
    errors.Unauthenticated: 401,
    errors.Denied: 403,
    errors.NotFound: 404,
    errors.Conflict: 409,
    errors.Gone: 410,
    errors.Failed: 502,
    errors.Unreachable: 502,
    errors.NoCapacity: 503,
    errors.Unavailable: 503,
    errors.OutcomeUnknown: 504,
}


_IN_THE_BODY = "`$.data"  # where msgspec says that it found the fault

# These families have their own form in the contract: a sentence, and beside it what a script can match.
_PLAIN = ("/api/operations", "/api/backends")


def answer(
    status: int, message: str, kind: str, headers: dict[str, str] | None = None, **more: object
) -> Response[bytes]:
    return _json(status, {"error": {"code": status, "message": message, "type": kind}, **more}, headers)


def plain(
    status: int, message: str, code: str, headers: dict[str, str] | None = None, **more: object
) -> Response[bytes]:
    return _json(status, {"error": message, "code": code, **more}, headers)


def _json(status: int, body: dict[str, Any], headers: dict[str, str] | None) -> Response[bytes]:
    return Response(encode(body), status_code=status, media_type="application/json", headers=headers or {})


def _in_its_form(
    request: Request[Any, Any, Any], status: int, message: str, kind: str, headers: dict[str, str] | None = None
) -> Response[bytes]:
    form = plain if request.url.path.startswith(_PLAIN) else answer
    return form(status, message, kind, headers)


def status_of(error: errors.CorralError) -> int:
    return next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 500)


def on_corral_error(request: Request[Any, Any, Any], error: errors.CorralError) -> Response[bytes]:
    status = status_of(error)
    # The contract names every error of these two families so; scripts of ours read the status.
    kind = "node_error" if request.url.path.startswith(("/api/node/", "/api/nodes")) else error.code
    headers = {}
    if isinstance(error, errors.NoCapacity):
        headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    elif isinstance(error, errors.Unavailable):
        headers["Retry-After"] = "2"
    elif isinstance(error, errors.Unauthenticated):
        headers["WWW-Authenticate"] = "Bearer"
    if status == 401 and request.url.path.startswith("/api/node/"):  # the contract's token middleware speaks so
        return Response(
            encode({"error": error.message}), status_code=401, media_type="application/json", headers=headers
        )
    if isinstance(error, ConcreteNeedsTarget):
        return plain(status, error.message, error.code, meta_alternative=error.meta_alternative)
    return _in_its_form(request, status, error.message, kind, headers)


def on_http_exception(request: Request[Any, Any, Any], error: HTTPException) -> Response[bytes]:
    """Errors of the framework: unknown routes, wrong methods, unreadable bodies."""
    detail, cause = error.detail, error.__cause__
    if error.status_code >= 500 and isinstance(cause, msgspec.ValidationError) and _IN_THE_BODY in str(cause):
        # It takes a key of the body that is called like a service of ours (`models`) for that service, and us to blame.
        return _in_its_form(request, 400, str(cause).replace(_IN_THE_BODY, "`$"), "http_error")
    if error.status_code == 404:
        detail = f"there is no {request.url.path} here; /docs lists what there is"
    elif error.status_code == 400 and isinstance(error.extra, list) and error.extra:
        detail = "; ".join(_sentence(fault) for fault in error.extra)
    elif error.status_code >= 500:
        log.error("request failed", path=request.url.path, exc_info=error)
        detail = "something went wrong here; the log has the details"
    return _in_its_form(request, error.status_code, detail, "http_error", dict(error.headers or {}))


def on_too_deep(request: Request[Any, Any, Any], error: RecursionError) -> Response[bytes]:
    """JSON that is nested too deeply for the decoder. No code of ours recurses as deeply."""
    log.warning("request nested too deep", path=request.url.path)
    return _in_its_form(request, 400, "the request is nested too deep to be read", "invalid")


def on_unexpected(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    log.error("request failed", path=request.url.path, exc_info=error)
    return _in_its_form(request, 500, "something went wrong here; the log has the details", "internal_error")


def _sentence(fault: object) -> str:
    if isinstance(fault, dict):
        return ": ".join(str(fault[part]) for part in ("key", "message") if fault.get(part))
    return str(fault)
