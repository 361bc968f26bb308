"""Locks: a requirement and a kind of machine in, a list of wheels with hashes out. Nothing is built from source.

`uv.py` and `pip.py` make locks; `find_locker.py` selects one of them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from corral.contract.sources import TextFile, Wheel, normal_name
from corral.kit.errors import CorralError, Failed


@dataclass(frozen=True, slots=True)
class Lock:
    requirement: str  # pinned: name==version
    version: str
    python: str
    wheels: tuple[Wheel, ...]


class NoWheels(CorralError):
    """The package exists, but has no wheels for such a machine. A retry will hardly help."""

    code = "no_wheels"


class WheelLocker(Protocol):
    async def lock(self, requirement: str, *, platform: str, python: str) -> Lock:
        """Raises NoWheels, NotFound (no such package or version), Unreachable (the index does not answer), Failed."""

    async def lock_pinned(self, requirements: str, *, platform: str, python: str) -> tuple[Wheel, ...]:
        """The wheels of a complete list of pinned requirements, to which no dependency is added. Raises the same."""


def lock_of(requirement: str, python: str, wheels: tuple[Wheel, ...]) -> Lock:
    """The lock of a requirement whose wheels are known. Raises Failed if its own wheel is not among them."""
    project = normal_name(re.split(r"[\[=]", requirement)[0])
    version = next((wheel.version for wheel in wheels if wheel.project == project), "")
    if not version:
        raise Failed(f"the list of wheels does not contain {project}")
    return Lock(f"{project}=={version}", version, python, wheels)


def digest_of_lock(wheels: Sequence[Wheel], files: Sequence[TextFile] = ()) -> str:
    """The digest that inventories show for such a build. It does not depend on the order or the servers of the
    wheels."""
    lines = sorted(f"{wheel.project}=={wheel.version} {wheel.name} sha256:{wheel.sha256}" for wheel in wheels)
    return _digest([*lines, *_file_lines(files)])


def digest_of_files(files: Sequence[TextFile]) -> str:
    return _digest(_file_lines(files))


def _file_lines(files: Sequence[TextFile]) -> list[str]:
    return sorted(
        f"{'+' if file.executable else '-'} {file.path} sha256:{hashlib.sha256(file.text.encode()).hexdigest()}"
        for file in files
    )


def _digest(lines: Iterable[str]) -> str:
    return f"sha256:{hashlib.sha256(''.join(line + chr(10) for line in lines).encode()).hexdigest()}"
