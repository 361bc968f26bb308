"""Deleting a backend: which folders go (pure), and how they go so that a crash leaves all or nothing. Blocking."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from corral.blobs.folders import remove_tree
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


def remove_backend(
    backends: Path, inventory: Inventory, name: str, build: InstalledBackend | None, in_use: Collection[Path]
) -> tuple[str, ...]:
    """Raises Conflict, with nothing touched, while something runs from what would go."""
    gone = plan_removal(inventory, name, build)
    for each in gone:
        folder = (backends / each).resolve()
        running = [path for path in in_use if path.is_relative_to(folder)]
        if running:
            raise Conflict(f"{each} is in use: something runs from {running[0]}")
    for each in gone:
        _remove(backends, each)
    return gone


def _remove(backends: Path, name: str) -> None:
    """Renamed first: from then on it is not installed, however long removing its files takes."""
    aside = backends / f"{DELETING}{name}"
    remove_tree(aside)
    (backends / name).rename(aside)
    sync_folder(backends)
    remove_tree(aside)
