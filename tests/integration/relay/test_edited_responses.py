"""Responses that an editor decides about: the client receives one, whichever upstreams it comes from."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from corral.contract.http import Headers, Request, Responder, Target, UpstreamFailed
from corral.relay.http1.chunked import frame
from tests.support.relay import Client, Script, Served, rig

GET = b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST = b"0\r\n\r\n"


@dataclass
class Shout:
    """Edits 200s: upper case, and only after a full stop."""

    status: list[int] = field(default_factory=list)
    held: bytes = b""

    def head(self, status: int, headers: Headers) -> bool:
        self.status.append(status)
        return status == 200

    def data(self, chunk: bytes) -> bytes:
        if chunk == b"!":
            raise ValueError("the editor fails")
        done, stop, self.held = (self.held + chunk).rpartition(b".")
        return (done + stop).upper()


@dataclass
class Tap:
    raw: bool = True
    seen: list[bytes] = field(default_factory=list)

    def head(self, status: int, headers: Headers) -> None:
        self.seen.append(b"%d" % status)

    def data(self, chunk: bytes) -> None:
        self.seen.append(chunk)


class Continuing:
    """Continues with another request until a response is complete."""

    def __init__(self, tries: int = 3) -> None:
        self.target = Target()
        self.tries = tries
        self.editor, self.tap = Shout(), Tap()
        self.complete: list[bool] = []

    async def handle(self, request: Request, responder: Responder) -> None:
        result = await responder.relay(self.target, editor=self.editor, tap=self.tap)
        self.complete.append(result.complete)
        if self.editor.status[-1:] != [200] or result.client_gone:
            return
        while not self.complete[-1] and len(self.complete) < self.tries:
            self.editor.held = b""
            try:
                result = await responder.relay(
                    self.target, editor=self.editor, tap=self.tap, unwanted=lambda status, headers: True
                )
            except UpstreamFailed:
                break
            self.complete.append(result.complete)
        responder.end(b"end", complete=self.complete[-1])


def upstream(*responses: bytes) -> Script:
    """One response per connection, which then closes."""

    async def script(served: Served) -> None:
        await served.request()
        await served.send(responses[min(served.number, len(responses)) - 1])

    return script


async def relayed(*responses: bytes, asks: bytes = GET, handler: Continuing | None = None) -> tuple[Continuing, bytes]:
    """The whole of what the client reads, until its connection closes."""
    handler = handler or Continuing()
    async with rig(upstream(*responses), handler=handler) as r:
        handler.target = r.upstream.target
        client: Client = await r.client()
        await client.send(asks)
        if b"HTTP/1.1" in asks and handler.tries:
            return handler, (await client.answer()).body
        return handler, await client.rest()


async def test_an_edited_response_is_sent_as_the_editor_returns_it() -> None:
    handler, body = await relayed(CHUNKED + frame(b"one. t") + frame(b"wo. rest") + LAST)
    assert body == b"ONE. TWO.end"
    assert handler.complete == [True]
    assert handler.tap.seen == [b"200", b"ONE.", b" TWO."]


@pytest.mark.parametrize(
    "second",
    [
        CHUNKED + frame(b" three.") + LAST,
        b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n three.",
        b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n three.",
        b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n three.",
    ],
)
async def test_another_upstream_completes_what_the_first_broke_off(second: bytes) -> None:
    handler, body = await relayed(CHUNKED + frame(b"one. two. thr"), second)
    assert body == b"ONE. TWO. THREE.end"
    assert handler.complete == [False, True]


async def test_it_is_the_same_for_a_client_of_http_1_0() -> None:
    first, second = CHUNKED + frame(b"one. tw"), CHUNKED + frame(b"two.") + LAST
    handler, sent = await relayed(first, second, asks=b"GET /x HTTP/1.0\r\n\r\n")
    assert sent.partition(b"\r\n\r\n")[2] == b"ONE.TWO.end"
    assert b"transfer-encoding" not in sent.lower()
    assert handler.complete == [False, True]


async def test_a_length_that_the_upstream_declares_does_not_reach_the_client() -> None:
    handler, body = await relayed(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\none. two.")
    assert body == b"ONE. TWO.end"
    assert handler.complete == [True]


async def test_what_the_editor_refuses_is_passed_on_unchanged() -> None:
    handler, body = await relayed(b"HTTP/1.1 404 No\r\nContent-Length: 4\r\n\r\nno. ")
    assert body == b"no. "
    assert (handler.complete, handler.tap.seen) == ([True], [b"404", b"no. "])
    _, body = await relayed(b"HTTP/1.1 404 No\r\nTransfer-Encoding: chunked\r\n\r\n" + frame(b"no. ") + LAST)
    assert body == b"no. "


@pytest.mark.parametrize(
    "second",
    [b"", b"HTTP/1.1 500 No\r\nContent-Length: 2\r\n\r\nno", b"nonsense\r\n\r\n"],
)
async def test_what_nobody_completes_is_visibly_cut_off(second: bytes) -> None:
    handler = Continuing(tries=2)
    with pytest.raises(asyncio.IncompleteReadError) as cut:
        await relayed(CHUNKED + frame(b"one. two"), second, handler=handler)
    assert cut.value.partial == b""
    assert handler.complete[0] is False


async def test_an_editor_that_fails_cuts_the_response_off() -> None:
    with pytest.raises(asyncio.IncompleteReadError):
        await relayed(CHUNKED + frame(b"one. ") + frame(b"!") + frame(b"two.") + LAST)


async def test_the_connection_serves_the_next_request_as_ever() -> None:
    handler = Continuing()
    first = CHUNKED + frame(b"one. tw")
    async with rig(upstream(first, CHUNKED + frame(b"two.") + LAST), handler=handler) as r:
        handler.target = r.upstream.target
        client = await r.client()
        assert (await client.ask(GET)).body == b"ONE.TWO.end"
        handler.complete.clear()
        handler.editor = Shout()
        assert (await client.ask(GET)).body == b"TWO.end"
        assert len(r.upstream.connections) == 3
