"""WebSocket messages from a node to a person, without the user and password of URLs (RFC 6455, server to client).

The other direction is passed on as bytes: nothing a person sends is shown to anybody. Messages are whole before they
are redacted, since a URL may be cut by a frame.
"""

from __future__ import annotations

import asyncio
import struct
from typing import NamedTuple

from corral.kit.errors import Failed
from corral.kit.redact import redact_url_bytes

MAX_MESSAGE_BYTES = 32 * 1024 * 1024  # a thousand lines of the longest kind fit
_FINAL, _RESERVED, _OPCODE, _IS_CONTROL = 0x80, 0x70, 0x0F, 0x08
_MASKED, _LENGTH, _LENGTH_IN_2, _LENGTH_IN_8 = 0x80, 0x7F, 126, 127
_CONTINUATION = 0


class Frame(NamedTuple):
    first: int  # the first byte: whether it is final, and what it is
    payload: bytes

    @property
    def opcode(self) -> int:
        return self.first & _OPCODE

    @property
    def is_final(self) -> bool:
        return bool(self.first & _FINAL)


async def pass_redacted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Runs until the node closes the connection or sends a frame that a server may not send: compressed (the request
    did not negotiate that), masked or too large."""
    opcode, message = _CONTINUATION, bytearray()
    while True:
        try:
            frame = await _read_frame(reader, MAX_MESSAGE_BYTES - len(message))
        except asyncio.IncompleteReadError:
            return
        if frame.opcode & _IS_CONTROL:  # may come between the parts of a message
            writer.write(_encode(frame.opcode, frame.payload))
        else:
            opcode = frame.opcode or opcode
            message += frame.payload
            if frame.is_final:
                writer.write(_encode(opcode, redact_url_bytes(bytes(message))))
                opcode, message = _CONTINUATION, bytearray()
        await writer.drain()


async def _read_frame(reader: asyncio.StreamReader, largest: int) -> Frame:
    first, second = await reader.readexactly(2)
    length = second & _LENGTH
    if length == _LENGTH_IN_2:
        (length,) = struct.unpack("!H", await reader.readexactly(2))
    elif length == _LENGTH_IN_8:
        (length,) = struct.unpack("!Q", await reader.readexactly(8))
    if first & _RESERVED or second & _MASKED or length > largest:
        raise Failed("the node's log is no WebSocket that can be passed on")
    return Frame(first, await reader.readexactly(length))


def _encode(opcode: int, payload: bytes) -> bytes:
    length = len(payload)
    if length < _LENGTH_IN_2:
        head = struct.pack("!BB", _FINAL | opcode, length)
    elif length < 1 << 16:
        head = struct.pack("!BBH", _FINAL | opcode, _LENGTH_IN_2, length)
    else:
        head = struct.pack("!BBQ", _FINAL | opcode, _LENGTH_IN_8, length)
    return head + payload
