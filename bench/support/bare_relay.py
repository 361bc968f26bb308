"""The least a relay in Python can do: bytes from a client to an upstream connection, bytes back; nothing is read.

It shows the floor: what sockets, event loop and two callbacks cost before a relay has looked at anything. It is no
proxy: one read is taken for a whole message. Run: `bare_relay.py PORT HOST:PORT`.
"""

from __future__ import annotations

import asyncio
import sys
from typing import cast

import uvloop


class Bare:
    """Writes are gathered until everything that can be read has been, as the relay does."""

    def __init__(self, host: str, port: int) -> None:
        self.idle: list[Upstream] = []
        self._where = host, port
        self._loop = asyncio.get_running_loop()
        self._queue: list[tuple[asyncio.Transport, bytes]] = []
        self._connecting: set[asyncio.Task[None]] = set()

    def write(self, transport: asyncio.Transport, data: bytes) -> None:
        if not self._queue:
            self._loop.call_soon(self._flush)
        self._queue.append((transport, data))

    def _flush(self) -> None:
        queue, self._queue = self._queue, []
        for transport, data in queue:
            transport.write(data)

    def connect(self, client: asyncio.Transport, data: bytes) -> None:
        task = self._loop.create_task(self._connect(client, data))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, client: asyncio.Transport, data: bytes) -> None:
        _, upstream = await self._loop.create_connection(lambda: Upstream(self), *self._where)
        upstream.client = client
        self.write(upstream.transport, data)


class Upstream(asyncio.Protocol):
    def __init__(self, bare: Bare) -> None:
        self._bare = bare
        self.client: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        client, self.client = self.client, None
        if client is not None:
            self._bare.idle.append(self)
            self._bare.write(client, data)


class Client(asyncio.Protocol):
    def __init__(self, bare: Bare) -> None:
        self._bare = bare

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        bare = self._bare
        if bare.idle:
            upstream = bare.idle.pop()
            upstream.client = self._transport
            bare.write(upstream.transport, data)
        else:
            bare.connect(self._transport, data)


async def serve(port: int, host: str, upstream_port: int) -> None:
    bare = Bare(host, upstream_port)
    listener = await asyncio.get_running_loop().create_server(lambda: Client(bare), "127.0.0.1", port, backlog=2048)
    async with listener:
        await listener.serve_forever()


def main() -> None:
    host, _, upstream_port = sys.argv[2].rpartition(":")
    uvloop.run(serve(int(sys.argv[1]), host, int(upstream_port)))


if __name__ == "__main__":
    main()
