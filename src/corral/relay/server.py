"""Listens, accepts connections up to a limit, and drains when it stops."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import socket
import ssl
import stat
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import uvloop

from corral.contract.http import FastPath, Handler
from corral.kit.log import get_log
from corral.kit.sockets import abort
from corral.relay.connection import ClientConnection
from corral.relay.fast_path import FastPathConnection, RunningForward, is_fast_path
from corral.relay.http1.head import RequestHeads
from corral.relay.http1.head_templates import HeadTemplates
from corral.relay.limits import Counters, Limits
from corral.relay.loop.shared_accept import SharedListener
from corral.relay.loop.sockets import watch_for_dead_peers
from corral.relay.loop.ticker import Ticker
from corral.relay.pool import UpstreamPool
from corral.relay.write_queue import WriteQueue

log = get_log(__name__)
_POLL_S = 0.02
# From Python 3.13 on, closing a listener would remove the file, also after a hand-over to another process.
_KEEP_FILE: dict[str, Any] = {"cleanup_socket": False} if sys.version_info >= (3, 13) else {}


class RelayServer:
    """Passes every request to `handler`, except those that the handler's `fast_path` accepts (`fast_path.py`). The
    caller closes the pool; several servers may share it."""

    def __init__(
        self,
        handler: Handler,
        limits: Limits | None = None,
        *,
        pool: UpstreamPool | None = None,
        ssl: ssl.SSLContext | None = None,
        counters: Counters | None = None,
        fast_path: FastPath | None = None,
    ) -> None:
        self.handler = handler
        self.fast_path = fast_path
        self.limits = limits or Limits()
        self.counters = counters or Counters()
        self.pool = pool or UpstreamPool(counters=self.counters)
        self.heads = RequestHeads(self.limits.header_count)
        self.templates = HeadTemplates(self.heads, is_fast_path, head_bytes=self.limits.head_bytes, twice=True)
        self.ticker = Ticker(self.limits.timeouts.tick_s())
        self.keep_alive_s = self.limits.timeouts.keep_alive_s + self.ticker.tick_s
        self.draining = False
        self.retiring = False  # draining while another process listens: clients may still connect and ask
        self.loop = asyncio.get_running_loop()
        self.write_queue = WriteQueue(self, self.loop)
        self._ssl = ssl
        self._listeners: list[asyncio.AbstractServer | SharedListener] = []
        self._taking: set[asyncio.Task[None]] = set()  # accepted on shared sockets, without a protocol yet
        self._files: dict[str, tuple[asyncio.AbstractServer, int]] = {}  # of unix sockets, with the file's inode
        self._connections: set[ClientConnection] = set()
        self._refused: set[ClientConnection] = set()
        # Accepted, TLS handshake not complete. Weak: a failed handshake drops the connection without a callback.
        self._arriving: weakref.WeakSet[ClientConnection] = weakref.WeakSet()
        self.running = 0  # requests whose handlers have not returned
        self._idle = asyncio.Event()
        self._idle.set()
        # Ids of one process differ by the counter, those of two processes by the prefix.
        self.id_form = secrets.token_hex(6).encode() + b"-%x"
        self.id_numbers = itertools.count(1)

    async def listen(self, host: str, port: int, *, reuse_port: bool = False) -> int:
        """Accept on a TCP port, with TLS if the server has a context; 0 picks a free port. Returns the port."""
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
        """Accept on a unix socket, always without TLS. Replaces the socket file of a dead process."""
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(os.lstat(path).st_mode):
                os.unlink(path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(path)
            os.chmod(path, mode)
            await self.listen_on_unix(sock)
        except BaseException:
            sock.close()
            raise

    async def listen_on_unix(self, sock: socket.socket) -> None:
        """Accept on a unix socket that is bound already, always without TLS. Its file is removed at the end, unless
        another process accepts in place of this one."""
        path = sock.getsockname()
        inode = os.stat(path).st_ino
        listener = await self.loop.create_unix_server(
            self._new_connection, sock=sock, backlog=self.limits.backlog, **_KEEP_FILE
        )
        self._listeners.append(listener)
        self._files[path] = listener, inode

    def close_unix(self, path: str) -> None:
        """Stop accepting on this socket and remove its file. Its connections stay."""
        listener, _ = self._files[path]
        listener.close()
        self._listeners.remove(listener)
        self._remove_file(path)

    def _new_connection(self) -> ClientConnection:
        conn = ClientConnection(self) if self.fast_path is None else FastPathConnection(self, self.fast_path)
        if self._ssl is not None:
            self._arriving.add(conn)
        return conn

    async def listen_on(self, sock: socket.socket) -> int:
        """Accept on a socket that another process opened and that listens already. Returns the port."""
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
        """Accept on sockets that other processes accept on too, when `is_turn` returns True
        (`loop/shared_accept.py`)."""
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
            connection.close()  # the client left, or the TLS handshake failed

    @property
    def open_connections(self) -> int:
        """Including those that are just being accepted."""
        return self.counters.connections_open + len(self._taking)

    def running_forwards(self) -> list[RunningForward]:
        """The requests that are on the fast path now, found by looking: requests pay nothing for it."""
        conns = (conn for conn in self._connections if isinstance(conn, FastPathConnection))
        return [found for conn in conns if (found := conn.running_forward()) is not None]

    def descriptors(self) -> list[int]:
        """The listening sockets, for a process that is to accept in place of this one."""
        return [sock.fileno() for listener in self._listeners for sock in getattr(listener, "sockets", ())]

    # Called by connections.

    def admit(self, conn: ClientConnection) -> bool:
        counters = self.counters
        if self._ssl is not None:
            self._arriving.discard(conn)
        if len(self._connections) < self.limits.connections and (not self.draining or self.retiring):
            self._connections.add(conn)
            self._idle.clear()
            self.ticker.add(conn)
            counters.connections += 1
            counters.connections_open += 1
            return True
        counters.connections_refused += 1
        if len(self._refused) < self.limits.refusals:
            self._refused.add(conn)
            self.ticker.add(conn)
            conn.refuse(503, "too many connections", extra=b"retry-after: 1\r\n")
        else:
            abort(conn.transport)
        return False

    def on_connection_lost(self, conn: ClientConnection) -> None:
        self.ticker.discard(conn)
        if conn in self._connections:
            self._connections.discard(conn)
            self.counters.connections_open -= 1
        self._refused.discard(conn)
        self.check_idle()

    def check_idle(self) -> None:
        if not self._connections and not self.running:
            self._idle.set()

    def new_request_id(self) -> bytes:
        return self.id_form % next(self.id_numbers)

    # Stopping.

    async def retire(self, grace_s: float) -> None:
        """Another process accepts in place of this one. Responses from now on close their connections; no client that
        may be about to send a request is cut off. Returns when all clients have left, or after `grace_s`."""
        self.draining = self.retiring = True
        self._files.clear()  # the other process listens on the same unix sockets
        await self._close_listeners()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                self.check_idle()
                await self._idle.wait()
                while self._arriving:  # ends by itself: a handshake has a timeout
                    await asyncio.sleep(_POLL_S)
                    await self._idle.wait()

    async def drain(self, grace_s: float) -> int:
        """Stop listening, close idle connections, let requests finish for `grace_s`, then cut the rest. Returns their
        number."""
        self.draining, self.retiring = True, False
        await self._close_listeners()
        for conn in list(self._connections):
            if conn.is_idle():
                conn.close()
        try:
            self.check_idle()
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            pass
        unfinished = self.running
        await self.close()
        return unfinished

    async def close(self, *, patience_s: float = 5.0) -> None:
        """Cut every connection and wait at most `patience_s` until the handlers have cleaned up."""
        self.draining, self.retiring = True, False
        await self._close_listeners()
        for conn in [*self._connections, *self._refused]:
            abort(conn.transport)
        try:
            self.check_idle()
            async with asyncio.timeout(patience_s):
                await self._idle.wait()
        except TimeoutError:
            log.warning("handlers did not end in time", running=self.running)

    async def _close_listeners(self) -> None:
        listeners, self._listeners = self._listeners, []
        if not isinstance(self.loop, uvloop.Loop):
            # asyncio leaks a connection that it has just accepted when the listener closes before its protocol exists.
            for sock in (each for listener in listeners for each in getattr(listener, "sockets", ())):
                self.loop.remove_reader(sock.fileno())
            await asyncio.sleep(0)
        for listener in listeners:
            listener.close()
        for path in list(self._files):
            self._remove_file(path)

    def _remove_file(self, path: str) -> None:
        _, inode = self._files.pop(path)
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_ino == inode:  # else it is another process's by now
                os.unlink(path)
