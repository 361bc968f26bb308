"""What the relay counts. Plain numbers, bumped in place; whoever exports metrics reads them when asked."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    connections: int = 0  # accepted
    connections_open: int = 0
    connections_refused: int = 0  # over the limit
    requests: int = 0
    malformed: int = 0  # answered 4xx by the relay itself because of what came over the wire
    handler_failures: int = 0
    clients_gone: int = 0  # left while an answer was pending
    client_timeouts: int = 0  # head, body, write stall
    upstream_connects: int = 0
    upstream_connect_failures: int = 0
    upstream_reuses: int = 0
    upstream_retries: int = 0
    upstream_failures: int = 0  # broke, timed out or talked nonsense after the request was sent
    upstream_timeouts: int = 0
    upstream_open: int = 0
    tunnels: int = 0
    bytes_relayed: int = 0  # of answers, to clients
