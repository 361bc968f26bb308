"""Requests for tests that need one without a connection."""

from __future__ import annotations

from collections.abc import AsyncIterator

from corral.contract.http import Request


class Nothing:
    length = 0

    async def read(self, limit: int) -> bytes:
        return b""

    async def chunks(self) -> AsyncIterator[bytes]:
        nothing: tuple[bytes, ...] = ()
        for piece in nothing:
            yield piece


def a_request(path: bytes) -> Request:
    return Request(b"POST", path, (), "1.1", None, False, "id", Nothing())
