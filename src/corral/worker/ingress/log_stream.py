"""The WebSocket of a backend's log: the lines there are, then each new one (docs/reference/wire/files.md#backend-logs).

The relay tunnels WebSockets and speaks none, so they end at a small server on a unix socket in a folder only this user
can enter. It is there from the first follower on: a worker nobody follows does not pay for it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

from corral.contract.codec import encode
from corral.contract.http import Target
from corral.kit.tasks import run_until_first_ends
from corral.worker.supervisor.logs import Follower, LogBook

if TYPE_CHECKING:
    from aiohttp import web

LARGEST_MESSAGE = 4096  # from a follower, who has nothing to say
BUFFERED_LINES = 100  # a slower reader misses lines


@dataclass(frozen=True)
class LogStreamTimeouts:
    ping_s: float = 30.0
    read_s: float = 90.0  # without a pong the follower is gone
    write_s: float = 30.0


class LogStreams:
    def __init__(self, book: LogBook, timeouts: LogStreamTimeouts | None = None) -> None:
        self._book = book
        self._timeouts = timeouts or LogStreamTimeouts()
        self._starting = asyncio.Lock()
        self._folder = ""
        self._runner: web.AppRunner | None = None

    async def target(self) -> Target:
        """Where followers are sent."""
        async with self._starting:  # held across a bind on this machine only
            if self._runner is None:
                await self._start()
        return Target(unix_path=os.path.join(self._folder, "logs"))

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def _start(self) -> None:
        from aiohttp import web  # memory: few workers are ever followed

        app = web.Application()
        app.router.add_get("/{name:.*}", self._serve)
        self._folder = await asyncio.to_thread(tempfile.mkdtemp, prefix="corral-logs-")
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.UnixSite(runner, os.path.join(self._folder, "logs")).start()
        self._runner = runner

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        socket = web.WebSocketResponse(max_msg_size=LARGEST_MESSAGE)
        await socket.prepare(request)
        async with self._book.follow(request.match_info["name"], buffer=BUFFERED_LINES) as lines:
            await self._send(socket, {"type": "initial", "lines": lines.initial})
            await run_until_first_ends(self._tell(socket, lines), self._listen(socket), self._ping(socket))
        await socket.close()
        return socket

    async def _tell(self, socket: web.WebSocketResponse, lines: Follower) -> None:
        async for line in lines:
            await self._send(socket, {"type": "line", "line": line})

    async def _listen(self, socket: web.WebSocketResponse) -> None:
        """Until the follower leaves, or keeps silent for too long: a pong is a sign of life too."""
        from aiohttp import WSMsgType

        ends = (WSMsgType.CLOSE, WSMsgType.CLOSING, WSMsgType.CLOSED, WSMsgType.ERROR)
        while (await socket.receive(timeout=self._timeouts.read_s)).type not in ends:
            pass

    async def _ping(self, socket: web.WebSocketResponse) -> None:
        while True:
            await asyncio.sleep(self._timeouts.ping_s)
            async with asyncio.timeout(self._timeouts.write_s):
                await socket.ping()

    async def _send(self, socket: web.WebSocketResponse, frame: object) -> None:
        async with asyncio.timeout(self._timeouts.write_s):
            await socket.send_str(encode(frame).decode())
