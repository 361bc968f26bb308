"""What parent and children of one gateway tell each other, over a pair of unix sockets that only they hold.

Frames of MessagePack, each with its length before it. Both sides are the same program, started by the other: nothing
here need stay compatible. Views carry the hashes of keys, so these bytes go nowhere else.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import cast

import msgspec

from corral.contract.http import Headers
from corral.gateway.processes.numbers import Numbers

_LENGTH_BYTES = 4


class View(msgspec.Struct, tag=True, frozen=True):
    """To a child: the fleet as of now."""

    view: bytes  # a `FleetView` as the controller writes it
    rows: dict[str, int]  # of the shared table
    clock_offset_s: float  # of the controller's clock


class Wait(msgspec.Struct, tag=True, frozen=True):
    """To the parent: a request needs a slot of this model."""

    id: int
    model: str
    key_id: str


class Leave(msgspec.Struct, tag=True, frozen=True):
    """To the parent: that request waits no longer."""

    id: int


class Served(msgspec.Struct, tag=True, frozen=True):
    """To a child: the request gets a slot of this process, taken by the parent until `Taken` comes."""

    id: int
    process_id: str
    load_s: float  # how long it waited for the load, and for a slot
    queue_s: float


class Refused(msgspec.Struct, tag=True, frozen=True):
    """To a child: the request is answered so."""

    id: int
    status: int
    body: bytes
    headers: Headers
    load_s: float
    queue_s: float


class Taken(msgspec.Struct, tag=True, frozen=True):
    """To the parent: the slot is counted by the child now, or not needed any more."""

    id: int


class Freed(msgspec.Struct, tag=True, frozen=True):
    """To the parent: a slot of this model is free while requests wait for one."""

    model: str


class Eject(msgspec.Struct, tag=True, frozen=True):
    """From a child, by the parent, to all others: a replica or node that could not be reached, or can be again."""

    what: str  # process, node, hold, release
    id: str


class Look(msgspec.Struct, tag=True, frozen=True):
    """To the parent: read the view now. `Looked` follows."""

    id: int


class Looked(msgspec.Struct, tag=True, frozen=True):
    id: int


class Serving(msgspec.Struct, tag=True, frozen=True):
    """To the parent: this child accepts connections."""


class AskNumbers(msgspec.Struct, tag=True, frozen=True):
    """To the parent: the numbers of all processes; to a child: its own."""

    id: int


class TellNumbers(msgspec.Struct, tag=True, frozen=True):
    """The answer; a child also sends its own by itself now and then, with id 0."""

    id: int
    numbers: Numbers


Frame = (
    View | Wait | Leave | Served | Refused | Taken | Freed | Eject | Look | Looked | Serving | AskNumbers | TellNumbers
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)


class Channel(asyncio.BufferedProtocol):
    """One end. `on_frame` is called for each frame in order, `on_lost` when the other side is gone."""

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
        """The other side is our own program and always reads: what waits here is bounded by what it is asked."""
        if self._transport is not None and not self._transport.is_closing():
            data = _encoder.encode(frame)
            self._transport.write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # As asyncio calls it.

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
