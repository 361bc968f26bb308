"""Connections that have not shown a valid token yet. Each takes a thread, so there may be only some of them: when one
too many comes, the one that has said nothing for longest goes. Whoever has a token shows it at once, and is not met."""

from __future__ import annotations

import contextlib
import socket


class Newcomers:
    """Not locked: the listener's lock is over it."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: dict[socket.socket, None] = {}  # in the order they came

    def add(self, connection: socket.socket) -> bool:
        """False when another had to go for it."""
        crowded = len(self._waiting) >= self._most
        if crowded:
            eldest = next(iter(self._waiting))
            del self._waiting[eldest]
            with contextlib.suppress(OSError):
                # Its thread notices, and closes it. TLS's own shutdown would first forget that it is TLS.
                socket.socket.shutdown(eldest, socket.SHUT_RDWR)
        self._waiting[connection] = None
        return not crowded

    def replace(self, before: socket.socket, after: socket.socket) -> None:
        """The same connection is another object now; its turn stays, or passed meanwhile."""
        if before in self._waiting:
            self._waiting = {after if each is before else each: None for each in self._waiting}

    def remove(self, connection: socket.socket) -> None:
        """It has shown what it should, or is gone."""
        self._waiting.pop(connection, None)

    def __contains__(self, connection: socket.socket) -> bool:
        return connection in self._waiting
