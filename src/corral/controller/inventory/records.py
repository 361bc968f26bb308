"""What is known of running processes, as deciding modules see it. Records only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ProcessActivity:
    """What is known of the requests one process has under way."""

    in_flight: int = 0
    known: bool = False  # we have listened for long enough that a busy one would have been heard
