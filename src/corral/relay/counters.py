"""Counters of the relay: plain numbers, incremented in place and read when metrics are exported."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
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
