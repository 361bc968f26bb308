"""Collects relayed bytes and writes some of them together.

A write wakes the process at the other end. After a single write that process does little work and sleeps again before
the next one, so every request pays for two wake-ups; in a virtual machine that is a third of the cost of relaying a
request. Collected writes share a wake-up: bytes wait until enough have come together, or until a turn of the event loop
brings no more input, for a few turns at most. With few requests in flight bytes are written at once.

More would not help: while this process reads one input after the other, the next process has nothing to do, and the
requests of all clients travel as one crowd that keeps a single core busy.

The pieces of a stream that come faster than anybody can use them are held a little longer (`hold`): an engine that
writes 64 chunks one after the other makes this process read some twenty pieces, and each that is passed on costs this
process a write and the next two a read and a write of their own. The end of the stream takes them along.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from corral.relay.server import RelayServer

_FEW = 16
_ENOUGH = 16  # to share a wake-up
MAX_TURNS = 4

HOLD_S = 0.001  # at most, and up to another one, since the loop's timers count milliseconds
MAX_HELD = 32  # pieces of one stream
_LARGE_BYTES = 4096  # a piece that is worth a write of its own


class WriteQueue:
    """One per server. It keeps the order of writes to each transport: call `flush` before you write to a transport
    directly, or close it."""

    __slots__ = ("_counted", "_held", "_is_scheduled", "_items", "_loop", "_server", "_timer", "_turns")

    def __init__(self, server: RelayServer, loop: asyncio.AbstractEventLoop) -> None:
        self._server = server
        self._loop = loop
        self._counted = 0  # items at the last turn
        self._turns = 0
        self._is_scheduled = False
        self._items: list[tuple[asyncio.Transport, bytes]] = []
        self._held: dict[asyncio.Transport, list[bytes]] = {}  # newer than what `_items` has for the same transport
        self._timer: asyncio.TimerHandle | None = None  # while anything is held

    def write(self, transport: asyncio.Transport, data: bytes) -> None:
        """For relayed bytes. Protocols may get `pause_writing` before this returns, not only that of `transport`."""
        if transport in self._held:
            data = self._take_held(transport) + data
        items = self._items
        if not items and self._server.running <= _FEW:
            transport.write(data)
            return
        items.append((transport, data))
        if len(items) >= _ENOUGH:
            self._flush_items()
        elif not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._flush_if_quiet)  # runs after all input that is readable now was read

    def hold(self, transport: asyncio.Transport, data: bytes) -> None:
        """`write`, but it may take a millisecond or two, until more bytes for the same transport have come together.
        With few requests in flight, when cores may be idle, nothing is held."""
        if self._server.running <= _FEW or len(data) >= _LARGE_BYTES:
            self.write(transport, data)
            return
        pieces = self._held.setdefault(transport, [])
        if len(pieces) >= MAX_HELD:
            self.write(transport, data)
            return
        pieces.append(data)
        if self._timer is None:
            self._timer = self._loop.call_later(HOLD_S, self.flush)

    def _take_held(self, transport: asyncio.Transport) -> bytes:
        taken = b"".join(self._held.pop(transport))
        if not self._held and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return taken

    def _flush_if_quiet(self) -> None:
        waiting = len(self._items)
        if self._counted < waiting and self._turns < MAX_TURNS:
            self._counted = waiting
            self._turns += 1
            self._loop.call_soon(self._flush_if_quiet)
        else:
            self._is_scheduled = False
            self._flush_items()

    def flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._items += [(transport, b"".join(pieces)) for transport, pieces in self._held.items()]
            self._held = {}
        self._flush_items()

    def _flush_items(self) -> None:
        items = self._items
        self._counted = self._turns = 0
        if items:
            self._items = []
            if len(items) > 1:
                items = _joined(items)
            for transport, data in items:
                if not transport.is_closing():
                    transport.write(data)


def _joined(items: list[tuple[asyncio.Transport, bytes]]) -> list[tuple[asyncio.Transport, bytes]]:
    """Join the bytes for each transport: each write is a system call, and one more wake-up at the other end. A fast
    stream has several pieces here."""
    if len({id(transport) for transport, _ in items}) == len(items):
        return items
    pieces: dict[asyncio.Transport, list[bytes]] = {}
    for transport, data in items:
        pieces.setdefault(transport, []).append(data)
    return [(transport, b"".join(parts)) for transport, parts in pieces.items()]
