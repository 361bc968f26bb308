"""Requests by ASGI for handlers that know only the relay's; and who may come in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from corral.contract.http import BodyTooLarge, Request
from corral.controller.localai.asgi import AsgiResponder, answer, raw_path
from tests.support.waiting import DEADLINE_S, until

Handle = Callable[[Request, AsgiResponder], Awaitable[None]]


@dataclass
class Client:
    """One request, seen from the server's side of the wire."""

    body: list[bytes] = field(default_factory=lambda: [b""])
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    got: list[MutableMapping[str, Any]] = field(default_factory=list)
    left: asyncio.Event = field(default_factory=asyncio.Event)

    async def receive(self) -> MutableMapping[str, Any]:
        if self.body:
            piece = self.body.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(self.body)}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, event: MutableMapping[str, Any]) -> None:
        self.got.append(event)

    async def ask(self, handle: Handle, path: bytes = b"/replicas/p/v1/x?a=%2F") -> None:
        scope = {"type": "http", "method": "POST", "headers": self.headers, "raw_path": path, "path": "-"}
        await answer(scope, self.receive, self.send, path, handle)

    @property
    def text(self) -> bytes:
        return b"".join(event.get("body", b"") for event in self.got[1:])


async def test_a_body_is_read_and_an_answer_comes_back() -> None:
    async def echo(request: Request, responder: AsgiResponder) -> None:
        assert request.path == b"/replicas/p/v1/x?a=%2F"
        assert request.headers == [(b"x-a", b"1")]
        whole = await request.body.read(100)
        assert whole == await request.body.read(100)
        await responder.send(201, ((b"x-b", b"2"),), whole)

    client = Client([b"ab", b"c"], [(b"x-a", b"1"), (b"content-length", b"3"), (b"connection", b"x")])
    await client.ask(echo)
    assert client.got[0]["status"] == 201
    assert client.got[0]["headers"] == [(b"x-b", b"2"), (b"content-length", b"3")]
    assert client.text == b"abc"


@pytest.mark.parametrize("headers", [[(b"content-length", b"11")], [(b"transfer-encoding", b"chunked")]])
async def test_a_body_above_the_limit_is_refused(headers: list[tuple[bytes, bytes]]) -> None:
    async def refuse(request: Request, responder: AsgiResponder) -> None:
        with pytest.raises(BodyTooLarge):
            await request.body.read(10)
        await responder.send(413, (), b"")

    client = Client([b"x" * 6, b"x" * 5], headers)
    await client.ask(refuse)
    assert client.got[0]["status"] == 413


async def test_whoever_leaves_ends_the_stream_and_what_feeds_it() -> None:
    ended = asyncio.Event()

    async def pieces() -> AsyncIterator[bytes]:
        try:
            yield b"one"
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def stream(request: Request, responder: AsgiResponder) -> None:
        await request.body.read(10)
        await responder.stream(200, (), pieces())

    client = Client()
    asking = asyncio.create_task(client.ask(stream))
    await until(lambda: client.text == b"one", "first piece")
    client.left.set()
    await asyncio.wait_for(asking, DEADLINE_S)
    assert ended.is_set()


async def test_an_answer_that_breaks_off_is_not_ended() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"one"
        raise RuntimeError("broken")

    async def stream(request: Request, responder: AsgiResponder) -> None:
        await responder.stream(200, (), pieces())

    client = Client()
    with pytest.raises(RuntimeError, match="broken"):
        await client.ask(stream)
    assert client.got[-1].get("more_body") is True, "so the server cuts the connection"


def test_the_raw_path_keeps_its_query() -> None:
    assert raw_path({"raw_path": b"/a%2Fb", "query_string": b"c=d", "path": "/a/b"}) == b"/a%2Fb?c=d"
    assert raw_path({"path": "/a", "query_string": b""}) == b"/a"
