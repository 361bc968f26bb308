"""Heads: the strict grammar, what is kept and what is dropped, and a memory that changes nothing."""

from __future__ import annotations

import httptools
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from corral.contract.http import Strip
from corral.relay.http1.fields import FieldsWriter, Malformed, parse_fields, write_fields
from corral.relay.http1.head import (
    RequestHeads,
    ResponseHeads,
    error_body,
    is_invalid,
    is_valid_request_id,
    parse_request_line,
    parse_status_line,
    take_traceparent,
    write_refusal,
)


@pytest.mark.parametrize(
    ("line", "method", "path", "minor"),
    [
        (b"GET / HTTP/1.1", b"GET", b"/", 1),
        (b"POST /v1/chat/completions?x=%20 HTTP/1.0", b"POST", b"/v1/chat/completions?x=%20", 0),
        (b"OPTIONS * HTTP/1.1", b"OPTIONS", b"*", 1),
        (b"PATCH /a HTTP/1.1", b"PATCH", b"/a", 1),
        (b"GET http://a.example:80/b?c HTTP/1.1", b"GET", b"/b?c", 1),
        (b"GET HTTPS://a.example HTTP/1.1", b"GET", b"/", 1),
        (b"GET http://a.example?b HTTP/1.1", b"GET", b"/?b", 1),
    ],
)
def test_request_lines(line: bytes, method: bytes, path: bytes, minor: int) -> None:
    parsed = parse_request_line(line)
    assert (parsed.method, parsed.path, parsed.minor) == (method, path, minor)


@pytest.mark.parametrize(
    ("line", "status", "reason"),
    [
        (b"HTTP/1.1 200 OK", 200, b"OK"),
        (b"HTTP/1.1 200", 200, b"OK"),
        (b"HTTP/1.1 200 ", 200, b"OK"),
        (b"HTTP/1.0 404 Nicht da \xfc", 404, b"Nicht da \xfc"),
        (b"HTTP/1.1 799", 799, b"Status"),
    ],
)
def test_status_lines(line: bytes, status: int, reason: bytes) -> None:
    parsed = parse_status_line(line)
    assert (parsed.status, parsed.reason) == (status, reason)


@pytest.mark.parametrize("line", [b"HTTP/1.1 20 OK", b"HTTP/1.1  200 OK", b"HTTP/1.2 200 OK", b"ICY 200 OK", b""])
def test_bad_status_lines(line: bytes) -> None:
    with pytest.raises(Malformed):
        parse_status_line(line)


def block(*lines: bytes) -> bytes:
    return b"\r\n" + b"".join(line + b"\r\n" for line in lines)


def test_what_is_kept_and_what_is_dropped() -> None:
    fields = parse_fields(
        block(
            b"Host: a",
            b"Connection: X-One ,close,  x-TWO",
            b"X-One: 1",
            b"x-two: 2",
            b"X-Three: 3",
            b"Expect: 100-continue",
            b"X-Request-Id: r",
            b"Content-Length: 3",
        ),
        20,
    )
    assert fields.headers == ((b"host", b"a"), (b"x-three", b"3"))
    assert fields.wire == b"Host: a\r\nX-Three: 3\r\n"
    assert (fields.close, fields.keep_alive, fields.length, fields.expect) == (True, False, 3, b"100-continue")
    assert (fields.request_id, fields.upgrade) == (b"r", b"")


def test_no_fields_at_all() -> None:
    fields = parse_fields(b"\r\n", 10)
    assert (fields.headers, fields.wire, fields.host, fields.length) == ((), b"", None, None)


def test_upgrade_counts_only_where_connection_says_so() -> None:
    assert parse_fields(block(b"Upgrade: websocket"), 10).upgrade == b""
    assert parse_fields(block(b"Connection: UPGRADE", b"Upgrade: WebSocket"), 10).upgrade == b"websocket"


def test_stripping_is_remembered_by_identity() -> None:
    fields = parse_fields(block(b"Authorization: x", b"X-Corral-A: y", b"X-B: z"), 10)
    strip = Strip(names=[b"Authorization"], prefixes=[b"X-Corral-"])
    for _ in range(2):
        assert fields.wire_without(strip) == b"X-B: z\r\n"
    assert fields.wire_without(Strip()) == fields.wire
    assert fields.wire_without(frozenset([b"x-b"])) == b"Authorization: x\r\nX-Corral-A: y\r\n"


def test_ways_of_stripping_are_not_remembered_without_end() -> None:
    fields = parse_fields(block(b"A: x"), 10)
    for number in range(100):
        assert fields.wire_without(Strip(names=[b"n%d" % number])) == b"A: x\r\n"
    assert len(fields._prepared) <= 16


def test_writing_fields() -> None:
    assert write_fields(((b"a", b"1"), (b"b", b""))) == b"a: 1\r\nb: \r\n"
    assert write_fields([]) == b""
    for bad in (b"\r", b"\n", b"\r\n", b"\0"):
        for pair in ((b"a" + bad, b"x"), (b"a", b"x" + bad)):
            with pytest.raises(ValueError, match="line break"):
                write_fields([pair])


