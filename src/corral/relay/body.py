"""A request body: decoded as it arrives, then read whole, read in pieces, or streamed to an upstream."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from typing import Protocol

from corral.contract.http import BodyTooLarge
from corral.relay.http1.chunked import ChunkedDecoder
from corral.relay.loop.runner import Park, Runner

_BYTES = Park()
_SMALL = 4096  # bytes: smaller pieces are joined, or a body that arrives byte by byte would take fifty times its size


class BodySource(Protocol):
    """The connection a body comes from."""

    def want_body(self) -> None:
        """A reader waits for bytes: continue reading, and watch the client's deadline."""

    def runner(self) -> Runner | None: ...


class BodySink(Protocol):
    """An upstream that a body is streamed to."""

    def send_body(self, piece: bytes) -> None: ...

    def end_body(self) -> None: ...


class RequestBody:
    """Implements `Body`. The connection feeds it; exactly one of `read`, `chunks` and `attach` drains it."""

    __slots__ = (
        "_decoder",
        "_error",
        "_left",
        "_length",
        "_pieces",
        "_sink",
        "_source",
        "_spent",
        "_whole",
        "buffered",
        "complete",
        "received",
        "wanted",
    )

    def __init__(self, source: BodySource, length: int | None) -> None:
        self._source = source
        self._length = length
        self._left = length or 0
        self._decoder = ChunkedDecoder() if length is None else None
        self._pieces: deque[bytes] = deque()
        self._whole: bytes | None = None
        self._sink: BodySink | None = None
        self._error: Exception | None = None
        self._spent = False  # pieces have been handed out and are not kept here
        self.buffered = 0
        self.received = 0
        self.complete = False
        self.wanted = False  # a reader waits for the next bytes

    @property
    def length(self) -> int | None:
        return self._length

    # From the connection.

    def feed(self, data: bytes) -> bytes:
        """Take the bytes of the body and return the bytes after its end. Raises `Malformed`."""
        self.received += len(data)
        if self._decoder is None:
            piece, rest = data[: self._left], data[self._left :]
            self._left -= len(piece)
            self.complete = not self._left
            self._accept(piece)
        else:
            pieces, rest = self._decoder.feed(data)
            self.complete = self._decoder.done
            for piece in pieces:
                self._accept(piece)
        if self.complete and self._sink is not None:
            self._sink.end_body()
        return rest

    def _accept(self, piece: bytes) -> None:
        if self._sink is not None:
            self._spent = True
            self._sink.send_body(piece)
        elif piece:
            pieces = self._pieces
            if pieces and len(pieces[-1]) + len(piece) <= _SMALL:
                pieces[-1] += piece
            else:
                pieces.append(piece)
            self.buffered += len(piece)

    def notify(self) -> None:
        """Bytes have arrived. The connection's last step: the handler may run to its end in here."""
        if self.wanted and self._sink is None:
            runner = self._source.runner()
            if runner is not None:
                runner.wake(_BYTES)

    def fail(self, error: Exception) -> None:
        """No more bytes will arrive. Present and later readers get `error`."""
        self._error = error
        runner = self._source.runner()
        if runner is not None:
            runner.wake_with(_BYTES, error)

    @property
    def awaited(self) -> bool:
        runner = self._source.runner()
        return runner is not None and runner.waits_for(_BYTES)

    # For the handler.

    async def read(self, limit: int) -> bytes:
        if self._whole is None:
            self._whole = await self._collect(limit)
        if len(self._whole) > limit:
            raise BodyTooLarge(f"the body is over {limit} bytes")
        return self._whole

    async def _collect(self, limit: int) -> bytes:
        if self._spent:
            raise RuntimeError("the body has already been read in pieces")
        if self._length is not None and self._length > limit:
            raise BodyTooLarge(f"the body is over {limit} bytes")
        while not self.complete and self.buffered <= limit:
            await self._more()
        if self.buffered > limit:
            raise BodyTooLarge(f"the body is over {limit} bytes")
        whole = b"".join(self._pieces)
        self._pieces.clear()
        return whole

    async def chunks(self) -> AsyncIterator[bytes]:
        if self._whole is not None:
            yield self._whole
            return
        self._spent = True
        while True:
            while self._pieces:
                piece = self._pieces.popleft()
                self.buffered -= len(piece)
                yield piece
            if self.complete:
                return
            await self._more()

    async def _more(self) -> None:
        if self._error is not None:
            raise self._error
        runner = self._source.runner()
        if runner is None:
            raise RuntimeError("the request is over")
        self.wanted = True
        self._source.want_body()
        try:
            await runner.wait(_BYTES)
        finally:
            self.wanted = False

    # For the relay.

    def whole(self) -> bytes | None:
        """The whole body, if it is complete and can be sent more than once."""
        if self._whole is None and self.complete and not self._spent:
            self._whole = b"".join(self._pieces)
            self._pieces.clear()
        return self._whole

    @property
    def spent(self) -> bool:
        return self._spent

    def attach(self, sink: BodySink) -> list[bytes]:
        """Send later pieces to `sink` as they arrive; return the pieces that are here already."""
        self._sink = sink
        pieces = list(self._pieces)
        self._spent = self._spent or bool(pieces)
        self._pieces.clear()
        self.buffered = 0
        self.wanted = True
        self._source.want_body()
        return pieces

    def detach(self) -> None:
        self._sink = None
        self.wanted = False

    @property
    def error(self) -> Exception | None:
        return self._error


class WholeBody:
    """Implements `Body` for a body that arrived with its head: there is no wait."""

    __slots__ = ("_data", "length")

    complete = True
    spent = False

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.length = len(data)

    async def read(self, limit: int) -> bytes:
        if self.length > limit:
            raise BodyTooLarge(f"the body is over {limit} bytes")
        return self._data

    async def chunks(self) -> AsyncIterator[bytes]:
        yield self._data

    def whole(self) -> bytes:
        return self._data


class NoBody:
    """Implements `Body` for requests without one. It has no state, so one instance is enough."""

    __slots__ = ()
    length = 0
    complete = True
    spent = False

    async def read(self, limit: int) -> bytes:
        return b""

    async def chunks(self) -> AsyncIterator[bytes]:
        nothing: tuple[bytes, ...] = ()
        for piece in nothing:
            yield piece

    def whole(self) -> bytes:
        return b""


NO_BODY = NoBody()
AnyBody = RequestBody | WholeBody | NoBody
