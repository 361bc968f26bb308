"""Messages between parent and children of one gateway, over a pair of unix sockets that only they have.

Frames of MessagePack, each preceded by its length. Both sides are the same program, one started by the other, so the
messages need not stay compatible. Views contain the hashes of keys, so the bytes must go nowhere else.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import cast

import msgspec

from corral.contract.http import Headers
from corral.gateway.processes.metrics import MetricsSnapshot

_LENGTH_BYTES = 4


class ViewUpdate(msgspec.Struct, tag=True, frozen=True):
    """To a child: a new view of the fleet."""

    view: bytes  # an encoded `FleetView`
    rows: dict[str, int]  # of the shared table
    clock_offset_s: float  # of the controller's clock


class WaitForSlot(msgspec.Struct, tag=True, frozen=True):
    """To the parent: a request needs a slot of this model."""

    id: int
    model: str
    key_id: str


class CancelWait(msgspec.Struct, tag=True, frozen=True):
    """To the parent: the request waits no longer."""

    id: int


class SlotGranted(msgspec.Struct, tag=True, frozen=True):
    """To a child: the request gets a slot of this process. The parent counts the slot until `SlotTaken` arrives."""

    id: int
    process_id: str
    load_s: float  # the wait times for the load and for a slot
    queue_s: float


class SlotRefused(msgspec.Struct, tag=True, frozen=True):
    """To a child: the request gets this error."""

    id: int
    status: int
    body: bytes
    headers: Headers
    load_s: float
    queue_s: float


class SlotTaken(msgspec.Struct, tag=True, frozen=True):
    """To the parent: the child counts the slot now, or no longer needs it."""

    id: int


class SlotFreed(msgspec.Struct, tag=True, frozen=True):
    """To the parent: a slot of this model is free while requests wait for one."""

    model: str


class EjectionChange(msgspec.Struct, tag=True, frozen=True):
    """From a child to the parent, and from there to the other children: a replica or node could not be reached, or can
    be reached again."""

    action: str  # process, node, suspend, resume
    id: str


class RefreshView(msgspec.Struct, tag=True, frozen=True):
    """To the parent: read the view now. `ViewRefreshed` follows, unless the id is 0."""

    id: int


class ViewRefreshed(msgspec.Struct, tag=True, frozen=True):
    id: int


class ChildServes(msgspec.Struct, tag=True, frozen=True):
    """To the parent: this child accepts connections."""


class RunningWanted(msgspec.Struct, tag=True, frozen=True):
    """To a child: somebody looks at the requests under way, so report its own for so many seconds."""

    for_s: float


class RequestMetrics(msgspec.Struct, tag=True, frozen=True):
    """To the parent: report the metrics of all processes; to a child: report its own."""

    id: int


class ReportMetrics(msgspec.Struct, tag=True, frozen=True):
    """The reply; a child also sends its own metrics at intervals, with id 0."""

    id: int
    metrics: MetricsSnapshot


Frame = (
    ViewUpdate
    | WaitForSlot
    | CancelWait
    | SlotGranted
    | SlotRefused
    | SlotTaken
    | SlotFreed
    | EjectionChange
    | RefreshView
    | ViewRefreshed
    | ChildServes
    | RunningWanted
    | RequestMetrics
    | ReportMetrics
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)


class Channel(asyncio.BufferedProtocol):
    """One end. Calls `on_frame` for each frame in order, and `on_lost` when the other side is gone."""

    def __init__(self, on_frame: Callable[[Frame], None], on_lost: Callable[[], None]) -> None:
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._chunk = bytearray(256 * 1024)
        self._unread = bytearray()

    @classmethod
    async def open(cls, sock: socket.socket, on_frame: Callable[[Frame], None], on_lost: Callable[[], None]) -> Channel:
        sock.setblocking(False)
        channel = cls(on_frame, on_lost)
        await asyncio.get_running_loop().create_unix_connection(lambda: channel, sock=sock)
        return channel

    def send(self, frame: Frame) -> None:
        """Not bounded: the other side is this program and always reads."""
        if self._transport is not None and not self._transport.is_closing():
            data = _encoder.encode(frame)
            self._transport.write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # Called by asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one without saying so

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._chunk

    def buffer_updated(self, nbytes: int) -> None:
        unread = self._unread
        unread += memoryview(self._chunk)[:nbytes]
        start = 0
        while len(unread) - start >= _LENGTH_BYTES:
            end = start + _LENGTH_BYTES + int.from_bytes(unread[start : start + _LENGTH_BYTES], "big")
            if len(unread) < end:
                break
            self._on_frame(_decoder.decode(bytes(unread[start + _LENGTH_BYTES : end])))
            start = end
        del unread[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_lost()
