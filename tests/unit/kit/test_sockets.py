"""Cutting connections, also those that asyncio has let go of."""

from __future__ import annotations

import asyncio

from corral.kit.sockets import abort


class TlsTransport(asyncio.Transport):
    """What `asyncio.sslproto` of Python 3.11.2 does: the second `close` forgets the connection, `abort` needs it."""

    def __init__(self) -> None:
        super().__init__()
        self._connection: list[str] | None = []
        self._closed = False

    def close(self) -> None:
        if self._closed:
            self._connection = None
        self._closed = True

    def abort(self) -> None:
        self._connection.append("aborted")  # type: ignore[union-attr]


def test_one_that_is_open_is_aborted() -> None:
    transport = TlsTransport()
    abort(transport)
    assert transport._connection == ["aborted"]


def test_one_that_was_closed_twice_is_left_to_its_end() -> None:
    transport = TlsTransport()
    transport.close()
    transport.close()
    abort(transport)
