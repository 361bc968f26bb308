"""Types of stored rows that deciding modules use: no SQL here, so that they may be imported anywhere."""

from __future__ import annotations

from enum import StrEnum


class ReplicaStage(StrEnum):
    PLACED = "placed"  # its node is chosen; backend and files are brought there
    ORDERED = "ordered"  # its node was told to start it
    RUNNING = "running"  # its node has listed it as ready
    LEAVING = "leaving"  # it gets no requests any more, and goes when its work has ended
