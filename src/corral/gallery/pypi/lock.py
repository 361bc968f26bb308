"""What locking is: a requirement and a machine in, a list of wheels out. Nothing is built from source, ever."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from corral.contract.sources import Wheel
from corral.kit.errors import CorralError


@dataclass(frozen=True, slots=True)
class Lock:
    requirement: str  # pinned: name==version
    version: str
    python: str
    wheels: tuple[Wheel, ...]


class NoWheels(CorralError):
    """The package exists, but not as wheels for such a machine. Time will hardly cure it."""

    code = "no_wheels"


class WheelLocker(Protocol):
    async def lock(self, requirement: str, *, platform: str, python: str) -> Lock:
        """Raises NoWheels, NotFound (no such package or version), Unreachable (the index does not answer), Failed."""
