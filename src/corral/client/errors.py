"""Turns HTTP answers and broken connections into CorralErrors, each with a message for the user."""

from __future__ import annotations

import ssl

from corral.contract.codec import Message, Undecodable, decode
from corral.kit.errors import (
    Conflict,
    CorralError,
    Denied,
    Failed,
    Gone,
    Invalid,
    NoCapacity,
    NotFound,
    OutcomeUnknown,
    Unauthenticated,
    Unavailable,
    Unreachable,
    reason_of,
)

_BY_STATUS: dict[int, type[CorralError]] = {
    400: Invalid,
    401: Unauthenticated,
    403: Denied,
    404: NotFound,
    405: Invalid,
    409: Conflict,
    410: Gone,
    413: Invalid,
    422: Invalid,
    429: Unavailable,
    502: Failed,
    503: Unavailable,
    504: OutcomeUnknown,
}
_KINDS: tuple[type[CorralError], ...] = (*_BY_STATUS.values(), NoCapacity, Unreachable)
# A full disk does not pass like a restart: nothing is gained by trying again at once.
_BY_CODE = {kind.code: kind for kind in _KINDS} | {"no_space": NoCapacity}
_MAX_TEXT_CHARS = 300
NO_ANSWER = (Unreachable, Unavailable, OutcomeUnknown)  # no answer now; the requested work goes on


class ConnectFailed(Exception):
    """No connection; nothing was sent."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.reason = reason_of(error)


class Disconnected(ConnectionError):
    """The server closed the connection instead of answering."""


class BrokenAnswer(Exception):
    """The connection broke in the middle of the answer."""


class NotHttp(Exception):
    """The answer cannot be read."""


BROKEN = (OSError, TimeoutError, ConnectFailed, BrokenAnswer, NotHttp)


class _ErrorBody(Message, frozen=True):
    message: str = ""
    type: str = ""


class _Nested(Message, frozen=True):
    error: _ErrorBody | str = ""
    code: str | int = ""  # beside an error that is only a text


def error_of(status: int, body: bytes, *, retry_after: str | None = None) -> CorralError:
    """The error for an answer. `type` in the body is Corral's error code and wins over the status."""
    message, code = _read_body(body)
    kind = _BY_CODE.get(code) or _BY_STATUS.get(status) or (Failed if status >= 400 else Invalid)
    text = message or f"HTTP {status} without a reason"
    if kind is Unauthenticated:
        text += ": give a valid key with --key or CORRAL_KEY"
    if kind is NoCapacity:
        return NoCapacity(text, retry_after_s=_seconds(retry_after))
    return kind(text)


def _read_body(body: bytes) -> tuple[str, str]:
    try:
        envelope = decode(_Nested, body)
    except Undecodable:
        # Not Corral's: another program on that port, or a proxy's error page.
        return _one_line(body), ""
    if isinstance(envelope.error, str):
        return envelope.error, str(envelope.code)
    return envelope.error.message, envelope.error.type


def _one_line(body: bytes) -> str:
    text = " ".join(body[: 4 * _MAX_TEXT_CHARS].decode("utf-8", errors="replace").split())
    if text.startswith("<"):
        return "something that is not Corral answered with a web page; check the URL"
    return text[:_MAX_TEXT_CHARS]


def _seconds(text: str | None) -> float:
    try:
        return max(0.0, float(text or ""))
    except ValueError:
        return 5.0


def unreachable(url: str, error: BaseException, *, may_have_happened: bool) -> CorralError:
    """The error if no answer came. For calls that change something the outcome is unknown."""
    if isinstance(error, ssl.SSLCertVerificationError):
        reason = error.verify_message or str(error)
        return Unreachable(
            f"the certificate of {url} is not trusted ({reason}): "
            "give the fleet's CA with --ca (a PEM file, or sha256:… from the join line)"
        )
    if isinstance(error, ssl.SSLError):
        return Unreachable(f"no TLS at {url}: is it a plain http:// address?")
    if isinstance(error, ConnectFailed):
        return Unreachable(
            f"nothing answers at {url} ({error.reason}): is the fleet running? start it with `corral up`"
        )
    if isinstance(error, BrokenAnswer):
        text = f"the connection to {url} broke in the middle of the answer"
    elif isinstance(error, TimeoutError):
        text = f"{url} did not answer in time"
    else:
        text = f"the connection to {url} broke ({str(error) or type(error).__name__})"
    if may_have_happened:
        return OutcomeUnknown(f"{text}: it may or may not have been done; look before you repeat it")
    if isinstance(error, Disconnected | NotHttp) and url.startswith("http://"):
        return Unreachable(f"{text}: is it an https:// address? if not, try again, or see `corral doctor`")
    return Unreachable(f"{text}: try again, or see `corral doctor`")
