"""Removes files that no program will ask for again: inputs and outputs of requests, which LocalAI never removes, and
uploads and downloads that were begun and never finished."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

from corral.kit.clock import Clock
from corral.kit.log import get_log
from corral.kit.tasks import run_every
from corral.kit.threads import StopToken, run_in_thread
from corral.worker.localai.file_keys import EPHEMERAL, OUTPUT, UNFINISHED, FileFolders

log = get_log(__name__)
STAGING_TEMP = "staging-tmp"  # temporary files of the bus, in the cache
PARTIAL_S = 24 * 3600.0  # an upload that nobody continued
SWEEP_S = 1800.0


class FileSweep:
    def __init__(self, folders: FileFolders, clock: Clock, *, keep_s: float, partial_s: float = PARTIAL_S) -> None:
        self._folders = folders
        self._clock = clock
        self._keep_s = keep_s
        self._partial_s = partial_s

    async def run(self) -> None:
        await run_every("sweep request files", min(SWEEP_S, self._keep_s), self.sweep, clock=self._clock)

    async def sweep(self) -> None:
        removed = await run_in_thread(self._sweep)
        if removed:
            log.info("old files of requests and uploads removed", count=removed)

    def _sweep(self, stop: StopToken) -> int:
        folders, before, partial_before = self._folders, time.time() - self._keep_s, time.time() - self._partial_s
        removed = 0
        for folder in (folders.staging / EPHEMERAL, folders.cache / EPHEMERAL, folders.cache / STAGING_TEMP):
            removed += _remove(_find_old(folder, before, stop))
        outputs = [path for path in _find_old(folders.staging, before, stop) if path.name.startswith(OUTPUT)]
        removed += _remove(path for path in outputs if path.parent == folders.staging)
        for folder in (folders.models, folders.data, folders.staging, folders.cache):
            found = _find_old(folder, partial_before, stop)
            removed += _remove(path for path in found if path.name.startswith(UNFINISHED))
        return removed


def _find_old(top: Path, before: float, stop: StopToken) -> list[Path]:
    """Files and folders below it that are older, the deepest first. Links are not followed. All are found before the
    first is removed, because that changes the time of its folder."""
    old = []
    for path, folders, files in os.walk(top, topdown=False):
        for name in (*files, *folders):
            stop.check()
            with contextlib.suppress(OSError):
                if os.lstat(os.path.join(path, name)).st_mtime < before:
                    old.append(Path(path, name))
    return old


def _remove(paths: Iterable[Path]) -> int:
    """How many files were removed. A folder goes if it is empty, and is not counted."""
    removed = 0
    for path in paths:
        with contextlib.suppress(OSError):
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            else:
                path.unlink()
                removed += 1
    return removed
