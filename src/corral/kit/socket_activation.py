"""Listening sockets that another process opened for this one, and the sign that this one is ready to use them.

The sockets come by the protocol of systemd's socket activation (`LISTEN_PID`, `LISTEN_FDS`, `LISTEN_FDNAMES`): their
owner keeps them open while this process is restarted, so connections wait in the backlog and none is refused. The sign
is a line written to a descriptor whose number is in `CORRAL_INTERNAL_READY_FD`, closed afterwards. Both variables are
taken out of the environment: they are not for the processes that this one starts.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import MutableMapping

FIRST_FD = 3  # the number the protocol gives the first socket
READY_FD = "CORRAL_INTERNAL_READY_FD"
BACKLOG = 2048  # connections that wait while nobody accepts; the kernel's own limit (somaxconn) may be smaller


def take_listeners(environ: MutableMapping[str, str]) -> list[socket.socket]:
    """The sockets handed to this process; none where they were meant for another."""
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
    """One for each address of the host, all on one port, which is not 0. Raises OSError."""
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
    """Tell the supervisor that this process does its work now. Nothing happens where none asked, or when it is told
    again."""
    descriptor = environ.pop(READY_FD, "")
    if descriptor.isdecimal():
        with contextlib.suppress(OSError):  # the supervisor is gone
            os.write(int(descriptor), b"\n")
        with contextlib.suppress(OSError):
            os.close(int(descriptor))
