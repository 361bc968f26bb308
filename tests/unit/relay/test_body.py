"""Bodies of requests as they are kept while they come."""

from __future__ import annotations

import sys

import pytest

from corral.relay.body import RequestBody
from corral.relay.http1.chunked import LAST_CHUNK, frame
from corral.relay.loop.runner import Runner

SIZE = 20_000


class Nobody:
    def want_body(self) -> None:
        raise AssertionError("nothing is waited for")

    def runner(self) -> Runner | None:
        return None


def held_bytes(body: RequestBody) -> int:
    return sum(sys.getsizeof(piece) for piece in body._pieces)


@pytest.mark.parametrize("framed", [False, True])
async def test_a_body_that_comes_byte_by_byte_takes_no_more_memory_than_another(framed: bool) -> None:
    body = RequestBody(Nobody(), None if framed else SIZE)
    for number in range(SIZE):
        byte = bytes([number % 251])
        assert body.feed(frame(byte) if framed else byte) == b""
        assert body.buffered == number + 1
    assert held_bytes(body) < SIZE * 1.05
    if framed:
        body.feed(LAST_CHUNK)
    assert await body.read(SIZE) == bytes(number % 251 for number in range(SIZE))


async def test_many_small_chunks_in_one_read_are_kept_together() -> None:
    body = RequestBody(Nobody(), None)
    body.feed(frame(b"x") * SIZE)
    assert held_bytes(body) < SIZE * 1.05


async def test_large_pieces_are_kept_as_they_came() -> None:
    body = RequestBody(Nobody(), 3 * 65536)
    pieces = [bytes([number]) * 65536 for number in range(3)]
    for piece in pieces:
        body.feed(piece)
    assert [piece async for piece in body.chunks()] == pieces
