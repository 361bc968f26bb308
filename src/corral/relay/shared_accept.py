"""Accepting on sockets that several processes share, evenly.

Every process is woken for a new connection, and the first one gets it. Left alone, one process would take all of a
burst, and serve it on one core while the others idle. So a process that has more connections than another leaves new
ones alone for a moment; should nobody else take them by then, it does.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Sequence

from corral.kit.log import get_log

log = get_log(__name__)

_LEAVE_S = 0.005  # for the others to take it
_FULL_S = 1.0  # without descriptors or memory nothing can be accepted
_OUT_OF = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_BATCH = 4  # that a process takes after all, each time


class SharedListener:
    """Looks like one of asyncio's servers, as far as `RelayServer` needs."""

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        accepted: Callable[[socket.socket], None],
        is_turn: Callable[[], bool],
    ) -> None:
        self.sockets = tuple(sockets)
        self._accepted = accepted
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
            self._pause = self._loop.call_later(_LEAVE_S, self._resume)

    def _resume(self) -> None:
        """Whatever still waits was left alone by everybody."""
        self._pause = None
        if not self._is_closed:
            self._watch()
            for each in self.sockets:
                self._accept(each, _BATCH)

    def _accept(self, listener: socket.socket, most: int) -> None:
        for _ in range(most):
            try:
                connection, _address = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _OUT_OF:
                    raise
                log.error("connections cannot be accepted for now", reason=error.strerror)
                self._ignore()
                self._pause = self._loop.call_later(_FULL_S, self._resume)
                return
            connection.setblocking(False)
            if connection.family != socket.AF_UNIX:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._accepted(connection)
