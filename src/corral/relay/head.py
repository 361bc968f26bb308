"""Heads of requests and answers: first lines, the rules that span line and fields, how ours are written. Pure.

A head is understood once and remembered: clients and upstreams say the same lines again and again, so a warm message
costs one dictionary lookup instead of one callback per header. The lines that differ from message to message are taken
out before the lookup: Content-Length, and the request's id where it stands last, as we write it.
"""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from corral.contract.http import Errand, Headers, Patience, Strip, Target
from corral.relay.fields import MOST_LENGTH_DIGITS, Fields, LineReader, Malformed, parse_fields, write_fields

if TYPE_CHECKING:
    from corral.relay.pool import Lane

END_OF_HEAD = b"\r\n\r\n"
ID_LINE = b"\r\nx-request-id: "  # as we write it, the last line of a head: from hop to hop each is another
_MOST_REMEMBERED = 1024
_LONGEST_REMEMBERED = 4096

# What is behind us may read an unknown method in its own way, and TRACE would show a client what was added for the
# upstream alone, its credentials included.
_METHODS = frozenset((b"DELETE", b"GET", b"HEAD", b"OPTIONS", b"PATCH", b"POST", b"PUT"))
_REQUEST_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,32}) ([!-~]+) HTTP/(\d)\.(\d)")
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-9]\d\d)(?: ([\t\x20-\x7e\x80-\xff]*))?")
_ABSOLUTE = re.compile(rb"(?i:https?)://([^/?#]+)([/?].*)?")
_SANE_ID = re.compile(rb"[0-9A-Za-z._:@/+=-]{1,128}")
# In a head still incomplete: what can never become one we accept. The last CR may be half of a CRLF.
_HOPELESS = re.compile(rb"(?<!\r)\n|\r(?!\n|\Z)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


class RequestLine(NamedTuple):
    method: bytes
    path: bytes
    minor: int  # HTTP/1.minor
    authority: bytes  # of an absolute target, else empty


class StatusLine(NamedTuple):
    status: int
    minor: int
    reason: bytes


class Head:
    """A first line and its fields, less the Content-Length. Shared by all messages that say the same."""

    __slots__ = ("chunked", "fields", "length", "minor", "wire")

    def __init__(self, minor: int, fields: Fields, start: bytes) -> None:
        self.minor = minor
        self.fields = fields
        self.chunked = fields.chunked
        self.length = fields.length  # where it was spelt so that it could not be taken out
        self.wire = start + fields.wire  # as it is passed on when nobody changes it


class RequestHead(Head):
    """Implements `KnownHead`."""

    __slots__ = ("expects", "headers", "keep", "method", "path", "request_id", "upgrade", "version")

    def __init__(self, line: RequestLine, fields: Fields) -> None:
        super().__init__(line.minor, fields, b"%b %b HTTP/1.1\r\n" % (line.method, line.path))
        if fields.host is None:
            self.wire = b""  # one has to be found first
        self.method = line.method
        self.path = line.path
        self.version = f"1.{line.minor}"
        self.keep = not fields.close if line.minor else fields.keep_alive
        self.expects = bool(fields.expect) and line.minor == 1
        self.upgrade = b"websocket" if line.minor and fields.upgrade == b"websocket" else b""
        self.request_id = fields.request_id if is_sane_request_id(fields.request_id) else b""
        self.headers: Headers = fields.headers

    def errand(
        self,
        target: Target,
        *,
        path: bytes | None = None,
        strip: Strip | None = None,
        add: Headers = (),
        patience: Patience | None = None,
    ) -> PooledErrand:
        if path is None:
            path = self.path
        lines = self.fields.wire if strip is None else self.fields.wire_without(strip)
        wire = b"%b %b HTTP/1.1\r\n%b%bcontent-length: " % (self.method, path, lines, write_fields(add))
        errand = PooledErrand(self, target, path, strip, add, patience, wire)
        errand.lane = None
        return errand


class PooledErrand(Errand):
    """With a place for where its connections are, so that they need not be looked up for every request."""

    __slots__ = ("lane",)
    head: RequestHead
    lane: Lane | None


class AnswerHead(Head):
    __slots__ = ("reusable", "simple", "start", "status")

    def __init__(self, line: StatusLine, fields: Fields) -> None:
        super().__init__(line.minor, fields, b"HTTP/1.1 %d %b\r\n" % (line.status, line.reason))
        self.start = self.wire + b"content-length: "  # as it is passed on when the length is known
        self.status = line.status
        self.reusable = not fields.close if line.minor else fields.keep_alive
        self.simple = not fields.chunked and not has_no_body(line.status, b"GET")  # the length alone says what follows

    def wire_without(self, names: frozenset[bytes]) -> bytes:
        start = self.wire[: len(self.wire) - len(self.fields.wire)]
        return start + self.fields.wire_without(names)


def parse_request_line(line: bytes) -> RequestLine:
    match = _REQUEST_LINE.fullmatch(line)
    if match is None:
        raise Malformed(400, "malformed request line")
    method, target, major, minor = match.groups()
    if major != b"1" or minor not in b"01":
        raise Malformed(505, "only HTTP/1.0 and HTTP/1.1 are spoken here")
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


def is_hopeless(head: bytes, start: int) -> bool:
    """True if a head not yet whole can only be refused; `start` bytes of it have been looked at before."""
    return _HOPELESS.search(head, max(0, start - 1)) is not None


is_sane_request_id = _SANE_ID.fullmatch  # called for every request: what it finds is as good as True


def take_out_id(raw: bytes) -> tuple[bytes, bytes]:
    """A head without the request's id, and that; as it is, and nothing, where it does not end with one."""
    at = raw.rfind(ID_LINE)
    if at >= 0 and is_sane_request_id(request_id := raw[at + len(ID_LINE) :]):
        return raw[:at], request_id
    return raw, b""


H = TypeVar("H", bound=Head)
T = TypeVar("T")


class HeadMemo(Generic[H]):
    """Heads and blocks of fields seen before. Bounded; when full it starts afresh, which costs a few parses."""

    __slots__ = ("_blocks", "_heads", "_lines", "_max_count")

    def __init__(self, max_count: int) -> None:
        self._max_count = max_count
        self._lines = LineReader()
        self._heads: dict[bytes, H] = {}
        self._blocks: dict[bytes, Fields] = {}

    def read(self, raw: bytes) -> tuple[H, int | None, bytes]:
        """`parse`, and the request's id where the head ends with it: then the head itself does not have it."""
        raw, request_id = take_out_id(raw)
        head, length = self.parse(raw)
        return head, length, request_id

    def parse(self, raw: bytes) -> tuple[H, int | None]:
        """`raw` ends before CRLF CRLF. The length is None when none was declared. Raises `Malformed`."""
        known = self._heads.get(raw)
        if known is not None:
            return known, known.length
        # The two spellings nearly everybody uses; any other is found by the parser.
        before, found, after = raw.partition(b"\r\nContent-Length: ")
        if not found:
            before, found, after = raw.partition(b"\r\ncontent-length: ")
        length = None
        if found:
            digits, line_end, after = after.partition(b"\r\n")
            if digits.isdigit() and len(digits) <= MOST_LENGTH_DIGITS:
                length = int(digits)
                raw = before + line_end + after
        head = self._heads.get(raw)
        if head is None:
            head = self._learn(raw)
        if length is None:
            return head, head.length
        if head.chunked or head.length is not None:
            raise Malformed(400, "more than one statement of the body's length")
        return head, length

    def _learn(self, raw: bytes) -> H:
        first = raw.find(b"\r\n")
        line, block = (raw[:first], raw[first:] + b"\r\n") if first >= 0 else (raw, b"\r\n")
        fields = self._blocks.get(block)
        if fields is None:
            fields = parse_fields(block, self._max_count, self._lines)
            if len(block) <= _LONGEST_REMEMBERED:
                _remember(self._blocks, block, fields)
        head = self._make(line, fields)
        if len(raw) <= _LONGEST_REMEMBERED:
            _remember(self._heads, raw, head)
        return head

    def _make(self, line: bytes, fields: Fields) -> H:
        raise NotImplementedError


def _remember(memo: dict[bytes, T], key: bytes, value: T) -> None:
    if len(memo) >= _MOST_REMEMBERED:
        memo.clear()
    memo[key] = value


class RequestHeads(HeadMemo[RequestHead]):
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


class AnswerHeads(HeadMemo[AnswerHead]):
    """Reads heads of answers for one pool."""

    __slots__ = ()

    def _make(self, line: bytes, fields: Fields) -> AnswerHead:
        first = parse_status_line(line)
        if fields.chunked and not first.minor:
            raise Malformed(502, "Transfer-Encoding in HTTP/1.0")
        return AnswerHead(first, fields)


def reason_of(status: int) -> bytes:
    try:
        return HTTPStatus(status).phrase.encode()
    except ValueError:
        return b"Status"


def has_no_body(status: int, method: bytes) -> bool:
    """Answers that end with their head, whatever their fields say."""
    return method == b"HEAD" or status == 204 or status == 304 or status < 200


def error_body(status: int, message: str) -> bytes:
    """What the relay itself has to say, in the shape clients of the OpenAI API read. `message` is ours: plain ASCII."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return b'{"error":{"code":%d,"message":"%b","type":"%b"}}' % (status, message.encode(), kind.encode())


def write_refusal(status: int, message: str, *, extra: bytes = b"") -> bytes:
    """A whole answer to a request that never became one. The connection closes after it."""
    body = error_body(status, message)
    return (
        b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%bconnection: close\r\n\r\n"
        % (status, reason_of(status), len(body), extra)
    ) + body
