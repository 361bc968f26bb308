"""Header blocks: a strict grammar, and the fields that the relay itself needs. Pure.

The grammar is stricter than most parsers': CRLF only, no folding, no space before the colon, no control characters.
A header that two parsers could read differently is refused: the upstream may use the other parser.
"""

from __future__ import annotations

import copy
import re
from typing import NamedTuple

from corral.contract.http import Headers, Strip

_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([\t\x20-\x7e\x80-\xff]*)")
_HOST = re.compile(rb"[0-9A-Za-z._~%!$&'()*+;=:\[\]-]{1,512}")
MAX_LENGTH_DIGITS = 18  # fits 63 bits in every upstream's language
MAX_PREPARED = 16
MAX_CACHED_LINES = 4096
MAX_CACHED_LINE_BYTES = 512

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
# The relay writes these itself for each side and never passes them on.
_REWRITTEN = frozenset((b"content-length", b"expect", b"x-request-id"))
_NOT_PASSED_ON = HOP_BY_HOP | _REWRITTEN
_READ_BY_RELAY = _REWRITTEN | {b"connection", b"host", b"transfer-encoding", b"upgrade"}
# A client must not have these removed by naming them in Connection.
_NOT_NOMINABLE = frozenset((b"content-length", b"host"))


class Malformed(Exception):
    """Bytes that are not an acceptable HTTP message. `status` is for the response to the client."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class Fields:
    """One parsed header block. Shared by all messages with the same lines, so it never changes."""

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
        self.headers: tuple[tuple[bytes, bytes], ...] = ()  # the headers that are passed on, names in lower case
        self.wire = b""  # the same as lines, each with its CRLF
        self.host: bytes | None = None
        self.length: int | None = None
        self.chunked = False
        self.close = False
        self.keep_alive = False
        self.upgrade = b""
        self.expect = b""
        self.request_id = b""
        self.notes: dict[str, object] = {}  # belongs to the handlers
        self._lines: tuple[bytes, ...] = ()
        self._prepared: dict[object, bytes] = {}

    def wire_without(self, names: frozenset[bytes] | Strip) -> bytes:
        """The lines without some of them. Results are cached: a process strips in few different combinations."""
        wire = self._prepared.get(names)
        if wire is None:
            drops = names.drops if isinstance(names, Strip) else names.__contains__
            kept = (line for (name, _), line in zip(self.headers, self._lines, strict=True) if not drops(name))
            wire = b"".join(kept)
            if len(self._prepared) < MAX_PREPARED:
                self._prepared[names] = wire
        return wire

    def with_field(self, name: bytes, value: bytes) -> Fields:
        """The block of a single message, with one more header, which the relay passes on and does not read."""
        fields = copy.copy(self)
        line = write_fields(((name, value),))
        fields.headers = (*self.headers, (name, value))
        fields._lines = (*self._lines, line)
        fields.wire = self.wire + line
        fields.notes, fields._prepared = {}, {}
        return fields


class FieldLine(NamedTuple):
    """One parsed line of a block."""

    name: bytes
    value: bytes
    wire: bytes  # with its CRLF
    pair: tuple[bytes, bytes]
    is_dropped: bool  # not passed on, or rewritten
    is_read: bool  # the relay itself needs it


class LineReader:
    """Caches parsed lines: heads that are never the same still have most lines in common. Bounded."""

    __slots__ = ("_lines",)

    def __init__(self) -> None:
        self._lines: dict[bytes, FieldLine] = {}

    def read(self, line: bytes) -> FieldLine:
        known = self._lines.get(line)
        if known is None:
            known = _read_line(line)
            if len(line) <= MAX_CACHED_LINE_BYTES:
                if len(self._lines) >= MAX_CACHED_LINES:
                    self._lines.clear()
                self._lines[line] = known
        return known


def _read_line(line: bytes) -> FieldLine:
    match = _FIELD.fullmatch(line)
    if match is None:
        raise Malformed(400, "malformed header field")
    name, value = match[1].lower(), match[2].strip(b" \t")
    return FieldLine(name, value, line + b"\r\n", (name, value), name in _NOT_PASSED_ON, name in _READ_BY_RELAY)


def parse_fields(block: bytes, max_count: int, reader: LineReader | None = None) -> Fields:
    """`block` is CRLF followed by lines, each ended by CRLF. Raises `Malformed`."""
    fields = Fields()
    lines = block[2:-2].split(b"\r\n") if len(block) > 2 else []
    if len(lines) > max_count:
        raise Malformed(431, f"more than {max_count} header fields")
    read = (reader or LineReader()).read
    seen = [read(line) for line in lines]
    relevant = [line for line in seen if line.is_read]
    nominated: set[bytes] = set()
    for line in relevant:
        if line.name == b"connection":
            nominated.update(token.strip(b" \t").lower() for token in line.value.split(b","))
    _read_framing(fields, relevant)
    kept = [line for line in seen if not line.is_dropped]
    if nominated:
        if nominated & _NOT_NOMINABLE:
            raise Malformed(400, "Connection names a header that is not hop-by-hop")
        fields.close = b"close" in nominated
        fields.keep_alive = b"keep-alive" in nominated
        if b"upgrade" in nominated:
            fields.upgrade = b",".join(line.value for line in relevant if line.name == b"upgrade").lower()
        kept = [line for line in kept if line.name not in nominated]
    fields.headers = tuple([line.pair for line in kept])
    fields._lines = tuple([line.wire for line in kept])
    fields.wire = b"".join(fields._lines)
    return fields


def _read_framing(fields: Fields, relevant: list[FieldLine]) -> None:
    encodings = 0
    for line in relevant:
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
    if not value.isdigit() or len(value) > MAX_LENGTH_DIGITS:
        raise Malformed(400, "malformed Content-Length")
    return int(value)


def write_fields(headers: Headers) -> bytes:
    """The lines for a handler's headers. Raises ValueError on a line break in a header."""
    lines = b"".join([b"%b: %b\r\n" % pair for pair in headers])
    if lines.count(b"\n") != len(headers) or lines.count(b"\r") != len(headers) or b"\0" in lines:
        raise ValueError("a header contains a line break")
    return lines


class FieldsWriter:
    """`write_fields` with a cache for tuples: handlers add the same few headers to every request."""

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
