"""The interface between the relay and its handlers. Bytes in, bytes out; the relay knows nothing of models.

The relay owns sockets, parsing, framing and backpressure; a `Handler` owns the decision. `inference/`,
`gateway/http/handler.py` and `worker/ingress` are handlers; so is anything a test writes in ten lines.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

Headers = Sequence[tuple[bytes, bytes]]  # names lower-case, order kept, repeats kept

# An ingress marks its 410 and 503 with this: no process has acted on the request, another replica may get it.
NOT_REACHED = b"x-corral-not-reached"
# An ingress marks its 502 with this: the process that had the request ended before it responded.
PROCESS_ENDED = b"x-corral-process-ended"
Unwanted = Callable[[int, Headers], bool]  # by status and headers of a response: True if it is not for the client


class Target(NamedTuple):
    """Where a request is relayed to. The key of the connection pool."""

    host: str = ""
    port: int = 0
    unix_path: str = ""  # a unix socket, without TLS; with a host too, host and port are used where it does not accept
    tls: bool = False
    server_name: str = ""  # name to verify in the peer's certificate, when not `host`


class Patience(NamedTuple):
    """How long one relayed response may be silent; None: no limit. A silent replica may be busy: prefill takes
    minutes."""

    first_byte_s: float | None = None  # from the last byte of the request to the first byte of the response
    idle_s: float | None = None  # between two bytes of the response


class Strip:
    """Request headers that must not reach an upstream. Create it once: the relay caches its effect by identity."""

    __slots__ = ("names", "prefixes")

    def __init__(self, names: Iterable[bytes] = (), prefixes: Iterable[bytes] = ()) -> None:
        self.names = frozenset(name.lower() for name in names)
        self.prefixes = tuple(prefix.lower() for prefix in prefixes)

    def drops(self, name: bytes) -> bool:
        return name in self.names or name.startswith(self.prefixes)


@dataclass(slots=True)
class Request:
    """One request head. The body is read by the handler, or left on the wire and relayed as it comes."""

    method: bytes
    path: bytes  # raw, with the query string, exactly as received
    # End-to-end headers: the relay handles hop-by-hop headers, Content-Length, Expect and X-Request-Id itself.
    headers: Headers
    http_version: str  # "1.1" or "1.0"
    peer: tuple[str, int] | None  # None on a unix socket
    secure: bool
    request_id: str
    body: Body
    upgrade: bytes = b""  # b"websocket" where the client asked for it; every other protocol is ignored
    # What handlers derived from the headers alone, shared by all requests with the same headers. Never a decision: the
    # key in a header stays the same, its validity does not.
    notes: dict[str, object] = field(default_factory=dict)
    extra: dict[str, object] = field(default_factory=dict)  # of this request alone

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
    """A request body that may still be arriving."""

    @property
    def length(self) -> int | None:
        """Declared length; None when chunked; 0 when there is none."""

    async def read(self, limit: int) -> bytes:
        """The whole body; may be called again. Raises `BodyTooLarge` over `limit` bytes, as early as possible."""

    def chunks(self) -> AsyncIterator[bytes]:
        """Pieces as they arrive, once; reading slowly slows the client down."""


class StreamEditor(Protocol):
    """Decides what the client is sent of a response. One editor may edit several responses, which the client receives
    as one: see `Responder.relay`."""

    def head(self, status: int, headers: Headers) -> bool:
        """Whether this response is edited. False passes it on unchanged, without the editor; for a later response of
        the same editor it means that none of it is sent."""

    def data(self, chunk: bytes) -> bytes:
        """Takes body bytes without transfer framing and returns the bytes to send now."""


class Responder(Protocol):
    """Sends the response to the client. A handler calls exactly one of the first three methods per request (`relay`
    again after it raised `UpstreamFailed`, or with an editor); without a call the client gets a 500. The connection's
    next request waits for the handler's return."""

    async def send(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole response. Sets Content-Length."""

    async def stream(
        self, status: int, headers: Headers, pieces: AsyncIterator[bytes], *, length: int | None = None
    ) -> None:
        """Send a response in pieces; waits when the client is slow. With a `length`, Content-Length is sent, also in
        the response to a HEAD, and the connection is cut if the pieces have another length; without one, the response
        is chunked (closed at the end for HTTP/1.0). If the client leaves, closes the iterator and raises
        `ClientGone`."""

    async def relay(
        self,
        target: Target,
        *,
        method: bytes | None = None,
        path: bytes | None = None,
        headers: Headers | None = None,
        strip: Strip | None = None,
        add: Headers = (),
        body: bytes | memoryview | None = None,
        tap: Tap | None = None,
        response_headers: Headers = (),
        upgrade: bool = False,
        patience: Patience | None = None,
        unwanted: Unwanted | None = None,
        reads_unwanted: bool = False,
        editor: StreamEditor | None = None,
    ) -> RelayResult:
        """Send the request to `target` and pass the bytes of the response back as they arrive.

        The request's headers go along, less those of `strip`, plus `add`; or `headers` replaces them (hop-by-hop ones
        are removed, Host is kept unless given). `body` replaces the body (a memoryview is written without being copied:
        its memory must stay valid); a body that the handler has `read` is sent as it was. `response_headers` are added
        to the response, in place of upstream headers of the same name. `upgrade` lets a WebSocket through as a tunnel.
        `patience` replaces the pool's own. `unwanted` is called for responses of 400 and more before anything of them
        is passed on; where it returns True, `UpstreamFailed` is raised, at once or, with `reads_unwanted`, when the
        body of a short response is complete.

        Raises `UpstreamFailed` while nothing has been sent to the client, so the handler may pick another target;
        after the first byte a failure closes the client's connection and the result reports it. The result also reports
        a client that left, with status 0 where the response had not begun.

        With an `editor` that accepts the response, the client is sent what the editor returns. Whether the upstream
        completes the response or breaks off, the response to the client stays open, and the result says which it was
        (`complete`). Then call `relay` with the same editor to add the response of another target, whose head is not
        sent, or `end`."""

    def end(self, data: bytes, *, complete: bool) -> None:
        """End an edited response with these last bytes; cut the connection if the response is not `complete`."""


class Tap(Protocol):
    """Observes a response as it passes, synchronously and cheaply; never changes it."""

    def head(self, status: int, headers: Headers) -> None: ...

    def data(self, chunk: bytes) -> None:
        """Body bytes without transfer framing; with it, for a tap with a true attribute `raw`, which is cheaper."""


class RelayResult(NamedTuple):
    status: int
    complete: bool  # False: upstream or client broke off
    client_gone: bool
    first_byte_s: float  # from sending the request to the first byte of the response
    total_s: float
    bytes_sent: int  # to the client, head and framing included


class Handler(Protocol):
    async def handle(self, request: Request, responder: Responder) -> None: ...


class KnownHead(Protocol):
    """A request head that the relay has parsed before. All requests with the same head, except for Content-Length and
    request id, share this object, so a fast path may use it as the key of a cache."""

    @property
    def method(self) -> bytes: ...

    @property
    def path(self) -> bytes: ...

    @property
    def headers(self) -> Headers: ...

    def prepare_forward(
        self,
        target: Target,
        *,
        path: bytes | None = None,
        strip: Strip | None = None,
        add: Headers = (),
        patience: Patience | None = None,
    ) -> PreparedForward:
        """The same as `Responder.relay` with these arguments, prepared for any number of requests."""


class PreparedForward:
    """Where requests with one head are forwarded to, with the part of the upstream's head that is the same for all of
    them. Made by `KnownHead`."""

    __slots__ = ("add", "head", "path", "patience", "strip", "tag", "target", "traceparent", "wire")

    def __init__(
        self,
        head: KnownHead,
        target: Target,
        path: bytes,
        strip: Strip | None,
        add: Headers,
        patience: Patience | None,
        wire: bytes,
    ) -> None:
        self.head = head
        self.target = target
        self.path = path
        self.strip = strip
        self.add = add
        self.patience = patience
        self.wire = wire  # the upstream's head up to the digits of Content-Length
        self.traceparent = b""  # of a forward for a single request
        self.tag: object = None  # belongs to the fast path that prepared it

    def with_traceparent(self, value: bytes, tag: object) -> PreparedForward:
        """This forward for a single request, which is sent with this `traceparent`."""
        raise NotImplementedError


class FastPath(Protocol):
    """Offered by a handler besides `handle`, for requests that need no wait before they are forwarded.

    The relay calls `decide` first. After `decide` has returned a forward, the relay calls exactly one of these:
    `on_response` when a whole response below 400 arrived in one piece and was passed on, `on_stream_end` when a chunked
    response was passed on to its end, and `handle_prepared` in every other case.
    """

    def decide(self, head: KnownHead, body: bytes, traceparent: bytes) -> PreparedForward | None:
        """Where this request goes; None leaves it to `handle`. Must not wait, and None must have no side effects.

        `traceparent`: the header of this name, b"" without one; `head` does not contain it, because it differs in every
        request. It is passed on, unless the forward has another one (`PreparedForward.with_traceparent`)."""

    def on_response(
        self,
        forward: PreparedForward,
        request_id: bytes,
        status: int,
        started: float,
        ended: float,
        bytes_sent: int,
        response: bytes,
    ) -> None:
        """`started` and `ended` are monotonic times; `response` is head and body as received."""

    def new_tap(self, forward: PreparedForward) -> Tap | None:
        """A tap for a chunked response; it receives the bytes with their framing. None: no tap."""

    def on_stream_end(
        self,
        forward: PreparedForward,
        request_id: bytes,
        status: int,
        started: float,
        ended: float,
        bytes_sent: int,
        tap: Tap | None,
    ) -> None:
        """`tap`: the tap that `new_tap` returned, or None if the tap failed."""

    async def handle_prepared(
        self, forward: PreparedForward, request: Request, responder: Responder, elapsed_s: float
    ) -> None:
        """As `handle`, for a request that `decide` accepted `elapsed_s` ago and that fell back from the fast path.
        Where a chunked response has begun, `request.extra["tap"]` is its tap. Must call `responder.relay` with the
        forward's target before any other wait: the request may have been sent already, and then `relay` joins it."""


class RelayError(Exception):
    """Base of errors on the wire. A handler may respond to it; otherwise the relay does, with a status for each."""


class BodyTooLarge(RelayError):
    """The body is over the handler's limit."""


class BodyBroken(RelayError):
    """The client's body is malformed (400) or stopped arriving (408)."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class ClientGone(RelayError):
    """The client has left."""


class UpstreamFailed(RelayError):
    """The target could not be reached, or failed before its response began."""

    def __init__(
        self,
        message: str,
        *,
        refused: bool,
        timed_out: bool = False,
        resendable: bool = True,
        status: int = 0,
        answer: bytes = b"",
        unresponsive: bool = False,
    ) -> None:
        super().__init__(message)
        self.unresponsive = unresponsive  # the request was sent, then the target stopped responding altogether
        self.refused = refused  # connecting failed, so certainly nothing was sent; or the answer was `unwanted`
        self.status = status  # of an unwanted response
        self.answer = answer  # its body, where it arrived with the head or was read (`reads_unwanted`)
        self.timed_out = timed_out
        self.resendable = resendable  # False: part of a streamed body was sent, so no other target can get it
