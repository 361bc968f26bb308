"""Removes versions of Corral that nothing on this machine uses any more, after an upgrade has succeeded. Blocking.

Kept are the version in use, the one before, and every version from which a process runs: shims of backends live on
across upgrades, and `corral up` and other roles may run from the same folder. Where a process cannot be seen, nothing
is removed.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path

import psutil

from corral.worker.upgrade.versions import CURRENT, VERSIONS, Versions, is_complete

_NAME = re.compile(r"[0-9a-f]{16}\Z")
_NAME_IN_PATH = re.compile(rf"/{VERSIONS}/([0-9a-f]{{16}})(?:/|\Z)")
_GONE = ".removed-"


def prune(versions: Versions, keep: Collection[Path]) -> list[str]:
    """Returns the names of the versions that were removed. `keep`: folders of versions, beside the current one."""
    root = versions.root.resolve() / VERSIONS
    try:
        found = sorted(each for each in root.iterdir() if _NAME.match(each.name) and each.is_dir())
        kept = {versions.current, *(each.resolve() for each in keep)}
        # One that is not complete may be under construction by an installer, which holds no lock of ours.
        unused = [each for each in found if each.resolve() not in kept and is_complete(each) and not each.is_symlink()]
        in_use = _find_used(root) if unused else set()
    except OSError:
        return []
    if in_use is None:
        return []
    removed = []
    for folder in unused:
        if folder.name not in in_use and _remove(folder):
            removed.append(folder.name)
    for left in root.glob(f"{_GONE}*"):  # of a removal that was interrupted
        shutil.rmtree(left, ignore_errors=True)
    return removed


def _remove(folder: Path) -> bool:
    aside = folder.with_name(f"{_GONE}{folder.name}")
    try:
        folder.rename(aside)  # whole or gone: a later build does not take half of it for a version
    except OSError:
        return False
    shutil.rmtree(aside, ignore_errors=True)
    return True


def _find_used(root: Path) -> set[str] | None:
    """Names of the versions from which processes run; None: not every process can be seen."""
    used: set[str] = set()
    for process in psutil.process_iter():
        try:
            words = (*process.cmdline(), *_paths_of(process))
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        except (psutil.Error, OSError):
            return None
        # By the name alone, which is a digest: the path may be written by another way through links.
        names = {name for word in words for name in _NAME_IN_PATH.findall(word)}
        if not names and any(_is_below_link(root, word) for word in words):
            return None  # it began with the version to which the link led then
        used |= names
    return used


def _is_below_link(root: Path, word: str) -> bool:
    before, found, _ = word.partition(f"/{CURRENT}/")
    return bool(found) and Path(before).resolve() == root.parent


def _paths_of(process: psutil.Process) -> Iterable[str]:
    """Program and folder of the process, as far as this user may read them."""
    for read in (process.exe, process.cwd):
        try:
            yield read()
        except (psutil.AccessDenied, OSError):
            continue
