"""What the relay hands to a handler, and what a handler may do with it. Bytes in, bytes out; no model is known here.

The relay owns sockets, parsing and backpressure; a `Handler` owns the decision. `inference/`, `gateway/door.py` and
`worker/ingress` are handlers; so is anything a test writes in ten lines.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

Headers = Sequence[tuple[bytes, bytes]]  # names lower-case, order kept, repeats kept


@dataclass(frozen=True, slots=True)
class Target:
    """Where a request is relayed to. Connections are pooled by it."""

    host: str = ""
    port: int = 0
    unix_path: str = ""  # a unix socket instead of host and port
    tls: bool = False
    server_name: str = ""  # name to verify in the peer's certificate, when not `host`


@dataclass(slots=True)
class Request:
    """One request head. The body is read by the handler, or left on the wire and relayed as it comes."""

    method: bytes
    path: bytes  # raw, with the query string, exactly as received
    headers: list[tuple[bytes, bytes]]
    http_version: str
    peer: tuple[str, int] | None  # None on a unix socket
    secure: bool
    request_id: str
    body: Body
    extra: dict[str, object] = field(default_factory=dict)

    def header(self, name: bytes) -> bytes | None:
        """The first value of a lower-case header name."""
        for key, value in self.headers:
            if key == name:
                return value
        return None

    @property
    def route(self) -> bytes:
        """The path without its query string."""
        return self.path.partition(b"?")[0]


class Body(Protocol):
    """A request body still on its way."""

    length: int | None  # declared length; None when chunked; 0 when there is none

    async def read(self, limit: int) -> bytes:
        """The whole body. Raises `BodyTooLarge` past `limit` bytes, as early as it can be known."""

    def chunks(self) -> AsyncIterator[bytes]:
        """Pieces as they arrive; reading slowly slows the client down."""


class Responder(Protocol):
    """The way back to the client. Exactly one of these is called per request; leaving without an answer is a 500."""

    async def send(self, status: int, headers: Headers, body: bytes) -> None:
        """A whole answer at once. Content-Length is set here."""

    async def stream(self, status: int, headers: Headers, pieces: AsyncIterator[bytes]) -> None:
        """An answer of unknown length (chunked, or closed at the end for HTTP/1.0); waits when the client is slow.
        If the client leaves, the iterator is closed and `ClientGone` is raised."""

    async def relay(
        self,
        target: Target,
        *,
        method: bytes | None = None,
        path: bytes | None = None,
        headers: Headers | None = None,
        body: bytes | None = None,
        tap: Tap | None = None,
        response_headers: Headers = (),
    ) -> RelayResult:
        """Send the request to `target` and pass the answer's bytes back as they come.

        `headers` replaces the request's (hop-by-hop ones are removed, Host is kept unless given); `body` replaces the
        body (needed when the handler has already read it); `response_headers` are added to the answer's head.
        Raises `UpstreamFailed` while nothing has been sent to the client, so the handler may pick another target;
        after the first byte a failure closes the client's connection and is told in the result."""


class Tap(Protocol):
    """Looks at the answer as it passes, synchronously and cheaply; never changes it."""

    def head(self, status: int, headers: Headers) -> None: ...

    def data(self, chunk: bytes) -> None: ...


@dataclass(frozen=True, slots=True)
class RelayResult:
    status: int
    complete: bool  # False: upstream or client broke off after the head was sent
    client_gone: bool
    first_byte_s: float  # from sending the request to the first byte of the answer's head
    total_s: float
    bytes_sent: int


class Handler(Protocol):
    async def handle(self, request: Request, responder: Responder) -> None: ...


class RelayError(Exception):
    """Base of what goes wrong on the wire; handlers may answer it."""


class BodyTooLarge(RelayError):
    """The body is over the handler's limit."""


class ClientGone(RelayError):
    """Nobody is there to answer any more."""


class UpstreamFailed(RelayError):
    """The target could not be reached or broke before its first byte; `refused`: nothing was sent."""

    def __init__(self, message: str, *, refused: bool, timed_out: bool = False) -> None:
        super().__init__(message)
        self.refused = refused
        self.timed_out = timed_out