def test_a_writer_remembers_a_bounded_number_of_tuples() -> None:
    writer = FieldsWriter(capacity=4)
    for number in range(20):
        headers = ((b"a", b"%d" % number),)
        assert writer.write(headers) == writer.write(headers) == writer.write(list(headers)) == b"a: %d\r\n" % number
    assert len(writer._written) <= 4


def test_hopeless_heads() -> None:
    for bad in (b"GET /\n", b"GET /\rX", b"\x00", b"GET / HTTP/1.1\r\n\n", b"\x7f"):
        assert is_invalid(bad, 0)
    for fine in (b"", b"GET /", b"GET / HTTP/1.1\r", b"GET / HTTP/1.1\r\nHost: \t\xff"):
        assert not is_invalid(fine, 0)
    assert is_invalid(b"GET /\rX", 6)  # the CR was the last byte seen: still half of nothing


@pytest.mark.parametrize("value", [b"a", b"0-9._:@/+=", b"x" * 128])
def test_sane_request_ids(value: bytes) -> None:
    assert is_valid_request_id(value)


@pytest.mark.parametrize("value", [b"", b"a b", b"a\xe9", b"x" * 129, b"<a>", b'"'])
def test_insane_request_ids(value: bytes) -> None:
    assert not is_valid_request_id(value)


def test_refusals_are_whole_answers() -> None:
    out = write_refusal(431, "the head is too large")
    head, _, body = out.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
    assert b"content-length: %d" % len(body) in head
    assert b"\r\nconnection: close" in head
    assert body == error_body(431, "the head is too large")


# The memory


NAMES = st.sampled_from(
    [b"X-A", b"x-b", b"Accept", b"Connection", b"Transfer-Encoding", b"Content-Length", b"Host", b"TE"]
)
VALUES = st.sampled_from(
    [b"", b"a", b"close", b"keep-alive", b"chunked", b"0", b"5", b"05", b"12, 12", b"gzip", b" 7 "]
)
SPELL = st.sampled_from([b"%b: %b", b"%b:%b", b"%b:  %b ", b"%b : %b"])


@st.composite
def heads(draw: st.DrawFn) -> bytes:
    lines = [draw(st.sampled_from([b"GET / HTTP/1.1", b"POST /x HTTP/1.1", b"POST /x HTTP/1.0"]))]
    for _ in range(draw(st.integers(0, 5))):
        name = draw(NAMES)
        spelt = draw(st.sampled_from([name, name.lower(), name.upper(), name.title()]))
        lines.append(draw(SPELL) % (spelt, draw(VALUES)))
    return b"\r\n".join(lines)


def outcome(parser: RequestHeads, raw: bytes) -> object:
    try:
        head, length = parser.parse(raw)
    except Malformed as bad:
        return bad.status
    return head.method, head.path, head.minor, head.keep, head.chunked, length, head.fields.headers, head.wire


@settings(max_examples=500)
@given(st.lists(heads(), min_size=1, max_size=6))
def test_what_was_seen_before_changes_nothing(raws: list[bytes]) -> None:
    warm = RequestHeads(20)
    for raw in raws * 2:
        assert outcome(warm, raw) == outcome(RequestHeads(20), raw)


