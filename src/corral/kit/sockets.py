"""Listening sockets that a supervisor opened for this process, the readiness report, and aborting a connection.

The sockets come by the protocol of systemd's socket activation (`LISTEN_PID`, `LISTEN_FDS`, `LISTEN_FDNAMES`): their
owner keeps them open while this process is restarted, so connections wait in the backlog and none is refused. The
readiness report is a line written to the descriptor whose number is in `CORRAL_INTERNAL_READY_FD`, closed afterwards.
Both variables are removed from the environment: the children of this process must not use them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import MutableMapping

FIRST_FD = 3  # the number the protocol gives the first socket
READY_FD = "CORRAL_INTERNAL_READY_FD"
BACKLOG = 2048  # connections that wait while no process accepts; the kernel's own limit (somaxconn) may be smaller


def take_listeners(environ: MutableMapping[str, str]) -> list[socket.socket]:
    """The sockets passed to this process; none where they were meant for another process."""
    pid, count = environ.pop("LISTEN_PID", ""), environ.pop("LISTEN_FDS", "")
    environ.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or not count.isdecimal():
        return []
    found = []
    for descriptor in range(FIRST_FD, FIRST_FD + int(count)):
        os.set_inheritable(descriptor, False)
        found.append(socket.socket(fileno=descriptor))
    return found


def open_listeners(host: str, port: int) -> list[socket.socket]:
    """One socket for each address of the host, all on one port, which is not 0. Raises OSError."""
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    opened: list[socket.socket] = []
    try:
        for family, address in dict.fromkeys((info[0], info[4]) for info in infos):
            listener = socket.socket(family, socket.SOCK_STREAM)
            opened.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
    except BaseException:
        for each in opened:
            each.close()
        raise
    return opened


def report_ready(environ: MutableMapping[str, str]) -> None:
    """Report to the supervisor that this process is ready. Does nothing without a supervisor, or the second time."""
    descriptor = environ.pop(READY_FD, "")
    if descriptor.isdecimal():
        with contextlib.suppress(OSError):  # the supervisor is gone
            os.write(int(descriptor), b"\n")
        with contextlib.suppress(OSError):
            os.close(int(descriptor))


def abort(transport: asyncio.WriteTransport) -> None:
    """`transport.abort()`, which does nothing where the connection is closed already.

    Over TLS a second `close()` makes asyncio forget the connection, and early releases of Python 3.11 (Debian 12's is
    one) raise AttributeError here. The first `close()` ends the connection in order, within its own time limit.
    """
    with contextlib.suppress(AttributeError):
        transport.abort()
