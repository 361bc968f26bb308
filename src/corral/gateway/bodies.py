"""Bodies that are kept while their requests are served, in memory or on disk: how much of them there may be at once.

A body is read before its model is known, and kept until its answer has ended, so that it can be sent to another replica
where the first cannot be reached. One is bounded by itself; all of them together are bounded here, or a few hundred
clients with large ones would take the memory, or the disk, of everybody's gateway.
"""

from __future__ import annotations

from typing import NamedTuple

from corral.contract.http import Body, BodyTooLarge


class NoRoom(Exception):
    """The bodies of other requests fill the room. It frees itself as they end."""


class BodyRoom:
    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.taken_bytes = 0

    def share(self) -> Share:
        return Share(self)


class Rooms(NamedTuple):
    memory: BodyRoom
    disk: BodyRoom  # for those with files in them


class Share:
    """What one request has of the room. Closed when it is over."""

    __slots__ = ("_bytes", "_room")

    def __init__(self, room: BodyRoom) -> None:
        self._room = room
        self._bytes = 0

    def take(self, size_bytes: int) -> None:
        room = self._room
        if room.taken_bytes + size_bytes > room.limit_bytes:
            raise NoRoom
        room.taken_bytes += size_bytes
        self._bytes += size_bytes

    def another(self) -> Share:
        """Of the same room."""
        return self._room.share()

    def close(self) -> None:
        self._room.taken_bytes -= self._bytes
        self._bytes = 0


async def read_whole(body: Body, limit_bytes: int, share: Share) -> bytes:
    """Raises `BodyTooLarge` and `NoRoom`, both before the body is read where it says how long it is."""
    if body.length is not None:
        if body.length > limit_bytes:
            raise BodyTooLarge(f"the body is over {limit_bytes} bytes")
        share.take(body.length)
        return await body.read(limit_bytes)
    whole = bytearray()  # not the pieces: one of two bytes takes forty
    async for piece in body.chunks():
        if len(whole) + len(piece) > limit_bytes:
            raise BodyTooLarge(f"the body is over {limit_bytes} bytes")
        share.take(len(piece))
        whole += piece
    return bytes(whole)
