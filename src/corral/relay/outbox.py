"""Relayed bytes are written together, once everything that has arrived was read.

A write wakes the process at the other end. When it comes alone, that process does its little work and falls asleep
again before the next one, and every request pays for waking it, twice; in a virtual machine that is a third of what
relaying a request costs. Written together, one wake serves many: bytes wait until a look around brings nothing more to
read, a few looks at most. With few requests under way there is nothing to wait for, and bytes go out at once.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from corral.relay.server import RelayServer

_FEW = 16
_MANY = 64  # enough to be worth a wake
_MOST_LOOKS = 4


class Outbox:
    """Of one server. The order of what goes to one transport is kept: whoever writes to it or closes it without the
    outbox calls `flush` before."""

    __slots__ = ("_counted", "_looks", "_loop", "_server", "queue")

    def __init__(self, server: RelayServer, loop: asyncio.AbstractEventLoop) -> None:
        self._server = server
        self._loop = loop
        self._counted = 0  # in the queue, at the last look
        self._looks = 0
        self.queue: list[tuple[asyncio.Transport, bytes]] = []

    def write(self, transport: asyncio.Transport, data: bytes) -> None:
        """For bytes that came over the wire: their number within one turn of the loop is bounded by what was read."""
        queue = self.queue
        if queue:
            queue.append((transport, data))
        elif self._server.running > _FEW:
            queue.append((transport, data))
            self._counted = self._looks = 0
            self._loop.call_soon(self._look)  # runs when all that is readable now has been read
        else:
            transport.write(data)

    def _look(self) -> None:
        waiting = len(self.queue)
        if self._counted < waiting < _MANY and self._looks < _MOST_LOOKS:
            self._counted = waiting
            self._looks += 1
            self._loop.call_soon(self._look)
        else:
            self.flush()

    def flush(self) -> None:
        queue = self.queue
        if queue:
            self.queue = []
            if len(queue) > 1:
                queue = _joined(queue)
            for transport, data in queue:
                if not transport.is_closing():
                    transport.write(data)


def _joined(queue: list[tuple[asyncio.Transport, bytes]]) -> list[tuple[asyncio.Transport, bytes]]:
    """What goes to one transport in one piece: each write is a system call, and one more wake at the other end. A
    stream that comes fast has several pieces here."""
    if len({id(transport) for transport, _ in queue}) == len(queue):
        return queue
    pieces: dict[asyncio.Transport, list[bytes]] = {}
    for transport, data in queue:
        pieces.setdefault(transport, []).append(data)
    return [(transport, b"".join(parts)) for transport, parts in pieces.items()]
