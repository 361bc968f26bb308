"""Streamed answers for the bench: a server that sends chunks, paced or not, and a client that counts them.

    streams.py serve PORT CHUNKS PACE_MS
    streams.py read HOST:PORT CONNECTIONS SECONDS KEY    → prints chunks/s, and the chunks of the whole run

Both are bare asyncio protocols on uvloop, so that they are not what is measured: one timer paces all streams, and
unpaced ones are written several chunks at a time.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import cast

import uvloop

CHUNK = b'data: {"choices":[{"index":0,"delta":{"content":" word"}}]}\n\n'
FRAME = b"%x\r\n%s\r\n" % (len(CHUNK), CHUNK)
AT_ONCE = 16  # unpaced: as a fast engine does when several tokens are ready
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
MARK = b"data: "
BODY = b'{"model":"bench","stream":true,"messages":[{"role":"user","content":"Tell me about corrals."}]}'
JSON = b'{"status":"ok","model_path":"bench","id":"bench"}'
HEALTHY = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(JSON), JSON)


def _content_length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return 0


class Pace:
    """Calls every sender on each tick, or again and again as the loop turns."""

    def __init__(self, chunks: int, pace_s: float) -> None:
        self.chunks = chunks
        self._pace_s = pace_s
        self._senders: dict[Sender, None] = {}
        self._loop = asyncio.get_running_loop()
        self._next = self._loop.time()
        self._ticking = False

    def add(self, sender: Sender) -> None:
        self._senders[sender] = None
        if not self._ticking:
            self._ticking = True
            self._next = self._loop.time() + self._pace_s
            self._again()

    def remove(self, sender: Sender) -> None:
        self._senders.pop(sender, None)

    def _again(self) -> None:
        if self._pace_s:
            self._loop.call_at(self._next, self._tick)
        else:
            self._loop.call_soon(self._tick)

    def _tick(self) -> None:
        self._next += self._pace_s
        piece, count = (FRAME, 1) if self._pace_s else (FRAME * AT_ONCE, AT_ONCE)
        for sender in list(self._senders):
            sender.send(piece, count)
        self._ticking = bool(self._senders)
        if self._ticking:
            self._again()


class Sender(asyncio.Protocol):
    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._left = 0
        self._paused = False
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, end, rest = self._buffer.partition(b"\r\n\r\n")
        length = _content_length(head)
        if not end or len(rest) < length:
            return
        self._buffer = rest[length:]
        if head.startswith(b"POST"):
            self._transport.write(HEAD)
            self._left = self._pace.chunks
            self._pace.add(self)
        else:  # a router's look at our health
            self._transport.write(HEALTHY)

    def send(self, piece: bytes, count: int) -> None:
        if self._paused:
            return
        self._transport.write(piece)
        self._left -= count
        if self._left <= 0:
            self._pace.remove(self)
            self._transport.write(b"0\r\n\r\n")

    def pause_writing(self) -> None:
        self._paused = True
        self._pace.remove(self)

    def resume_writing(self) -> None:
        self._paused = False
        if self._left > 0:
            self._pace.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._pace.remove(self)


class Reader(asyncio.Protocol):
    """Asks, counts what arrives, asks again when the answer has ended."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._tail = b""
        self.seen = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.seen += data.count(MARK)
        self._tail = (self._tail + data[-7:])[-7:]
        if self._tail.endswith(b"0\r\n\r\n"):
            self._tail = b""
            self._transport.write(self._request)


async def serve(port: int, chunks: int, pace_s: float) -> None:
    loop = asyncio.get_running_loop()
    pace = Pace(chunks, pace_s)
    server = await loop.create_server(lambda: Sender(pace), "127.0.0.1", port, backlog=1024)
    async with server:
        await server.serve_forever()


async def read(place: str, connections: int, seconds: float, key: str) -> tuple[float, int]:
    host, _, port = place.rpartition(":")
    request = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        b"Authorization: Bearer %s\r\nContent-Length: %d\r\n\r\n%s" % (key.encode(), len(BODY), BODY)
    )
    loop = asyncio.get_running_loop()
    readers = [(await loop.create_connection(lambda: Reader(request), host, int(port)))[1] for _ in range(connections)]
    await asyncio.sleep(0.5)
    before, started = sum(reader.seen for reader in readers), time.perf_counter()
    await asyncio.sleep(seconds)
    total = sum(reader.seen for reader in readers)
    return (total - before) / (time.perf_counter() - started), total


def main() -> None:
    if sys.argv[1] == "serve":
        uvloop.run(serve(int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]) / 1000))
    else:
        print(*uvloop.run(read(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), sys.argv[5])))


if __name__ == "__main__":
    main()
