"""Heads recognised by their template mean what the parser says they mean, or are not recognised."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.relay.fast_path import is_fast_path
from corral.relay.http1.fields import Malformed
from corral.relay.http1.head import RequestHead, RequestHeads
from corral.relay.http1.head_templates import HeadTemplates, fit_tail

POST = b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\nX-After: b\r\n\r\nhi"


def templates(*, head_bytes: int = 65536) -> HeadTemplates[RequestHead]:
    return HeadTemplates(RequestHeads(100), is_fast_path, head_bytes=head_bytes, twice=True)


def recognise(known: HeadTemplates[RequestHead], data: bytes) -> tuple[RequestHead, bytes, bytes] | None:
    """As the connections do, the second time: head, digits and body."""
    template, tail = known.recognise(data, known.find(data))
    if template is None or tail is None:
        return None
    digits, rest, body_at, request_id = tail
    assert request_id or template.tails[len(data)] is tail
    assert data.startswith(template.before + rest)
    return template.head, digits, data[body_at:]


def test_every_length_has_its_own_size() -> None:
    seen = {}
    for left in range(-3, 120_000):
        tail = fit_tail(left, b"\r\n\r\n", left + 4)
        if tail is not None:
            digits, _, body_at, _ = tail
            assert int(digits) + len(digits) == left
            assert body_at == left + 4 - int(digits)
            seen[int(digits)] = left
    assert sorted(seen) == list(range(1, len(seen) + 1))
    assert [left for left in range(2, 1100) if fit_tail(left, b"", left) is None] == [11, 102, 1003]


def test_a_head_is_recognised_with_another_length() -> None:
    known = templates()
    first = recognise(known, POST)
    again = recognise(known, POST.replace(b"Length: 2", b"Length: 12") + b"0123456789")
    assert first is not None
    assert again is not None
    assert first[0] is again[0]
    assert (first[1], first[2]) == (b"2", b"hi")
    assert (again[1], again[2]) == (b"12", b"hi0123456789")


HOP = b"POST /a HTTP/1.1\r\nhost: h\r\ncontent-length: 2\r\nx-request-id: 7-a\r\n\r\nhi"


def test_a_head_is_recognised_with_another_request_id() -> None:
    known = templates()
    assert known.find(HOP) is None
    template = known.find(HOP.replace(b"7-a", b"7-bc"))
    assert template is not None
    assert template.head.request_id == b"", "it belongs to the message, not to the head that all of them share"
    messages = [(b"7-bc", b"hi"), (b"7-cd", b"hi"), (b"x" * 128, b"hello"), (b"1", b"y" * 100_000), (b"12", b"no")]
    for request_id, body in messages * 2:
        data = HOP[:-2].replace(b"7-a", request_id).replace(b": 2", b": %d" % len(body)) + body
        same, tail = known.recognise(data, template)
        assert same is template
        assert tail is not None
        digits, _, body_at, seen_id = tail
        assert (digits, seen_id, data[body_at:]) == (b"%d" % len(body), request_id, body)
    assert len(template.tails) == 3, "messages that differ by their id alone are remembered as one"


@pytest.mark.parametrize(
    "data",
    [
        HOP[:-1],
        HOP + b"!",
        HOP.replace(b": 2", b": 02"),
        HOP.replace(b": 2", b": 3").replace(b"7-a", b"7-"),  # as long as the one that is known
        HOP.replace(b"7-a\r\n\r\n", b"7\r\n\r\n\r\n"),
        HOP.replace(b": 2", b": 0")[:-2],
        HOP.replace(b"7-a", b"7-a\r\nexpect: 100-continue"),
        HOP.replace(b"x-request-id: 7-a", b"transfer-encoding: chunked"),
        HOP.replace(b"x-request-id: 7-a", b"transfer-encoding: chunked\r\nx-request-id: 7-a"),
        HOP.replace(b"x-request-id: 7-a", b"content-length: 2\r\nx-request-id: 7-a"),
        HOP.replace(b"\r\nx-request-id", b"\nx-request-id"),
    ],
)
def test_an_odd_head_with_an_id_is_not_recognised(data: bytes) -> None:
    known = templates()
    assert recognise(known, HOP) is not None
    assert recognise(known, data) is None


def test_what_comes_once_is_not_kept() -> None:
    known = templates()
    assert known.find(POST) is None
    assert known.find(POST) is not None


@pytest.mark.parametrize(
    "data",
    [
        POST[:-1],  # the body is not all here
        POST + b"!",  # more than the body is
        POST.replace(b": 2", b": 02"),
        POST.replace(b": 2", b": +2"),
        POST.replace(b": 2", b": 2 "),
        POST.replace(b": 2", b":2"),
        POST.replace(b": 2\r\n", b": 2\n"),
        POST.replace(b"X-After: b", b"Content-Length: 2"),
        POST.replace(b"X-After: b", b"content-length: 2"),
        POST.replace(b"X-After: b", b"Transfer-Encoding: chunked"),
        POST.replace(b"X-After: b", b"Connection: close"),
        POST.replace(b"X-After: b", b"Expect: 100-continue"),
        POST.replace(b"X-After: b", b"Connection: Upgrade\r\nUpgrade: websocket"),
        POST.replace(b"X-After: b", b" folded"),
        POST.replace(b"HTTP/1.1", b"HTTP/1.0"),
        POST.replace(b"POST", b"HEAD"),
        POST.replace(b"Host: h\r\n", b""),
        POST.replace(b"Content-Length: 2\r\n", b""),
        POST.replace(b": 2", b": 0")[:-2],
        b"\r\n" + POST,
        b"GET /a HTTP/1.1\r\nHost: h\r\n\r\n",
    ],
)
def test_what_is_not_plain_is_not_recognised(data: bytes) -> None:
    known = templates()
    assert recognise(known, POST) is not None
    assert recognise(known, data) is None


def test_a_head_too_large_is_not_recognised() -> None:
    assert recognise(templates(head_bytes=len(POST) - 7), POST) is None


def test_what_strangers_send_is_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corral.relay.http1.head_templates.MAX_TAILS", 20)
    monkeypatch.setattr("corral.relay.http1.head_templates.MAX_TEMPLATES", 5)
    known = templates()
    held = []
    for number in range(100):
        data = POST.replace(b"/a", b"/%d" % (number % 7)).replace(b": 2", b": %d" % (2 + number)) + b"x" * number
        assert recognise(known, data) is not None
        held.append(known.find(data))
    different = {id(template): template for template in held if template is not None}
    assert sum(len(template.tails) for template in different.values()) <= 20
    assert recognise(known, POST.replace(b"X-After: b", b"X-After: " + b"b" * 3000)) is None


LINES = st.sampled_from(
    [
        b"Host: h",
        b"Content-Length: %d",
        b"content-length: %d",
        b"CONTENT-LENGTH: %d",
        b"Content-Length:%d",
        b"Transfer-Encoding: chunked",
        b"Connection: keep-alive",
        b"Connection: close",
        b"X-A: content-length: 5",
        b"X-Content-Length: 3",
        b"x-request-id: 7-a",
        b"X-Request-Id: b",
        b"bad line",
        b"",
    ]
)


SOUND = st.permutations([b"Host: h", b"Content-Length: %d", b"X-A: b", b"x-request-id: 7-a"])


@given(SOUND | st.lists(LINES, max_size=6), st.integers(0, 120), st.integers(-2, 2), st.sampled_from([b"1.1", b"1.0"]))
def test_what_is_recognised_is_what_the_parser_reads(lines: list[bytes], size: int, off: int, version: bytes) -> None:
    head = [b"POST /p HTTP/" + version, *(line % size if b"%" in line else line for line in lines)]
    data = b"\r\n".join(head) + b"\r\n\r\n" + b"x" * max(0, size + off)
    known = templates()
    for _ in range(2):  # the second time from memory
        found = recognise(known, data)
        if found is None:
            continue
        raw, _, body = data.partition(b"\r\n\r\n")
        try:
            parsed, length, _ = RequestHeads(100).read(raw)
        except Malformed:
            pytest.fail("a head was recognised that the parser refuses")
        assert (found[0].wire, int(found[1]), found[2]) == (parsed.wire, length, body)
        assert length == len(body) > 0
        assert is_fast_path(parsed)
