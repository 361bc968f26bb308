"""Options of sockets that neither asyncio nor uvloop sets for us."""

from __future__ import annotations

import socket
import struct
from typing import Any

DEAD_AFTER_S = 60.0


def watch_for_dead_peers(sock: Any, dead_after_s: float = DEAD_AFTER_S, *, sends: bool = False) -> None:
    """Let the kernel find out that the other machine is gone: a long generation may be silent, its host must not be.
    Set on a listening socket it holds for the connections it accepts. `sends`: also where we are the ones who wait for
    what they sent to arrive; by itself the kernel repeats that for a quarter of an hour."""
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPIDLE": max(1, round(dead_after_s / 2)),
        "TCP_KEEPINTVL": max(1, round(dead_after_s / 6)),
        "TCP_KEEPCNT": 3,
    }
    if sends:
        options["TCP_USER_TIMEOUT"] = round(dead_after_s * 1000)
    for name, value in options.items():
        if hasattr(socket, name):  # not every system has all of them
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def reset_on_close(sock: Any) -> None:
    """Closing then tells the peer that something broke: where only the end of the stream ends an answer, a plain close
    would pass a truncated one off as whole."""
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
