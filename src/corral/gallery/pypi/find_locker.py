"""Finds the tool for locking wheels on this machine."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from corral.contract.sources import Wheel
from corral.gallery.pypi.lock import Lock, WheelLocker
from corral.gallery.pypi.pip import PipLocker
from corral.gallery.pypi.uv import UvLocker
from corral.gallery.pypi.wheel_tags import MINIMUM_SYSTEM, MinimumSystem
from corral.kit.errors import Failed


class NoLocker:
    """Used if there is no tool: only pypi:// sources need one."""

    async def lock(self, requirement: str, *, platform: str, python: str) -> Lock:
        raise Failed(f"{requirement} cannot be locked for {platform}: the controller has neither uv nor pip")

    async def lock_pinned(self, requirements: str, *, platform: str, python: str) -> tuple[Wheel, ...]:
        raise Failed(f"packages cannot be listed for {platform}: the controller has neither uv nor pip")


def find_locker(
    env: Mapping[str, str],
    *,
    minimum: MinimumSystem = MINIMUM_SYSTEM,
    timeout_s: float = 300.0,
    cache_folder: Path | None = None,
    alone: bool = False,
) -> WheelLocker:
    """uv, if it is on PATH or beside this Python; otherwise pip; otherwise the pip that Python bundles for ensurepip.
    `alone`: without the package's dependencies."""
    beside = Path(sys.executable).parent
    uv = shutil.which("uv", path=env.get("PATH")) or shutil.which("uv", path=str(beside))
    if uv is not None:
        return UvLocker(uv, env=env, minimum=minimum, timeout_s=timeout_s, cache_folder=cache_folder, alone=alone)
    if importlib.util.find_spec("pip") is not None:
        return PipLocker([sys.executable, "-m", "pip"], env=env, timeout_s=timeout_s, alone=alone)
    if (bundled := _bundled_pip()) is not None:
        return PipLocker([sys.executable, str(bundled / "pip")], env=env, timeout_s=timeout_s, alone=alone)
    return NoLocker()


def _bundled_pip() -> Path | None:
    spec = importlib.util.find_spec("ensurepip")
    if spec is None or spec.origin is None:
        return None
    folders = [Path(spec.origin).parent / "_bundled", Path("/usr/share/python-wheels")]
    return next((wheel for folder in folders for wheel in sorted(folder.glob("pip-*.whl"))), None)
