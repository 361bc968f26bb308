"""Accepts connections on sockets that several processes share, and spreads them evenly.

A new connection wakes every process, and the first one gets it. Without further rules one process would accept a whole
burst and serve it on one core while the others are idle. So a process that has more connections than another ignores
new ones for a moment, and accepts those that no other process has accepted by then.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Sequence

from corral.kit.log import get_log

log = get_log(__name__)

_YIELD_S = 0.005  # for the other processes to accept
_FULL_S = 1.0  # without descriptors or memory nothing can be accepted
_RESOURCE_ERRORS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_BATCH = 4  # connections that a process accepts after the pause


class SharedListener:
    """Has the interface of asyncio's servers, as far as `RelayServer` needs it."""

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        on_accept: Callable[[socket.socket], None],
        is_turn: Callable[[], bool],
    ) -> None:
        self.sockets = tuple(sockets)
        self._on_accept = on_accept
        self._is_turn = is_turn
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._is_closed = False
        for each in self.sockets:
            each.setblocking(False)
        self._watch()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._ignore()
            for each in self.sockets:
                each.close()

    def _watch(self) -> None:
        for each in self.sockets:
            self._loop.add_reader(each.fileno(), self._on_readable, each)

    def _ignore(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        for each in self.sockets:
            self._loop.remove_reader(each.fileno())

    def _on_readable(self, listener: socket.socket) -> None:
        if self._is_turn():
            self._accept(listener, 1)
        else:
            self._ignore()
            self._pause = self._loop.call_later(_YIELD_S, self._resume)

    def _resume(self) -> None:
        """Accept the connections that no process has accepted."""
        self._pause = None
        if not self._is_closed:
            self._watch()
            for each in self.sockets:
                self._accept(each, _BATCH)

    def _accept(self, listener: socket.socket, max_count: int) -> None:
        for _ in range(max_count):
            try:
                connection, _address = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _RESOURCE_ERRORS:
                    raise
                log.error("cannot accept connections for now", reason=error.strerror)
                self._ignore()
                self._pause = self._loop.call_later(_FULL_S, self._resume)
                return
            connection.setblocking(False)
            if connection.family != socket.AF_UNIX:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._on_accept(connection)
