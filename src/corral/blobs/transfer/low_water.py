"""Lets the kernel collect the bytes of a large response body, so that a slow link does not wake the process for each
packet: SO_RCVLOWAT, the number of bytes from which on a socket counts as readable.

Over a link of 4 MB/s a process that is woken for each packet spends more CPU time on that than on verifying the bytes.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable

import aiohttp

MAX_BYTES = 256 << 10
MIN_BYTES = 8 << 10  # less is not worth a system call
COLLECT_S = 0.25  # so long, at the rate so far: whoever shows progress sees each step
# The process may hold the beginning of a TLS record (at most 16 KiB) that it cannot use yet: those bytes do not come
# again, and a mark above what is still to come would wait for ever.
SLACK_BYTES = 32 << 10
_FIRST_S = 0.05  # what came in this time was in the buffers, and says little about the rate


def choose_mark(left_bytes: int, received_bytes: int, elapsed_s: float) -> int:
    """From how many bytes on the socket is readable. `left_bytes`: of the body, from now on. Pure."""
    rate = received_bytes / max(elapsed_s, _FIRST_S)
    mark = min(MAX_BYTES, int(rate * COLLECT_S), left_bytes - SLACK_BYTES)
    return mark if mark >= MIN_BYTES else 1


class LowWaterMark:
    """Of the connection of one response whose length is known. `with LowWaterMark(response, length) as mark:` read,
    and call `mark.on_bytes` for each piece; at the end the connection is as it was."""

    def __init__(
        self, response: aiohttp.ClientResponse, length: int, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._transport = response.connection.transport if response.connection is not None else None
        self._socket = self._transport.get_extra_info("socket") if self._transport is not None else None
        self._left = length
        self._received = 0
        self._monotonic = monotonic
        self._began_s = monotonic()
        self._mark = 1

    def __enter__(self) -> LowWaterMark:
        return self

    def __exit__(self, *_: object) -> None:
        self._set(1)

    def on_bytes(self, count: int) -> None:
        self._left -= count
        self._received += count
        mark = choose_mark(self._left, self._received, self._monotonic() - self._began_s)
        # A mark that is a little too low costs less than setting it anew for each piece.
        if mark < self._mark or mark >= 2 * self._mark:
            self._set(mark)

    def _set(self, mark: int) -> None:
        # Of a closed connection the descriptor may be another one's already.
        if mark == self._mark or self._socket is None or self._transport is None or self._transport.is_closing():
            return
        self._mark = mark
        with contextlib.suppress(OSError):  # the connection was closed, or the system knows no such mark
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, mark)
