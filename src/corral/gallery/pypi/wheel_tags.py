"""Which wheels a kind of machine can use, best first, and the best of several. Pure.

The tags are those of `packaging`, for a class of machines instead of the machine this runs on: `MinimumSystem` is the
oldest system that must be able to run the chosen wheels.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from packaging.tags import Tag, compatible_tags, cpython_tags, mac_platforms
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from corral.contract.sources import Wheel
from corral.kit.errors import Invalid

_PYTHON = re.compile(r"3\.([0-9]{1,2})\Z")
_LINUX_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
_MAC_MACHINES = {"amd64": "x86_64", "arm64": "arm64"}
# Old names of three glibc versions, and the first version for which wheels were ever made.
_OLD_NAMES = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
_FIRST_GLIBC = {"x86_64": 5, "aarch64": 17}


@dataclass(frozen=True, slots=True)
class MinimumSystem:
    """The oldest systems that must be able to run the chosen wheels."""

    glibc: tuple[int, int] = (2, 28)
    macos: tuple[int, int] = (14, 0)


MINIMUM_SYSTEM = MinimumSystem()


def supported_tags(platform: str, python: str, minimum: MinimumSystem = MINIMUM_SYSTEM) -> dict[Tag, int]:
    """Tag → rank, 0 the best. Raises Invalid for an unsupported platform or Python."""
    version, platforms = _version(python), list(_platforms(platform, minimum))
    interpreter = f"cp{version[0]}{version[1]}"
    tags = [
        *cpython_tags(version, abis=[interpreter], platforms=platforms),
        *compatible_tags(version, interpreter, platforms),
    ]
    return {tag: rank for rank, tag in enumerate(dict.fromkeys(tags))}


def choose_wheel(wheels: Iterable[Wheel], ranks: Mapping[Tag, int]) -> Wheel | None:
    """The wheel with the best tag; of equal ones the newest build, then the first by name, so that all controllers
    choose the same."""
    usable = []
    for wheel in wheels:
        try:
            _, _, build, tags = parse_wheel_filename(wheel.name)
        except InvalidWheelFilename:
            continue
        if (rank := min((ranks[tag] for tag in tags if tag in ranks), default=None)) is not None:
            number, suffix = build or (0, "")
            usable.append((rank, (-number, suffix), wheel.name, wheel))
    return min(usable)[-1] if usable else None


def _platforms(platform: str, minimum: MinimumSystem) -> Iterator[str]:
    os, _, arch = platform.partition("/")
    if os == "linux" and arch in _LINUX_MACHINES:
        yield from _linux_platforms(_LINUX_MACHINES[arch], minimum.glibc)
    elif os == "darwin" and arch in _MAC_MACHINES:
        yield from mac_platforms(minimum.macos, _MAC_MACHINES[arch])
    else:
        raise Invalid(f"wheels cannot be locked for the platform {platform!r}")


def _linux_platforms(machine: str, glibc: tuple[int, int]) -> Iterator[str]:
    """Not `packaging`'s, which are those of the machine this runs on."""
    for minor in range(glibc[1], _FIRST_GLIBC[machine] - 1, -1):
        yield f"manylinux_2_{minor}_{machine}"
        if minor in _OLD_NAMES:
            yield f"{_OLD_NAMES[minor]}_{machine}"
    yield f"linux_{machine}"


def _version(python: str) -> tuple[int, int]:
    found = _PYTHON.match(python)
    if found is None:
        raise Invalid(f"{python!r} is not a version of Python: write 3.11")
    return 3, int(found[1])
