"""Header blocks: the strict grammar, and what a relay has to know of them. Pure.

The grammar is stricter than most parsers': CRLF only, no folding, no space before the colon, no control characters.
What two parsers could read differently is refused, because the one behind us may be the other parser.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from corral.contract.http import Headers, Strip

_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([\t\x20-\x7e\x80-\xff]*)")
_HOST = re.compile(rb"[0-9A-Za-z._~%!$&'()*+;=:\[\]-]{1,512}")
MOST_LENGTH_DIGITS = 18  # fits 63 bits in every language behind us
_MOST_REMEMBERED = 16
_MOST_LINES = 4096
_LONGEST_LINE = 512

HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"http2-settings",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
# Written anew by the relay for each side, so never passed on as they came.
_OURS = frozenset((b"content-length", b"expect", b"x-request-id"))
_STAYS = HOP_BY_HOP | _OURS
_COUNTS = _OURS | {b"connection", b"host", b"transfer-encoding", b"upgrade"}
# A client that has these removed by naming them in Connection is playing a game.
_NOT_NOMINABLE = frozenset((b"content-length", b"host"))


class Malformed(Exception):
    """Bytes that are no HTTP message we accept. `status` is what a client is told."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class Fields:
    """One header block, understood. Shared by every message that carries the same lines, so never changed."""

    __slots__ = (
        "_lines",
        "_prepared",
        "chunked",
        "close",
        "expect",
        "headers",
        "host",
        "keep_alive",
        "length",
        "notes",
        "request_id",
        "upgrade",
        "wire",
    )

    def __init__(self) -> None:
        self.headers: tuple[tuple[bytes, bytes], ...] = ()  # what is meant for the far end, names lower-case
        self.wire = b""  # the same as lines, each with its CRLF
        self.host: bytes | None = None
        self.length: int | None = None
        self.chunked = False
        self.close = False
        self.keep_alive = False
        self.upgrade = b""
        self.expect = b""
        self.request_id = b""
        self.notes: dict[str, object] = {}  # the handlers'
        self._lines: tuple[bytes, ...] = ()
        self._prepared: dict[object, bytes] = {}

    def wire_without(self, names: frozenset[bytes] | Strip) -> bytes:
        """The lines less some of them, remembered: there are few distinct ways in which a process strips."""
        wire = self._prepared.get(names)
        if wire is None:
            drops = names.drops if isinstance(names, Strip) else names.__contains__
            kept = (line for (name, _), line in zip(self.headers, self._lines, strict=True) if not drops(name))
            wire = b"".join(kept)
            if len(self._prepared) < _MOST_REMEMBERED:
                self._prepared[names] = wire
        return wire


class Line(NamedTuple):
    """One line of a block, understood by itself."""

    name: bytes
    value: bytes
    wire: bytes  # with its CRLF
    pair: tuple[bytes, bytes]
    stays: bool  # ends at this relay, or is written anew
    counts: bool  # says something to the relay itself


class LineReader:
    """Lines seen before are not read again: even heads that are never the same have most lines in common. Bounded."""

    __slots__ = ("_lines",)

    def __init__(self) -> None:
        self._lines: dict[bytes, Line] = {}

    def read(self, line: bytes) -> Line:
        known = self._lines.get(line)
        if known is None:
            known = _read_line(line)
            if len(line) <= _LONGEST_LINE:
                if len(self._lines) >= _MOST_LINES:
                    self._lines.clear()
                self._lines[line] = known
        return known


def _read_line(line: bytes) -> Line:
    match = _FIELD.fullmatch(line)
    if match is None:
        raise Malformed(400, "malformed header field")
    name, value = match[1].lower(), match[2].strip(b" \t")
    return Line(name, value, line + b"\r\n", (name, value), name in _STAYS, name in _COUNTS)


def parse_fields(block: bytes, max_count: int, reader: LineReader | None = None) -> Fields:
    """`block` is CRLF followed by lines, each ended by CRLF. Raises `Malformed`."""
    fields = Fields()
    lines = block[2:-2].split(b"\r\n") if len(block) > 2 else []
    if len(lines) > max_count:
        raise Malformed(431, f"more than {max_count} header fields")
    read = (reader or LineReader()).read
    seen = [read(line) for line in lines]
    telling = [line for line in seen if line.counts]
    nominated: set[bytes] = set()
    for line in telling:
        if line.name == b"connection":
            nominated.update(token.strip(b" \t").lower() for token in line.value.split(b","))
    _read_framing(fields, telling)
    kept = [line for line in seen if not line.stays]
    if nominated:
        if nominated & _NOT_NOMINABLE:
            raise Malformed(400, "Connection names a header that is not hop-by-hop")
        fields.close = b"close" in nominated
        fields.keep_alive = b"keep-alive" in nominated
        if b"upgrade" in nominated:
            fields.upgrade = b",".join(line.value for line in telling if line.name == b"upgrade").lower()
        kept = [line for line in kept if line.name not in nominated]
    fields.headers = tuple([line.pair for line in kept])
    fields._lines = tuple([line.wire for line in kept])
    fields.wire = b"".join(fields._lines)
    return fields


def _read_framing(fields: Fields, telling: list[Line]) -> None:
    encodings = 0
    for line in telling:
        name, value = line.name, line.value
        if name == b"content-length":
            if fields.length is not None:
                raise Malformed(400, "more than one Content-Length")
            fields.length = read_length(value)
        elif name == b"transfer-encoding":
            encodings += 1
            if encodings > 1 or value.lower() != b"chunked":
                raise Malformed(400, "Transfer-Encoding other than a single chunked")
            fields.chunked = True
        elif name == b"host":
            if fields.host is not None:
                raise Malformed(400, "more than one Host")
            if not _HOST.fullmatch(value):
                raise Malformed(400, "malformed Host")
            fields.host = value
        elif name == b"expect":
            fields.expect = value.lower()
        elif name == b"x-request-id" and not fields.request_id:
            fields.request_id = value
    if fields.chunked and fields.length is not None:
        raise Malformed(400, "both Content-Length and Transfer-Encoding")


def read_length(value: bytes) -> int:
    if not value.isdigit() or len(value) > MOST_LENGTH_DIGITS:
        raise Malformed(400, "malformed Content-Length")
    return int(value)


def write_fields(headers: Headers) -> bytes:
    """Lines of headers given by a handler. Raises ValueError on anything that could start another line."""
    lines = b"".join([b"%b: %b\r\n" % pair for pair in headers])
    if lines.count(b"\n") != len(headers) or lines.count(b"\r") != len(headers) or b"\0" in lines:
        raise ValueError("a header contains a line break")
    return lines


class FieldsWriter:
    """`write_fields` with a memory for tuples: handlers add the same few headers to every request."""

    __slots__ = ("_capacity", "_written")

    def __init__(self, capacity: int = 256) -> None:
        self._capacity = capacity
        self._written: dict[Headers, bytes] = {}

    def write(self, headers: Headers) -> bytes:
        if type(headers) is not tuple:
            return write_fields(headers)
        lines = self._written.get(headers)
        if lines is None:
            lines = write_fields(headers)
            if len(self._written) >= self._capacity:
                self._written.clear()
            self._written[headers] = lines
        return lines
