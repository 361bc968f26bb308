"""Deleting a backend: which folders go (pure), and how they go so that a crash leaves all or nothing. `remove_aside`
blocks for as long as it takes; `set_aside` is a rename each."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from corral.blobs.disk import remove_tree
from corral.kit.errors import Conflict
from corral.kit.files import sync_folder
from corral.worker.installer.inventory import InstalledBackend, Inventory
from corral.worker.installer.recover import DELETING


def plan_removal(inventory: Inventory, name: str, build: InstalledBackend | None) -> tuple[str, ...]:
    """The folders to remove, metas first. A meta takes its build along, unless somebody else still needs that."""
    if build is None:
        return (name,)
    metas = inventory.metas_of(build.name)
    if name in metas:
        wanted_by_others = metas != {name} or (build.record is not None and build.record.direct)
        return (name,) if wanted_by_others else (name, build.name)
    return (*sorted(metas), build.name)


def set_aside(backends: Path, names: Collection[str], in_use: Collection[Path]) -> None:
    """From here on they are not installed, however long removing their files takes. Raises Conflict, with nothing
    touched, while something runs from what would go."""
    for each in names:
        folder = (backends / each).resolve()
        running = [path for path in in_use if path.is_relative_to(folder)]
        if running:
            raise Conflict(f"{each} is in use: something runs from {running[0]}")
    for each in names:
        (backends / each).rename(_aside(backends, each))


def remove_aside(backends: Path, names: Collection[str]) -> None:
    """What was set aside, now or before a crash."""
    sync_folder(backends)
    for each in names:
        remove_tree(_aside(backends, each))


def _aside(backends: Path, name: str) -> Path:
    return backends / f"{DELETING}{name}"
