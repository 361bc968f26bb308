"""Errors in OpenAI's format: `{"error": {"message", "type", "param", "code"}}`. Pure. `grpc/client.py` translates
gRPC's errors."""

from __future__ import annotations

from corral.contract.codec import encode
from corral.contract.http import NOT_REACHED, Headers, RelayError

JSON = (b"content-type", b"application/json")
INVALID = "invalid_request_error"
SERVER = "server_error"


class ApiError(Exception):
    """The request is answered with an error."""

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
        if (
            self.status == 410
        ):  # the process serves another model: the request was not executed, so another process may get it
            return (JSON, (NOT_REACHED, b"1"))
        return (JSON,)


class StreamBroken(RelayError):
    """An answer broke off after its start, in a format that cannot contain an error."""


def invalid_field(param: str, message: str) -> ApiError:
    """The client can fix the request: the error names the field."""
    return ApiError(400, message, param=param)


def not_bridged(rpc: str, what: str) -> ApiError:
    """`rpc` empty: there is no RPC for it."""
    why = f"its RPC, {rpc}, is not translated here" if rpc else "there is no RPC for it"
    return ApiError(501, f"{what} is not served by gRPC backends: {why}.", code="not_implemented")


def not_implemented(backend: str, rpc: str) -> ApiError:
    words = f"The backend {backend} does not implement {rpc}: use a model whose backend does."
    return ApiError(501, words, code="not_implemented")
