"""The activity of processes, for deciding modules. Records only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ProcessActivity:
    """The requests in flight of one process, as far as they are known."""

    in_flight: int = 0
    known: bool = False  # the controller has been subscribed for long enough to have heard of a busy process
