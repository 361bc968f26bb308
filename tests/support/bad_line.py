"""A bad line to a server: slow, cut off in the middle, or gone."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from dataclasses import dataclass, field

from tests.support.processes import kept_port


@dataclass
class Line:
    """A TCP relay before a server: slowed down, cut after so many bytes, or gone altogether.

    async with Line(registry.port) as line:
        line.bytes_per_s = 200_000
        line.cut_after = [100_000]  # of what comes back, per connection, in order
    """

    target_port: int
    accepts_after_s: float = 0.0  # how long a new connection waits for the server, as on a machine that is busy
    bytes_per_s: float = 0.0  # 0: as fast as it goes
    cut_after: list[int] = field(default_factory=list)
    passed: int = 0  # bytes that came back
    cuts: int = 0
    connections: int = 0
    port: int = 0
    _place: socket.socket | None = None  # keeps the port while it is down
    _server: asyncio.Server | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def open_connections(self) -> int:
        return len(self._tasks)

    async def __aenter__(self) -> Line:
        await self.up()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def up(self) -> None:
        if self._place is None:
            self._place = kept_port()
            self.port = self._place.getsockname()[1]
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)

    async def close(self) -> None:
        await self.down()
        if self._place is not None:
            self._place.close()

    async def down(self) -> None:
        """Nobody listens any more, and what was under way breaks."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in tuple(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(tuple(self._tasks))

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """No coroutine: asyncio logs one that is cancelled, and nobody knows of the line until it runs."""
        self.connections += 1
        task = asyncio.get_running_loop().create_task(self._relay(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = [writer]
        try:
            await asyncio.sleep(self.accepts_after_s)
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
            ends.append(far_writer)
            there = asyncio.create_task(self._there(reader, far_writer))
            back = asyncio.create_task(self._back(far_reader, writer))
            try:
                await asyncio.wait({there, back}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (there, back):
                    task.cancel()
                await asyncio.gather(there, back, return_exceptions=True)
        except OSError:
            pass  # the server is away: so is the line to it
        finally:
            for each in ends:
                each.transport.abort()

    async def _there(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()

    async def _back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        end = self.cut_after.pop(0) if self.cut_after else None
        done, free_at = 0, time.monotonic()
        piece = 4096 if self.bytes_per_s else 65536
        while data := await reader.read(piece if end is None else min(piece, end - done)):
            writer.write(data)
            await writer.drain()
            done += len(data)
            self.passed += len(data)
            if end is not None and done >= end:
                self.cuts += 1
                writer.close()  # what was written still arrives
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
                return
            if self.bytes_per_s:
                # Time in which nobody asked for anything is not saved up: a kept connection would be quick for a while.
                free_at = max(free_at, time.monotonic()) + len(data) / self.bytes_per_s
                await asyncio.sleep(free_at - time.monotonic())