def test_the_length_is_taken_out_and_put_back() -> None:
    parser = RequestHeads(20)
    first, one = parser.parse(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nX: y")
    second, two = parser.parse(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 22\r\nX: y")
    assert (one, two) == (1, 22)
    assert first is second  # that is what the memory is for


@pytest.mark.parametrize(
    "fields",
    [
        b"Content-Length: 1\r\nContent-Length: 2",
        b"content-length: 1\r\nContent-Length: 2",
        b"Content-Length: 1\r\nCONTENT-LENGTH: 2",
        b"Content-Length: 1\r\nTransfer-Encoding: chunked",
        b"Content-Length: 1\r\n 2",
        b"X: y\r\n Content-Length: 1",
    ],
)
def test_taking_the_length_out_hides_nothing(fields: bytes) -> None:
    parser = RequestHeads(20)
    parser.parse(b"POST / HTTP/1.1\r\nHost: a")
    parser.parse(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2")
    parser.parse(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked")
    for _ in range(2):
        with pytest.raises(Malformed):
            parser.parse(b"POST / HTTP/1.1\r\nHost: a\r\n" + fields)


def test_memories_are_bounded_in_number_and_size() -> None:
    parser = RequestHeads(20)
    for number in range(3000):
        parser.parse(b"GET /%d HTTP/1.1\r\nHost: a\r\nX: %d" % (number, number))
    assert len(parser._heads) <= 1024
    assert len(parser._blocks) <= 1024
    parser = RequestHeads(20)
    parser.parse(b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 5000)
    assert not parser._heads
    assert not parser._blocks


def test_an_answers_head() -> None:
    head, length = ResponseHeads(20).parse(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nX: y\r\nConnection: close")
    assert (head.status, length, head.reusable, head.simple) == (200, 5, False, True)
    assert head.wire == b"HTTP/1.1 200 OK\r\nX: y\r\n"
    assert head.wire_without(frozenset([b"x"])) == b"HTTP/1.1 200 OK\r\n"


# Against another parser


class Llhttp:
    """What llhttp makes of a request."""

    def __init__(self, data: bytes) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = b""
        self.messages = 0
        self.failed = False
        self._inside_head = True
        self._parser = httptools.HttpRequestParser(self)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass
        except httptools.HttpParserError:
            self.failed = True
        self.method = self._parser.get_method()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._inside_head:
            self.headers.append((name.lower(), value.strip(b" \t")))

    def on_headers_complete(self) -> None:
        self._inside_head = False

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.messages += 1


BYTES = st.sampled_from(
    [b"\r", b"\n", b"\r\n", b"\0", b"\x0b", b" ", b"\t", b":", b",", b";", b"\x7f", b"\xff", b"0", b"x"]
)


@settings(max_examples=1500)
@given(heads(), st.lists(st.tuples(st.integers(0, 200), BYTES), max_size=3))
def test_what_we_accept_llhttp_reads_the_same_way(raw: bytes, changes: list[tuple[int, bytes]]) -> None:
    for at, new in changes:
        raw = raw[: at % (len(raw) + 1)] + new + raw[at % (len(raw) + 1) :]
    assume(b"\r\n\r\n" not in raw)
    try:
        head, length = RequestHeads(20).parse(raw)
    except Malformed:
        return
    tail = b"0\r\n\r\n" if head.chunked else b"b" * (length or 0)
    assume(len(tail) < 10_000)
    theirs = Llhttp(raw + b"\r\n\r\n" + tail)
    assert not theirs.failed, raw
    ours = [pair for pair in head.fields.headers if pair[0] != b"host"]
    assert [pair for pair in theirs.headers if pair in ours] == ours
    if not theirs._parser.should_upgrade():
        assert theirs.messages == 1
        assert theirs.body == (b"" if head.chunked else tail)


PARENT = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
TRACED = b"POST / HTTP/1.1\r\nHost: h\r\n%bContent-Length: 2\r\nx-request-id: 1\r\n\r\nhi"


@pytest.mark.parametrize("name", [b"traceparent", b"Traceparent"])
def test_the_traceparent_is_taken_out_of_a_head(name: bytes) -> None:
    line = name + b": " + PARENT + b"\r\n"
    assert take_traceparent(TRACED % line, 2048) == (TRACED % b"", PARENT)
    last = b"GET / HTTP/1.1\r\nHost: h\r\n%b\r\n"
    assert take_traceparent(last % line, 2048) == (last % b"", PARENT)


@pytest.mark.parametrize(
    "message",
    [
        TRACED % b"",
        TRACED % (b"traceparent: " + PARENT.upper() + b"\r\n"),
        TRACED % (b"traceparent: " + PARENT + b"-more\r\n"),
        TRACED % (b"traceparent:" + PARENT + b"\r\n"),
        TRACED % (b"x-traceparent: " + PARENT + b"\r\n"),
        TRACED[:-2] % b"" + b"traceparent: " + PARENT + b"\r\n",
        TRACED[:-2] % b"" + b"\r\ntraceparent: " + PARENT + b"\r\n",
        b"traceparent: " + PARENT + b"\r\n\r\n",
        TRACED % (b"x: " + b"y" * 3000 + b"\r\ntraceparent: " + PARENT + b"\r\n"),
    ],
    ids=["none", "capitals", "more", "no blank", "another name", "in the body", "later in the body", "first", "far"],
)
def test_no_other_bytes_are_taken_for_a_traceparent(message: bytes) -> None:
    assert take_traceparent(message, 2048) == (message, b"")


def test_a_head_gets_its_traceparent_back() -> None:
    raw = b"POST /a HTTP/1.1\r\nHost: h\r\nCookie: c\r\nX-A: b\r\nConnection: X-A"
    shared, _ = RequestHeads(20).parse(raw)
    shared.fields.notes["derived"] = True
    hidden = Strip((b"cookie",))
    assert shared.fields.wire_without(hidden) == b"Host: h\r\n"
    own = shared.with_traceparent(PARENT)
    parsed, _ = RequestHeads(20).parse(raw + b"\r\ntraceparent: " + PARENT)
    assert (own.wire, own.headers, own.keep, own.method) == (parsed.wire, parsed.headers, parsed.keep, parsed.method)
    assert own.fields.wire_without(hidden) == parsed.fields.wire_without(hidden)
    assert own.fields.notes == {}
    assert b"traceparent" not in dict(shared.headers)
    assert b"traceparent" not in shared.wire + shared.fields.wire_without(hidden)
