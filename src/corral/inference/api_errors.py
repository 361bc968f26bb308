"""What goes wrong, in OpenAI's envelope: `{"error": {"message", "type", "param", "code"}}`. Pure.

gRPC's own errors are read in `calling.py`; here is only how they are told.
"""

from __future__ import annotations

from corral.contract.codec import encode
from corral.contract.http import NOT_REACHED, Headers, RelayError

JSON = (b"content-type", b"application/json")
INVALID = "invalid_request_error"
SERVER = "server_error"


class Refused(Exception):
    """A request that gets an answer, but not the one it wanted."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None, retry_after_s: int = 0
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def body(self) -> bytes:
        kind = INVALID if self.status < 500 else SERVER
        return encode({"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}})

    @property
    def headers(self) -> Headers:
        if self.retry_after_s:
            return (JSON, (b"retry-after", b"%d" % self.retry_after_s))
        if self.status == 410:  # it found itself to be another's: it has not acted, and must not be asked again
            return (JSON, (NOT_REACHED, b"1"))
        return (JSON,)


class BrokenOff(RelayError):
    """An answer that cannot be brought to its end, nor say so itself."""


def bad(param: str, message: str) -> Refused:
    """The client can mend it, and this is the field."""
    return Refused(400, message, param=param)


def not_bridged(rpc: str, what: str) -> Refused:
    """`rpc` empty: the contract has none for it."""
    why = f"its RPC, {rpc}, is not translated here" if rpc else "there is no RPC for it"
    return Refused(501, f"{what} is not served by gRPC backends: {why}.", code="not_implemented")


def not_implemented(backend: str, rpc: str) -> Refused:
    return Refused(501, f"The backend {backend} does not implement {rpc}.", code="not_implemented")
