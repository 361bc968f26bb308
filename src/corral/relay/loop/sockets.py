"""Socket options that neither asyncio nor uvloop sets."""

from __future__ import annotations

import socket
import struct
import sys
from typing import Any

DEAD_AFTER_S = 60.0

# Of `struct tcp_info`: tcpi_retransmits, tcpi_unacked, tcpi_last_ack_recv.
_TCP_INFO = struct.Struct("=2xB21xI28xI")
_MIN_RETRANSMITS = 2  # one packet may get lost on any network


def watch_for_dead_peers(sock: Any, dead_after_s: float = DEAD_AFTER_S, *, sends: bool = False) -> None:
    """Let the kernel detect that the other machine is gone: a long generation may be silent, its host must not be. Set
    on a listening socket, it applies to accepted connections. `sends`: also limit how long sent bytes may stay
    unacknowledged; the kernel's default is a quarter of an hour."""
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


def unacknowledged_s(sock: Any) -> float:
    """How long the peer's kernel has acknowledged nothing although bytes were retransmitted; 0: it acknowledges, there
    is nothing to acknowledge, or this system cannot tell. A peer with a full receive window still acknowledges."""
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6) or sys.platform != "linux":
        return 0.0
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    if len(info) < _TCP_INFO.size:
        return 0.0
    retransmits, unacked, last_ack_ms = _TCP_INFO.unpack(info)
    return float(last_ack_ms) / 1000 if unacked and retransmits >= _MIN_RETRANSMITS else 0.0


def reset_on_close(sock: Any) -> None:
    """Make `close` send a reset: where the end of the stream ends the response, a plain close would make a truncated
    response look complete."""
    if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
