"""All limits, timeouts and counters of the relay. Tests use smaller limits."""

from __future__ import annotations

from dataclasses import dataclass, field

from corral.contract.http import Patience
from corral.relay.loop.sockets import DEAD_AFTER_S

TICK_SHARE = 4  # deadlines are checked four times within the shortest timeout
MAX_TICK_S = 1.0
MIN_TICK_S = 0.01


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Timeouts for clients. They are accurate to a quarter of the shortest one, at most 1 s."""

    handshake_s: float = 10.0  # TLS
    head_s: float = 15.0  # from the first byte of a head (or from connecting) to its last
    keep_alive_s: float = 75.0  # between two requests
    body_idle_s: float = 30.0  # between two bytes of a body while a handler waits for it
    # A body may take this long plus one second per `body_floor_bytes_per_s` received: one byte a second is cut off.
    body_grace_s: float = 60.0
    body_floor_bytes_per_s: int = 128
    write_stall_s: float = 60.0  # a client that reads none of the written bytes
    tunnel_idle_s: float = 3600.0  # a WebSocket with no byte either way
    linger_s: float = 2.0  # after a response with unread input: closing at once could lose the response

    def tick_s(self) -> float:
        spans = (self.head_s, self.keep_alive_s, self.body_idle_s, self.body_grace_s, self.write_stall_s, self.linger_s)
        return choose_tick_s(min(spans))


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one server."""

    head_bytes: int = 64 * 1024
    header_count: int = 128
    connections: int = 10_000
    refusals: int = 256  # connections over the limit that get a 503; the rest are closed without one
    pipelined_bytes: int = 64 * 1024  # read ahead of the current request, so that the end of the stream is noticed
    body_window_bytes: int = 128 * 1024  # of a body that no handler reads yet
    backlog: int = 2048
    timeouts: Timeouts = field(default_factory=Timeouts)


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Limits of connections to upstreams."""

    connect_s: float = 5.0  # TLS handshake included
    patience: Patience = field(default_factory=Patience)
    dead_after_s: float = DEAD_AFTER_S  # a machine that acknowledges no packet
    send_stall_s: float = 60.0  # an upstream that reads none of the request's bytes
    idle_per_target: int = 512
    idle_s: float = 30.0
    max_age_s: float = 600.0
    head_bytes: int = 64 * 1024
    header_count: int = 256
    tunnel_idle_s: float = 3600.0

    def tick_s(self) -> float:
        spans = (self.send_stall_s, self.idle_s, self.max_age_s, self.tunnel_idle_s)
        patient = (span for span in self.patience if span is not None)
        return choose_tick_s(min(*spans, *patient))


def choose_tick_s(shortest_s: float) -> float:
    return min(MAX_TICK_S, max(MIN_TICK_S, shortest_s / TICK_SHARE))


@dataclass(slots=True)
class Counters:
    """Incremented in place, and read when metrics are exported."""

    connections: int = 0  # accepted
    connections_open: int = 0
    connections_refused: int = 0  # over the limit
    requests: int = 0
    malformed: int = 0  # requests that the relay itself refused with 4xx
    handler_failures: int = 0
    clients_gone: int = 0  # left before their response was complete
    client_timeouts: int = 0  # head, body, write stall
    upstream_connects: int = 0
    upstream_local_connects: int = 0  # of these, through a unix socket in place of host and port
    upstream_connect_failures: int = 0
    upstream_reuses: int = 0
    upstream_retries: int = 0
    upstream_failures: int = 0  # broke, timed out or sent malformed bytes after the request was sent
    upstream_timeouts: int = 0
    upstream_open: int = 0
    tunnels: int = 0
    bytes_relayed: int = 0  # of responses, to clients
