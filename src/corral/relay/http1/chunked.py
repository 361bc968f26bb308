"""Chunked transfer encoding: decoded in requests, followed by httptools in responses. Pure.

Requests are decoded here because the exact end matters: the bytes after it belong to the next request. A response is
passed on unchanged and only scanned for its end, in C; single tokens of a stream do not even need the scanner.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import httptools

from corral.relay.http1.fields import Malformed

LAST_CHUNK = b"0\r\n\r\n"

_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:;[\t\x20-\x7e\x80-\xff]*)?")
_TRAILER = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t\x20-\x7e\x80-\xff]*")
MAX_SIZE_LINE_BYTES = 256
MAX_TRAILER_BYTES = 8192
_END = b"\r\n\r\n"


_MAX_TOKEN_BYTES = 2048


def frame(piece: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(piece), piece)


def _beginnings() -> list[bytes]:
    known = [b"\n"] * _MAX_TOKEN_BYTES  # matches no chunk: no chunk has 21 bytes in all, or fewer than six
    for size in range(1, _MAX_TOKEN_BYTES):
        line = b"%x\r\n" % size
        if len(line) + size + 2 < _MAX_TOKEN_BYTES:
            known[len(line) + size + 2] = line
    return known


_BEGINNINGS = _beginnings()  # by its whole length: how a chunk begins in the usual spelling


def is_whole_chunk(data: bytes) -> bool:
    """Whether these bytes, which follow a chunk's end or begin a body, are one whole chunk: a token. False for the last
    chunk, for unusual spellings and for several chunks: the scanner reads those. It takes 0.1 to 0.3 µs for any number
    of them, a loop here took 0.35 µs for each."""
    size = len(data)
    return size < _MAX_TOKEN_BYTES and data.startswith(_BEGINNINGS[size]) and data.endswith(b"\r\n")


class ChunkedDecoder:
    """Bytes in, pieces out. Trailers are checked and dropped: they are not vetted as headers."""

    __slots__ = ("_left", "_part", "_trailer_bytes", "_want", "done")

    def __init__(self) -> None:
        self.done = False
        self._want: _Step = ChunkedDecoder._size  # unbound: a bound method would make a cycle
        self._part = b""
        self._left = 0
        self._trailer_bytes = 0

    def feed(self, data: bytes) -> tuple[list[bytes], bytes]:
        """Return the pieces in `data` and, once done, the bytes after the body. Raises `Malformed`."""
        if self._part:
            data, self._part = self._part + data, b""
        pieces: list[bytes] = []
        at = 0
        while not self.done and at < len(data):
            step = self._want(self, data, at, pieces)
            if step < 0:
                self._part = data[at:]
                return pieces, b""
            at = step
        return pieces, data[at:] if self.done else b""

    def _size(self, data: bytes, at: int, _pieces: list[bytes]) -> int:
        line, after = self._line(data, at, MAX_SIZE_LINE_BYTES)
        if line is None:
            return -1
        match = _SIZE.fullmatch(line)
        if match is None:
            raise Malformed(400, "malformed chunk size")
        self._left = int(match[1], 16)
        self._want = ChunkedDecoder._data if self._left else ChunkedDecoder._trailer
        return after

    def _data(self, data: bytes, at: int, pieces: list[bytes]) -> int:
        piece = data[at : at + self._left]
        pieces.append(piece)
        self._left -= len(piece)
        if not self._left:
            self._want = ChunkedDecoder._data_end
        return at + len(piece)

    def _data_end(self, data: bytes, at: int, _pieces: list[bytes]) -> int:
        end = data[at : at + 2]
        if end == b"\r\n":
            self._want = ChunkedDecoder._size
            return at + 2
        if end == b"\r":
            return -1
        raise Malformed(400, "chunk longer than its size")

    def _trailer(self, data: bytes, at: int, _pieces: list[bytes]) -> int:
        line, after = self._line(data, at, MAX_TRAILER_BYTES)
        if line is None:
            return -1
        self._trailer_bytes += len(line) + 2
        if not line:
            self.done = True
        elif self._trailer_bytes > MAX_TRAILER_BYTES or not _TRAILER.fullmatch(line):
            raise Malformed(400, "malformed trailer")
        return after

    def _line(self, data: bytes, at: int, longest: int) -> tuple[bytes | None, int]:
        end = data.find(b"\r\n", at)
        if end >= 0:
            return data[at:end], end + 2
        part = data[at:]
        # A lone LF or CR never becomes a line end: refuse now instead of waiting for more bytes.
        if len(part) > longest or b"\n" in part or b"\r" in part[:-1]:
            raise Malformed(400, "malformed chunk")
        return None, at


_Step = Callable[[ChunkedDecoder, bytes, int, list[bytes]], int]


class ChunkScanner:
    """Follows chunked responses on one connection, one after another, and finds the end of each."""

    __slots__ = ("_more", "_parser", "_tail", "complete")

    _HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"

    def __init__(self) -> None:
        self.complete = False
        self._more = False
        self._tail = b""
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)

    def start(self) -> None:
        """The bytes fed next are the first of a chunked body."""
        self.complete = self._more = False
        self._tail = b""
        if self._parser is None:
            self._parser = httptools.HttpResponseParser(self)
        self._parser.feed_data(self._HEAD)

    def feed(self, data: bytes) -> None:
        """Sets `complete` at the end of the body. Raises `Malformed` on bad framing and on bytes after the end."""
        assert self._parser is not None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise Malformed(502, "malformed chunked response") from error
        self._tail = data[-5:] if len(data) >= 5 else (self._tail + data)[-5:]
        # httptools skips line ends between messages; passed on, they would precede the client's next response.
        if self.complete and (self._more or self._tail[1:] != _END or self._tail[0] in b"\r\n"):
            raise Malformed(502, "bytes after the end of a chunked response")

    def release(self) -> None:
        """Break the reference cycle between parser and scanner, so that neither waits for the garbage collector."""
        self._parser = None

    def on_message_begin(self) -> None:
        self._more = self.complete

    def on_message_complete(self) -> None:
        self.complete = True


class PieceScanner(ChunkScanner):
    """A scanner that keeps the body's pieces: for a tap, or for a client of HTTP/1.0."""

    __slots__ = ("pieces",)

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[bytes] = []

    def on_body(self, piece: bytes) -> None:
        self.pieces.append(piece)

    def take(self) -> list[bytes]:
        pieces, self.pieces = self.pieces, []
        return pieces


class Scanners:
    """The scanners of one connection, made when they are first needed."""

    __slots__ = ("_pieces", "_plain")

    def __init__(self) -> None:
        self._plain: ChunkScanner | None = None
        self._pieces: PieceScanner | None = None

    def start(self, *, pieces: bool) -> ChunkScanner:
        """A scanner for the response whose first bytes arrive next."""
        scanner: ChunkScanner
        if pieces:
            scanner = self._pieces = self._pieces or PieceScanner()
        else:
            scanner = self._plain = self._plain or ChunkScanner()
        scanner.start()
        return scanner

    def release(self) -> None:
        for scanner in (self._plain, self._pieces):
            if scanner is not None:
                scanner.release()
