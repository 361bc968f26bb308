"""Which wheels a machine can use, best first: the tags of PEP 425, 600 and 3149 for CPython. Pure.

Judged for a class of machines, not for the one we run on: `glibc` and `macos` are the oldest system we still serve.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from corral.kit.errors import Invalid

_PYTHON = re.compile(r"3\.([0-9]{1,2})\Z")
_LINUX_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
_MAC_MACHINES = {"amd64": "x86_64", "arm64": "arm64"}
# Old names for three of the glibc versions, and before which version no wheels were ever made.
_OLD_NAMES = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
_FIRST_GLIBC = {"x86_64": 5, "aarch64": 17}
_FIRST_MACOS = {"x86_64": (10, 4), "arm64": (11, 0)}
_FIRST_ABI3 = 2


@dataclass(frozen=True, slots=True)
class Floor:
    """The oldest systems that must be able to run what is chosen."""

    glibc: tuple[int, int] = (2, 28)
    macos: tuple[int, int] = (14, 0)


FLOOR = Floor()


def supported_tags(platform: str, python: str, floor: Floor = FLOOR) -> dict[str, int]:
    """`cp311-cp311-manylinux_2_28_x86_64` → rank, 0 the best. Raises Invalid for a platform or Python nobody serves."""
    return {tag: rank for rank, tag in enumerate(_tags(list(_platforms(platform, floor)), _minor(python)))}


def _tags(platforms: list[str], minor: int) -> Iterator[str]:
    """As installers rank them: made for this Python, then the stable ABI, then no ABI, then no platform."""
    own = f"cp3{minor}"
    for platform in platforms:
        yield f"{own}-{own}-{platform}"
    for older in range(minor, _FIRST_ABI3 - 1, -1):
        for platform in platforms:
            yield f"cp3{older}-abi3-{platform}"
    for platform in platforms:
        yield f"{own}-none-{platform}"
    pure = [f"py3{minor}", "py3", *(f"py3{older}" for older in range(minor - 1, -1, -1))]
    for interpreter in pure:
        for platform in platforms:
            yield f"{interpreter}-none-{platform}"
    yield f"{own}-none-any"
    for interpreter in pure:
        yield f"{interpreter}-none-any"


def _platforms(platform: str, floor: Floor) -> Iterator[str]:
    os, _, arch = platform.partition("/")
    if os == "linux" and arch in _LINUX_MACHINES:
        yield from _linux(_LINUX_MACHINES[arch], floor.glibc)
    elif os == "darwin" and arch in _MAC_MACHINES:
        yield from _macos(_MAC_MACHINES[arch], floor.macos)
    else:
        raise Invalid(f"wheels are not locked for {platform!r}")


def _linux(machine: str, glibc: tuple[int, int]) -> Iterator[str]:
    for minor in range(glibc[1], _FIRST_GLIBC[machine] - 1, -1):
        yield f"manylinux_2_{minor}_{machine}"
        if minor in _OLD_NAMES:
            yield f"{_OLD_NAMES[minor]}_{machine}"
    yield f"linux_{machine}"


def _macos(machine: str, newest: tuple[int, int]) -> Iterator[str]:
    first = _FIRST_MACOS[machine]
    versions = [(major, 0) for major in range(newest[0], 10, -1)]
    if first < (11, 0):
        versions += [(10, minor) for minor in range(16, first[1] - 1, -1)]
    for major, minor in versions:
        yield f"macosx_{major}_{minor}_{machine}"
        yield f"macosx_{major}_{minor}_universal2"


def _minor(python: str) -> int:
    found = _PYTHON.match(python)
    if found is None:
        raise Invalid(f"{python!r} is not a version of Python; write 3.11")
    return int(found[1])
