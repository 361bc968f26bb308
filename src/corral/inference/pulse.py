"""What an answer of a gRPC process to Health, or its absence, says
(docs/reference/wire/routing.md#health-of-a-process). Free of gRPC."""

from __future__ import annotations

from enum import StrEnum


class Pulse(StrEnum):
    ALIVE = "alive"
    BUSY = "busy"  # it did not answer in time, or answered something else: silence is not death
    UNREACHABLE = "unreachable"
