"""Streamed answers for the bench: a server that sends chunks, paced or not, and a client that counts them.

    streams.py serve PORT CHUNKS PACE_MS
    streams.py read HOST:PORT CONNECTIONS SECONDS KEY    → prints chunks/s

Both are bare asyncio protocols on uvloop, so that they are not what is measured.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import cast

import uvloop

CHUNK = b'data: {"choices":[{"index":0,"delta":{"content":" word"}}]}\n\n'
FRAME = b"%x\r\n%s\r\n" % (len(CHUNK), CHUNK)
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


class Sender(asyncio.Protocol):
    def __init__(self, chunks: int, pace_s: float) -> None:
        self._chunks = chunks
        self._pace_s = pace_s
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._task: asyncio.Task[None] | None = None
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none of the class's children

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, end, rest = self._buffer.partition(b"\r\n\r\n")
        if not end:
            return
        length = _content_length(head)
        if len(rest) < length:
            return
        self._buffer = rest[length:]
        if head.startswith(b"POST"):
            self._task = asyncio.get_running_loop().create_task(self._send())
        else:  # a router's look at our health
            self._transport.write(HEALTHY)

    async def _send(self) -> None:
        self._transport.write(HEAD)
        for _ in range(self._chunks):
            await self._resumed.wait()
            self._transport.write(FRAME)
            await asyncio.sleep(self._pace_s)
        self._transport.write(b"0\r\n\r\n")

    def pause_writing(self) -> None:
        self._resumed.clear()

    def resume_writing(self) -> None:
        self._resumed.set()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._task is not None:
            self._task.cancel()


class Reader(asyncio.Protocol):
    """Asks, counts what arrives, asks again when the answer has ended."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._tail = b""
        self.seen = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none of the class's children
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.seen += data.count(MARK)
        self._tail = (self._tail + data)[-7:]
        if self._tail.endswith(b"0\r\n\r\n"):
            self._tail = b""
            self._transport.write(self._request)


async def serve(port: int, chunks: int, pace_s: float) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Sender(chunks, pace_s), "127.0.0.1", port, backlog=1024)
    async with server:
        await server.serve_forever()


async def read(place: str, connections: int, seconds: float, key: str) -> float:
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
    return (sum(reader.seen for reader in readers) - before) / (time.perf_counter() - started)


def main() -> None:
    if sys.argv[1] == "serve":
        uvloop.run(serve(int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]) / 1000))
    else:
        print(uvloop.run(read(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), sys.argv[5])))


if __name__ == "__main__":
    main()
