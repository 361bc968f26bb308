"""Which of a release's files is installed. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from corral.contract.sources import TextFile, Wheel, normal_name

# Version tags may hold a local part with `+` and `_`; the file name of a wheel escapes everything else.
_FILE = re.compile(
    r"(?P<project>[A-Za-z0-9](?:[A-Za-z0-9._]*[A-Za-z0-9])?)-(?P<version>[A-Za-z0-9.!+_]+)"
    r"(?:-(?P<build>[0-9][A-Za-z0-9.]*))?"
    r"-(?P<python>[A-Za-z0-9._]+)-(?P<abi>[A-Za-z0-9._]+)-(?P<platform>[A-Za-z0-9._]+)\.whl\Z"
)


@dataclass(frozen=True, slots=True)
class WheelName:
    """What a wheel says of itself in its file's name (PEP 427)."""

    project: str  # normalised
    version: str
    build: tuple[int, str]
    tags: tuple[str, ...]


def parse_wheel_name(name: str) -> WheelName | None:
    found = _FILE.match(name)
    if found is None:
        return None
    tags = tuple(
        f"{python}-{abi}-{platform}"
        for python in found["python"].split(".")
        for abi in found["abi"].split(".")
        for platform in found["platform"].split(".")
    )
    return WheelName(normal_name(found["project"]), found["version"], _build(found["build"] or ""), tags)


def choose_wheel(wheels: Iterable[Wheel], ranks: Mapping[str, int]) -> Wheel | None:
    """The one made most closely for the machine; of equals the newest build, then by name so that all agree."""
    usable = []
    for wheel in wheels:
        name = parse_wheel_name(wheel.name)
        rank = min((ranks[tag] for tag in name.tags if tag in ranks), default=None) if name is not None else None
        if name is not None and rank is not None:
            newest = (-name.build[0], name.build[1])
            usable.append((rank, newest, wheel.name, wheel))
    return min(usable)[-1] if usable else None


def digest_of_lock(wheels: Sequence[Wheel], files: Sequence[TextFile] = ()) -> str:
    """What the inventory shows for such a build: the same list of the same bytes, whatever order and server."""
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


def _build(text: str) -> tuple[int, str]:
    digits = re.match(r"[0-9]*", text)
    number = digits[0] if digits is not None else ""
    return (int(number or 0), text[len(number) :])
