"""Locks requirements/runtime.txt for every platform and Python that Corral supports (see scripts/_wheels)."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from corral.gallery.pypi.find_locker import find_locker
from corral.gallery.pypi.uv import UvLocker
from corral.kit.errors import CorralError

ROOT = Path(__file__).resolve().parents[1]
PLATFORMS = ("linux/amd64", "linux/arm64", "darwin/arm64")
PYTHONS = ("3.11", "3.12", "3.13", "3.14")


async def main() -> int:
    beside = ROOT / ".venv" / "with-uv" / "bin"
    locker = find_locker({**os.environ, "PATH": f"{os.environ['PATH']}:{beside}"})
    if not isinstance(locker, UvLocker):
        print("scripts/_wheels: uv is needed to look at the wheels of other platforms", file=sys.stderr)
        return 2
    pinned = "".join((ROOT / "requirements" / name).read_text() for name in ("runtime.txt", "pip.txt"))
    faults = 0
    for platform in PLATFORMS:
        for python in PYTHONS:
            try:
                wheels = await locker.lock_pinned(pinned, platform=platform, python=python)
            except CorralError as error:
                problem = error.message
            else:
                foreign = [wheel.name for wheel in wheels if wheel.sha256 not in pinned]
                problem = f"hashes that are not pinned: {', '.join(foreign)}" if foreign else ""
            faults += bool(problem)
            print(f"{platform:13} Python {python}: {problem or f'{len(wheels)} wheels'}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
