"""What an answer of a gRPC process to Health, or its absence, says (contract: http.md §5.3). Free of gRPC."""

from __future__ import annotations

from enum import StrEnum


class Pulse(StrEnum):
    ALIVE = "alive"
    BUSY = "busy"  # it did not answer in time, or answered something else: silence is not death
    UNREACHABLE = "unreachable"
