"""Heads of requests and answers: first lines, the rules that span line and fields, how ours are written. Pure."""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import NamedTuple

from corral.relay.fields import Fields, FieldsMemo, Malformed

END_OF_HEAD = b"\r\n\r\n"
_MEMO_LINES = 1024
_LONGEST_MEMO_LINE = 512

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
    wire: bytes  # as it goes to the client, with CRLF


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
    return RequestLine(method, target, int(minor), authority)


def parse_status_line(line: bytes) -> StatusLine:
    match = _STATUS_LINE.fullmatch(line)
    if match is None:
        raise Malformed(502, "malformed status line")
    status = int(match[2])
    return StatusLine(status, int(match[1]), b"HTTP/1.1 %d %b\r\n" % (status, match[3] or reason_of(status)))


def is_hopeless(head: bytes, start: int) -> bool:
    """True if a head not yet whole can only be refused; `start` bytes of it have been looked at before."""
    return _HOPELESS.search(head, max(0, start - 1)) is not None


def is_sane_request_id(value: bytes) -> bool:
    return _SANE_ID.fullmatch(value) is not None


class RequestParser:
    """Reads request heads for one server."""

    __slots__ = ("_fields", "_lines")

    def __init__(self, max_count: int) -> None:
        self._fields = FieldsMemo(max_count)
        self._lines: dict[bytes, RequestLine] = {}

    def parse(self, data: bytes, end: int) -> tuple[RequestLine, Fields, int | None]:
        """`end` is where CRLF CRLF begins. The length is None when nothing was declared. Raises `Malformed`."""
        first = data.find(b"\r\n")
        raw = data[:first]
        line = self._lines.get(raw) or self._learn_line(raw)
        fields, length = self._fields.read(data[first : end + 2])
        if fields.host is None:
            if line.minor:
                raise Malformed(400, "no Host")
        elif line.authority and line.authority != fields.host:
            raise Malformed(400, "Host is not the target's")
        if fields.chunked and not line.minor:
            raise Malformed(400, "Transfer-Encoding in HTTP/1.0")
        if fields.expect and fields.expect != b"100-continue":
            raise Malformed(417, "unknown expectation")
        return line, fields, length

    def _learn_line(self, raw: bytes) -> RequestLine:
        line = parse_request_line(raw)
        if len(raw) <= _LONGEST_MEMO_LINE:
            if len(self._lines) >= _MEMO_LINES:
                self._lines.clear()
            self._lines[raw] = line
        return line


class AnswerParser:
    """Reads heads of answers for one pool."""

    __slots__ = ("_fields", "_lines")

    def __init__(self, max_count: int) -> None:
        self._fields = FieldsMemo(max_count)
        self._lines: dict[bytes, StatusLine] = {}

    def parse(self, data: bytes, end: int) -> tuple[StatusLine, Fields, int | None]:
        """As for requests. Raises `Malformed`."""
        first = data.find(b"\r\n")
        raw = data[:first]
        line = self._lines.get(raw) or self._learn_line(raw)
        fields, length = self._fields.read(data[first : end + 2])
        if fields.chunked and not line.minor:
            raise Malformed(502, "Transfer-Encoding in HTTP/1.0")
        return line, fields, length

    def _learn_line(self, raw: bytes) -> StatusLine:
        line = parse_status_line(raw)
        if len(self._lines) >= _MEMO_LINES:
            self._lines.clear()
        self._lines[raw] = line
        return line


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
