"""Heads of requests and responses: first lines, rules that span first line and fields, the relay's own heads. Pure.

A head is parsed once and cached: clients and upstreams repeat the same lines, so a repeated head costs one dictionary
lookup instead of one callback per header. The lines that differ from message to message are removed before the lookup:
Content-Length, and the request id where it is the last line, as the relay writes it.
"""

from __future__ import annotations

import copy
import re
from http import HTTPStatus
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from corral.contract.http import Headers, Patience, PreparedForward, Strip, Target
from corral.relay.http1.fields import MAX_LENGTH_DIGITS, Fields, LineReader, Malformed, parse_fields, write_fields

if TYPE_CHECKING:
    from corral.relay.pool import TargetPool

END_OF_HEAD = b"\r\n\r\n"
_LENGTH = b"content-length: "
_TRACEPARENT = b"traceparent"
ID_LINE = b"\r\nx-request-id: "  # as the relay writes it, the last line of a head; it differs in every message
MAX_CACHED = 1024
MAX_CACHED_BYTES = 4096

# An upstream may interpret an unknown method in its own way, and TRACE would show a client the headers that were added
# for the upstream alone, its credentials included.
_METHODS = frozenset((b"DELETE", b"GET", b"HEAD", b"OPTIONS", b"PATCH", b"POST", b"PUT"))
_REQUEST_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,32}) ([!-~]+) HTTP/(\d)\.(\d)")
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-9]\d\d)(?: ([\t\x20-\x7e\x80-\xff]*))?")
_ABSOLUTE = re.compile(rb"(?i:https?)://([^/?#]+)([/?].*)?")
_VALID_ID = re.compile(rb"[0-9A-Za-z._:@/+=-]{1,128}")
# Bytes that make an incomplete head unacceptable already. The last CR may be half of a CRLF.
_INVALID = re.compile(rb"(?<!\r)\n|\r(?!\n|\Z)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


class RequestLine(NamedTuple):
    method: bytes
    path: bytes
    minor: int  # HTTP/1.minor
    authority: bytes  # of an absolute target, else empty


class StatusLine(NamedTuple):
    status: int
    minor: int
    reason: bytes


class MessageHead:
    """A first line and its fields without Content-Length. Shared by all messages with the same head."""

    __slots__ = ("chunked", "fields", "length", "minor", "wire")

    def __init__(self, minor: int, fields: Fields, start: bytes) -> None:
        self.minor = minor
        self.fields = fields
        self.chunked = fields.chunked
        self.length = fields.length  # only where its spelling kept it from being removed
        self.wire = start + fields.wire  # as it is passed on unchanged


class RequestHead(MessageHead):
    """Implements `KnownHead`."""

    __slots__ = ("expects", "headers", "keep", "method", "path", "request_id", "upgrade", "version")

    def __init__(self, line: RequestLine, fields: Fields) -> None:
        super().__init__(line.minor, fields, b"%b %b HTTP/1.1\r\n" % (line.method, line.path))
        if fields.host is None:
            self.wire = b""  # the exchange adds a Host first
        self.method = line.method
        self.path = line.path
        self.version = f"1.{line.minor}"
        self.keep = not fields.close if line.minor else fields.keep_alive
        self.expects = bool(fields.expect) and line.minor == 1
        self.upgrade = b"websocket" if line.minor and fields.upgrade == b"websocket" else b""
        self.request_id = fields.request_id if is_valid_request_id(fields.request_id) else b""
        self.headers: Headers = fields.headers

    def with_traceparent(self, value: bytes) -> RequestHead:
        """The head of a single request, from which `take_traceparent` removed this value. Of HTTP/1.1."""
        head = copy.copy(self)
        head.fields = self.fields.with_field(_TRACEPARENT, value)
        head.headers = head.fields.headers
        head.wire = self.wire[: len(self.wire) - len(self.fields.wire)] + head.fields.wire
        return head

    def prepare_forward(
        self,
        target: Target,
        *,
        path: bytes | None = None,
        strip: Strip | None = None,
        add: Headers = (),
        patience: Patience | None = None,
    ) -> PooledForward:
        if path is None:
            path = self.path
        lines = self.fields.wire if strip is None else self.fields.wire_without(strip)
        wire = b"%b %b HTTP/1.1\r\n%b%b%b" % (self.method, path, lines, write_fields(add), _LENGTH)
        forward = PooledForward(self, target, path, strip, add, patience, wire)
        forward.target_pool = None
        return forward


class PooledForward(PreparedForward):
    """A forward that also caches the connections to its target, to save the lookup per request."""

    __slots__ = ("target_pool",)
    head: RequestHead
    target_pool: TargetPool | None

    def with_traceparent(self, value: bytes, tag: object) -> PooledForward:
        lines = self.wire.removesuffix(_LENGTH)
        wire = b"%b%b: %b\r\n%b" % (lines, _TRACEPARENT, value, _LENGTH)
        forward = PooledForward(self.head, self.target, self.path, self.strip, self.add, self.patience, wire)
        forward.target_pool = self.target_pool
        forward.traceparent = value
        forward.tag = tag
        return forward


class ResponseHead(MessageHead):
    __slots__ = ("reusable", "simple", "start", "status")

    def __init__(self, line: StatusLine, fields: Fields) -> None:
        super().__init__(line.minor, fields, b"HTTP/1.1 %d %b\r\n" % (line.status, line.reason))
        self.start = self.wire + b"content-length: "  # as it is passed on with a known length
        self.status = line.status
        self.reusable = not fields.close if line.minor else fields.keep_alive
        self.simple = not fields.chunked and not has_no_body(
            line.status, b"GET"
        )  # Content-Length alone frames the body

    def wire_without(self, names: frozenset[bytes]) -> bytes:
        start = self.wire[: len(self.wire) - len(self.fields.wire)]
        return start + self.fields.wire_without(names)


def parse_request_line(line: bytes) -> RequestLine:
    match = _REQUEST_LINE.fullmatch(line)
    if match is None:
        raise Malformed(400, "malformed request line")
    method, target, major, minor = match.groups()
    if major != b"1" or minor not in b"01":
        raise Malformed(505, "only HTTP/1.0 and HTTP/1.1 are supported")
    authority = b""
    if target[:1] != b"/" and not (target == b"*" and method == b"OPTIONS"):
        absolute = _ABSOLUTE.fullmatch(target)
        if absolute is None:
            raise Malformed(400, "the target is neither a path nor a URL")
        authority, target = absolute[1], absolute[2] or b"/"
        if target[:1] == b"?":
            target = b"/" + target
    if b"#" in target:
        raise Malformed(400, "the target has a fragment")
    if method not in _METHODS:
        raise Malformed(501, "the method is not implemented")
    return RequestLine(method, target, int(minor), authority)


def parse_status_line(line: bytes) -> StatusLine:
    match = _STATUS_LINE.fullmatch(line)
    if match is None:
        raise Malformed(502, "malformed status line")
    status = int(match[2])
    return StatusLine(status, int(match[1]), match[3] or reason_of(status))


def is_invalid(head: bytes, start: int) -> bool:
    """True if an incomplete head can only be refused; the first `start` bytes were checked before."""
    return _INVALID.search(head, max(0, start - 1)) is not None


is_valid_request_id = _VALID_ID.fullmatch  # called for every request: its match is used as True


def remove_id(raw: bytes) -> tuple[bytes, bytes]:
    """The head without the request id, and the id; the head unchanged and b"" where it does not end with an id."""
    at = raw.rfind(ID_LINE)
    if at >= 0 and is_valid_request_id(request_id := raw[at + len(ID_LINE) :]):
        return raw[:at], request_id
    return raw, b""


_TRACEPARENT_LINE = re.compile(rb"\r\n[Tt]raceparent: (00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2})(?=\r\n)")
_TRACEPARENT_IN_LINE = b"raceparent: "


def take_traceparent(message: bytes, head_bytes: int) -> tuple[bytes, bytes]:
    """The message without its line `traceparent`, which differs in every message, and the value. The message unchanged
    and b"" where the first `head_bytes` of its head do not have one in the usual form."""
    at = message.find(_TRACEPARENT_IN_LINE, 0, head_bytes) - len(b"\r\nt")
    line = _TRACEPARENT_LINE.match(message, at) if at > 0 else None
    if line is None or message.find(END_OF_HEAD, 0, at + 2) >= 0:
        return message, b""
    return message[:at] + message[line.end() :], line[1]


H = TypeVar("H", bound=MessageHead)
T = TypeVar("T")


class HeadCache(Generic[H]):
    """Caches parsed heads and header blocks. Bounded: when full it is cleared, which costs a few parses."""

    __slots__ = ("_blocks", "_heads", "_lines", "_max_count")

    def __init__(self, max_count: int) -> None:
        self._max_count = max_count
        self._lines = LineReader()
        self._heads: dict[bytes, H] = {}
        self._blocks: dict[bytes, Fields] = {}

    def read(self, raw: bytes) -> tuple[H, int | None, bytes]:
        """`parse`, and the request id where the head ends with it; the shared head then does not contain it."""
        raw, request_id = remove_id(raw)
        head, length = self.parse(raw)
        return head, length, request_id

    def parse(self, raw: bytes) -> tuple[H, int | None]:
        """`raw` ends before CRLF CRLF. The length is None when none was declared. Raises `Malformed`."""
        known = self._heads.get(raw)
        if known is not None:
            return known, known.length
        # The two usual spellings; the parser finds any other.
        before, found, after = raw.partition(b"\r\nContent-Length: ")
        if not found:
            before, found, after = raw.partition(b"\r\ncontent-length: ")
        length = None
        if found:
            digits, line_end, after = after.partition(b"\r\n")
            if digits.isdigit() and len(digits) <= MAX_LENGTH_DIGITS:
                length = int(digits)
                raw = before + line_end + after
        head = self._heads.get(raw)
        if head is None:
            head = self._parse_new(raw)
        if length is None:
            return head, head.length
        if head.chunked or head.length is not None:
            raise Malformed(400, "the body's length is stated more than once")
        return head, length

    def _parse_new(self, raw: bytes) -> H:
        first = raw.find(b"\r\n")
        line, block = (raw[:first], raw[first:] + b"\r\n") if first >= 0 else (raw, b"\r\n")
        fields = self._blocks.get(block)
        if fields is None:
            fields = parse_fields(block, self._max_count, self._lines)
            if len(block) <= MAX_CACHED_BYTES:
                _cache(self._blocks, block, fields)
        head = self._make(line, fields)
        if len(raw) <= MAX_CACHED_BYTES:
            _cache(self._heads, raw, head)
        return head

    def _make(self, line: bytes, fields: Fields) -> H:
        raise NotImplementedError


def _cache(cache: dict[bytes, T], key: bytes, value: T) -> None:
    if len(cache) >= MAX_CACHED:
        cache.clear()
    cache[key] = value


class RequestHeads(HeadCache[RequestHead]):
    """Reads request heads for one server."""

    __slots__ = ()

    def _make(self, line: bytes, fields: Fields) -> RequestHead:
        first = parse_request_line(line)
        if fields.host is None:
            if first.minor:
                raise Malformed(400, "no Host")
        elif first.authority and first.authority != fields.host:
            raise Malformed(400, "Host is not the target's")
        if fields.chunked and not first.minor:
            raise Malformed(400, "Transfer-Encoding in HTTP/1.0")
        if fields.expect and fields.expect != b"100-continue":
            raise Malformed(417, "unknown expectation")
        return RequestHead(first, fields)


class ResponseHeads(HeadCache[ResponseHead]):
    """Reads response heads for one pool."""

    __slots__ = ()

    def _make(self, line: bytes, fields: Fields) -> ResponseHead:
        first = parse_status_line(line)
        if fields.chunked and not first.minor:
            raise Malformed(502, "Transfer-Encoding in HTTP/1.0")
        return ResponseHead(first, fields)


def reason_of(status: int) -> bytes:
    try:
        return HTTPStatus(status).phrase.encode()
    except ValueError:
        return b"Status"


def has_no_body(status: int, method: bytes) -> bool:
    """Responses that end with their head, whatever their fields say."""
    return method == b"HEAD" or status == 204 or status == 304 or status < 200


def error_body(status: int, message: str) -> bytes:
    """An error of the relay itself in the envelope of the OpenAI API. `message` is the relay's own: plain ASCII."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return b'{"error":{"code":%d,"message":"%b","type":"%b"}}' % (status, message.encode(), kind.encode())


def write_refusal(status: int, message: str, *, extra: bytes = b"") -> bytes:
    """A whole response to bytes that are not a request. The connection closes after it."""
    body = error_body(status, message)
    return (
        b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%bconnection: close\r\n\r\n"
        % (status, reason_of(status), len(body), extra)
    ) + body
