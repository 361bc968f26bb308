"""Listens, admits connections up to a limit, and leaves in order: first nothing new, then nothing at all."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import socket
import ssl
import weakref
from collections.abc import Callable, Sequence

import uvloop

from corral.contract.http import Handler, Shortcut
from corral.kit.log import get_log
from corral.kit.transports import abort
from corral.relay.connection import ClientConnection
from corral.relay.counters import Counters
from corral.relay.head import RequestHeads
from corral.relay.limits import Limits
from corral.relay.outbox import Outbox
from corral.relay.pool import UpstreamPool
from corral.relay.quick import QuickConnection, may_depart
from corral.relay.shapes import Shapes
from corral.relay.shared_accept import SharedListener
from corral.relay.sockets import watch_for_dead_peers
from corral.relay.wheel import Wheel

log = get_log(__name__)
_LOOK_S = 0.02


class RelayServer:
    """Hands every request to `handler`, save those that go the short way (`quick.py`) because the handler's `shortcut`
    knows at once what becomes of them. The pool is the caller's to close; several servers may share it."""

    def __init__(
        self,
        handler: Handler,
        limits: Limits | None = None,
        *,
        pool: UpstreamPool | None = None,
        ssl: ssl.SSLContext | None = None,
        counters: Counters | None = None,
        shortcut: Shortcut | None = None,
    ) -> None:
        self.handler = handler
        self.shortcut = shortcut
        self.limits = limits or Limits()
        self.counters = counters or Counters()
        self.pool = pool or UpstreamPool(counters=self.counters)
        self.heads = RequestHeads(self.limits.header_count)
        self.shapes = Shapes(self.heads, may_depart, head_bytes=self.limits.head_bytes, twice=True)
        self.wheel = Wheel(self.limits.timeouts.tick_s())
        self.keep_alive_s = self.limits.timeouts.keep_alive_s + self.wheel.tick_s
        self.draining = False
        self.retiring = False  # another process listens in our place: draining, but nobody is sent away
        self.loop = asyncio.get_running_loop()
        self.outbox = Outbox(self, self.loop)
        self._ssl = ssl
        self._listeners: list[asyncio.AbstractServer | SharedListener] = []
        self._taking: set[asyncio.Task[None]] = set()  # connections of shared sockets on their way to a protocol
        self._paths: list[str] = []
        self._connections: set[ClientConnection] = set()
        self._refused: set[ClientConnection] = set()
        # Accepted, but TLS has not been agreed on yet. One that never is goes without a word: nobody else holds it.
        self._arriving: weakref.WeakSet[ClientConnection] = weakref.WeakSet()
        self.running = 0  # requests whose handlers have not returned
        self._quiet = asyncio.Event()
        self._quiet.set()
        # Ids of one process differ by the counter, those of two processes by the prefix.
        self.id_form = secrets.token_hex(6).encode() + b"-%x"
        self.id_numbers = itertools.count(1)

    async def listen(self, host: str, port: int, *, reuse_port: bool = False) -> int:
        """Accept on a TCP port, with TLS where the server has a context; 0 picks one. The port is returned."""
        timeouts = self.limits.timeouts
        listener = await self.loop.create_server(
            self._new_connection,
            host,
            port,
            backlog=self.limits.backlog,
            reuse_port=reuse_port or None,
            ssl=self._ssl,
            ssl_handshake_timeout=timeouts.handshake_s if self._ssl else None,
        )
        for sock in listener.sockets:
            watch_for_dead_peers(sock)
        self._listeners.append(listener)
        bound: int = listener.sockets[0].getsockname()[1]
        return bound

    async def listen_unix(self, path: str, *, mode: int = 0o600) -> None:
        """Accept on a unix socket, always without TLS. A socket file left by a dead process is replaced."""
        listener = await self.loop.create_unix_server(self._new_connection, path, backlog=self.limits.backlog)
        os.chmod(path, mode)
        self._paths.append(path)
        self._listeners.append(listener)

    def _new_connection(self) -> ClientConnection:
        conn = ClientConnection(self) if self.shortcut is None else QuickConnection(self, self.shortcut)
        if self._ssl is not None:
            self._arriving.add(conn)
        return conn

    async def listen_on(self, sock: socket.socket) -> int:
        """Accept on a socket that listens already, handed over by another process. The port is returned."""
        watch_for_dead_peers(sock)
        listener = await self.loop.create_server(
            self._new_connection,
            sock=sock,
            backlog=self.limits.backlog,
            ssl=self._ssl,
            ssl_handshake_timeout=self.limits.timeouts.handshake_s if self._ssl else None,
        )
        self._listeners.append(listener)
        bound: int = sock.getsockname()[1]
        return bound

    def listen_shared(self, socks: Sequence[socket.socket], is_turn: Callable[[], bool]) -> None:
        """Accept on sockets that other processes accept on too, whenever `is_turn` (`shared_accept.py`)."""
        for sock in socks:
            watch_for_dead_peers(sock)
        self._listeners.append(SharedListener(socks, self._take, is_turn))

    def _take(self, connection: socket.socket) -> None:
        taking = self.loop.create_task(self._adopt(connection), name="new connection")
        self._taking.add(taking)
        taking.add_done_callback(self._taking.discard)

    async def _adopt(self, connection: socket.socket) -> None:
        try:
            await self.loop.connect_accepted_socket(
                self._new_connection,
                connection,
                ssl=self._ssl,
                ssl_handshake_timeout=self.limits.timeouts.handshake_s if self._ssl else None,
            )
        except (OSError, ssl.SSLError, TimeoutError):
            connection.close()  # it left, or could not agree on TLS

    @property
    def open_connections(self) -> int:
        """Also those that are just being taken."""
        return self.counters.connections_open + len(self._taking)

    def descriptors(self) -> list[int]:
        """Of the sockets it listens on, for whoever is to accept in its place."""
        return [sock.fileno() for listener in self._listeners for sock in getattr(listener, "sockets", ())]

    # From connections.

    def admit(self, conn: ClientConnection) -> bool:
        counters = self.counters
        if self._ssl is not None:
            self._arriving.discard(conn)
        if len(self._connections) < self.limits.connections and (not self.draining or self.retiring):
            self._connections.add(conn)
            self._quiet.clear()
            self.wheel.add(conn)
            counters.connections += 1
            counters.connections_open += 1
            return True
        counters.connections_refused += 1
        if len(self._refused) < self.limits.refusals:
            self._refused.add(conn)
            self.wheel.add(conn)
            conn.refuse(503, "too many connections", extra=b"retry-after: 1\r\n")
        else:
            abort(conn.transport)
        return False

    def dismiss(self, conn: ClientConnection) -> None:
        self.wheel.discard(conn)
        if conn in self._connections:
            self._connections.discard(conn)
            self.counters.connections_open -= 1
        self._refused.discard(conn)
        self.note_quiet()

    def note_quiet(self) -> None:
        if not self._connections and not self.running:
            self._quiet.set()

    def new_request_id(self) -> bytes:
        return self.id_form % next(self.id_numbers)

    # Leaving.

    async def retire(self, grace_s: float) -> None:
        """Somebody else accepts in our place. Answers from now on are the last of their connections and say so; nobody
        who may be about to ask something is cut off. Returns when all have gone, or after `grace_s`."""
        self.draining = self.retiring = True
        await self._stop_listening()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                self.note_quiet()
                await self._quiet.wait()
                while self._arriving:  # ends by itself: a handshake that takes too long is given up
                    await asyncio.sleep(_LOOK_S)
                    await self._quiet.wait()

    async def drain(self, grace_s: float) -> int:
        """Stop listening, close what is idle, let answers finish for `grace_s`, then cut. Returns how many were cut."""
        self.draining, self.retiring = True, False
        await self._stop_listening()
        for conn in list(self._connections):
            if conn.is_idle():
                conn.close()
        try:
            self.note_quiet()
            async with asyncio.timeout(grace_s):
                await self._quiet.wait()
        except TimeoutError:
            pass
        unfinished = self.running
        await self.close()
        return unfinished

    async def close(self, *, patience_s: float = 5.0) -> None:
        """Cut every connection and wait until their handlers have cleaned up, within `patience_s`."""
        self.draining, self.retiring = True, False
        await self._stop_listening()
        for conn in [*self._connections, *self._refused]:
            abort(conn.transport)
        try:
            self.note_quiet()
            async with asyncio.timeout(patience_s):
                await self._quiet.wait()
        except TimeoutError:
            log.warning("handlers did not end in time", running=self.running)

    async def _stop_listening(self) -> None:
        listeners, self._listeners = self._listeners, []
        if not isinstance(self.loop, uvloop.Loop):
            # asyncio loses whoever it has just let in when the listener closes before they sit: it leaves them open.
            for sock in (each for listener in listeners for each in getattr(listener, "sockets", ())):
                self.loop.remove_reader(sock.fileno())
            await asyncio.sleep(0)
        for listener in listeners:
            listener.close()
        for path in self._paths:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        self._paths.clear()
