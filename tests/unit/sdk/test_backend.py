"""What the sdk does around an author's class."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator

import pytest

from corral.sdk import Backend, Chat, ChatMessage, Unsupported
from corral.sdk.backend import pieces
from corral.sdk.grpc_server import why_refused
from tests.support.waiting import DEADLINE_S


class Awaiting(Backend):
    def __init__(self) -> None:
        self.closed = False

    async def generate(self, chat: Chat) -> AsyncIterator[str]:
        try:
            for word in chat.text.split():
                yield word
        finally:
            self.closed = True


class Blocking(Backend):
    def __init__(self) -> None:
        self.closed = threading.Event()
        self.threads: set[int] = set()

    def generate(self, chat: Chat) -> Iterator[str]:
        try:
            for word in chat.text.split():
                self.threads.add(threading.get_ident())
                yield word
        finally:
            self.closed.set()


@pytest.mark.parametrize("backend", [Awaiting(), Blocking()])
async def test_both_kinds_of_generator_are_heard_to_the_end(backend: Backend) -> None:
    assert [piece async for piece in pieces(backend, Chat(prompt="a b c"))] == ["a", "b", "c"]


async def test_a_blocking_generator_does_not_block() -> None:
    backend = Blocking()
    assert [piece async for piece in pieces(backend, Chat(prompt="a b"))] == ["a", "b"]
    assert threading.get_ident() not in backend.threads


async def test_whoever_stops_listening_closes_the_generator() -> None:
    awaiting, blocking = Awaiting(), Blocking()
    for backend in (awaiting, blocking):
        async with contextlib.aclosing(pieces(backend, Chat(prompt="a b c"))) as heard:
            assert await anext(heard) == "a"
    assert awaiting.closed
    assert await asyncio.to_thread(blocking.closed.wait, DEADLINE_S)


async def test_what_is_not_filled_in_is_not_supported() -> None:
    backend = Backend()
    with pytest.raises(Unsupported):
        await anext(pieces(backend, Chat()))
    with pytest.raises(Unsupported):
        await backend.embed("x")
    with pytest.raises(Unsupported):
        await backend.tokenize("x")


def test_the_text_of_a_chat_is_what_was_said_last() -> None:
    assert Chat().text == ""
    assert Chat(prompt="p").text == "p"
    assert Chat(messages=(ChatMessage("system", "be kind"), ChatMessage("user", "hi"))).text == "hi"


@pytest.mark.parametrize(
    ("token", "metadata", "refused"),
    [
        ("", {}, None),
        ("t", {}, "missing authorization header"),
        ("t", {"authorization": "t"}, "authorization must use Bearer scheme"),
        ("t", {"authorization": "bearer t"}, "authorization must use Bearer scheme"),
        ("t", {"authorization": "Bearer  t"}, "invalid token"),
        ("t", {"authorization": "Bearer x"}, "invalid token"),
        ("t", {"authorization": "Bearer ü"}, "invalid token"),
        ("t", {"authorization": "Bearer t"}, None),
        ("t", {"authorization": b"Bearer t"}, None),
    ],
)
def test_the_token_in_the_contract_s_words(token: str, metadata: dict[str, str | bytes], refused: str | None) -> None:
    assert why_refused(token, metadata) == refused
