"""Options of sockets that neither asyncio nor uvloop sets for us."""

from __future__ import annotations

import socket
import struct
from typing import Any


def watch_for_dead_peers(sock: Any) -> None:
    """Let the kernel find out that the other machine is gone: a long generation may be silent, its host must not be.
    Set on a listening socket it holds for the connections it accepts."""
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):  # not every system has all of them
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def reset_on_close(sock: Any) -> None:
    """Closing then tells the peer that something broke: where only the end of the stream ends an answer, a plain close
    would pass a truncated one off as whole."""
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
