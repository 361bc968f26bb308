"""Removes fetched model files that are not needed: after long disuse, for a full disk, above the cache limit, or when a
user asks for it. `garbage.py` and `file_sets.py` decide; files that a process reads or an order is about always stay.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from corral.blobs.disk import DiskSpace
from corral.blobs.errors import NoSpace
from corral.blobs.store import BlobStore
from corral.contract.messages.staging import RemovedFiles
from corral.kit.humanize import format_bytes
from corral.kit.threads import run_uncancelled
from corral.worker.files.file_sets import FileSet, FileSets, inode_of
from corral.worker.files.garbage import StoredSet, describe, over_limit, stored_bytes, unneeded

BLOBS = ".blobs"
PARTIAL_GRACE_S = 3600.0  # a transfer that failed may be resumed


@dataclass(frozen=True)
class CleanupPolicy:
    unused_s: float = 7 * 86400.0  # a set from which no process was started for so long is removed
    sweep_every_s: float = 3600.0
    partial_s: float = 86400.0  # a partial download that was not written for so long is removed
    # A set used within this time stays even if the list of models does not name its model: a list is that old at most
    # when a worker receives it.
    fresh_s: float = 30.0
    limit_bytes: int = 0  # of all fetched model files; 0: as much as the disk holds


class FileCleanup:
    def __init__(
        self,
        models: Path,
        sets: FileSets,
        open_store: Callable[[], BlobStore],
        busy: Callable[[], frozenset[Path]],
        *,
        space: DiskSpace,
        policy: CleanupPolicy,
    ) -> None:
        """`open_store` makes the blob store if there is none yet. `busy`: files that must stay."""
        self._models = models
        self._sets = sets
        self._open_store = open_store
        self._busy = busy
        self._space = space
        self.policy = policy

    async def sweep(self) -> None:
        """Remove sets that were not used for long or exceed the cache limit, old partial downloads, and blobs that no
        set links to."""
        if not self._has_store:
            return
        before = time.time() - self.policy.unused_s
        for unused in await run_uncancelled(self._sets.unused, self._busy(), before=before):
            await run_uncancelled(self._remove, unused)
        await self._evict(0)
        keep = await run_uncancelled(self._linked)
        await self._open_store().sweep(older_than_s=self.policy.partial_s, keep=keep)

    async def keep_only(self, models: Collection[str]) -> None:
        """Remove the files of models that are not in this complete list of models, unless a process reads them, or
        they were used so recently that their model may be newer than the list."""
        if not self._has_store:
            return
        before = time.time() - self.policy.fresh_s
        for unused in await run_uncancelled(self._sets.unused, self._busy(), before=before):
            if not any(path.startswith(f"{model}/") for path in unused.paths for model in models):
                await run_uncancelled(self._remove, unused)
        await self.tidy()

    async def tidy(self) -> None:
        """Remove blobs that no set links to, at once: a model was deleted."""
        if self._has_store:
            await self._open_store().sweep_finished(await run_uncancelled(self._linked))

    async def collect(self, keep: Collection[str], *, dry_run: bool = False) -> tuple[RemovedFiles, ...]:
        """Remove the sets of which no path begins with one of `keep`, and blobs that no set links to. Returns what was
        removed; with `dry_run`, what would be."""
        if not self._has_store:
            return ()
        stored = await run_uncancelled(self._sets.list_stored, self._busy())
        chosen = unneeded(stored, keep, used_before=time.time() - self.policy.fresh_s)
        if not dry_run:
            chosen = [each for each in chosen if await run_uncancelled(self._remove_stored, each)]
        rest = [each for each in stored if each not in chosen]
        removed = describe(chosen, rest, "no model needs these files")
        blobs = await self._open_store().collect(
            [*await run_uncancelled(self._linked), *await run_uncancelled(self._blobs_of, chosen)],
            older_than_s=0.0,  # what an order is about is held
            partial_older_than_s=PARTIAL_GRACE_S,
            dry_run=dry_run,
        )
        if not dry_run:
            await self.tidy()  # the blobs of the removed sets, which were counted with them
        if blobs:
            freed = sum(each.freed_bytes for each in blobs)
            removed.append(RemovedFiles("downloads", len(blobs), freed, "no set of files refers to them"))
        return tuple(removed)

    async def free_space(self, need_bytes: int) -> None:
        """Free space for files before their first byte: remove unused sets, the longest unused first, until they fit
        the cache limit and the disk. Raises NoSpace when they do not."""
        await self._evict(need_bytes)
        what = "the model's files"
        for unused in [*await run_uncancelled(self._sets.unused, self._busy()), None]:
            try:
                self._space.require(self._models, need_bytes, what)
                return
            except NoSpace:
                if unused is None:
                    raise
            await run_uncancelled(self._remove, unused)
            await self.tidy()

    async def _evict(self, need_bytes: int) -> None:
        """Remove unused sets above the cache limit. Raises NoSpace when that cannot make room for `need_bytes`."""
        limit = self.policy.limit_bytes
        if not limit:
            return
        stored = await run_uncancelled(self._sets.list_stored, self._busy())
        chosen = over_limit(stored, limit, need_bytes)
        gone = [each for each in chosen if await run_uncancelled(self._remove_stored, each)]
        if gone:
            await self.tidy()
        in_use = stored_bytes(each for each in stored if each not in gone)
        if need_bytes and in_use + need_bytes > limit:
            raise NoSpace(
                f"the model's files need {format_bytes(need_bytes)}, but --cache-limit is {format_bytes(limit)} and "
                f"{format_bytes(in_use)} of it are in use"
            )

    @property
    def _has_store(self) -> bool:
        return (self._models / BLOBS).is_dir()

    def _remove_stored(self, chosen: StoredSet) -> bool:
        """False: it came into use since it was listed."""
        found = self._sets.find(chosen.name)
        if found is None or found.used_at > chosen.used_at or self._sets.is_used(found, self._busy()):
            return False
        self._sets.remove(found)
        return True

    def _remove(self, unused: FileSet) -> None:
        """Remove the set, unless it came into use since it was chosen."""
        if not self._sets.is_used(unused, self._busy()):
            self._sets.remove(unused)

    def _linked(self) -> list[str]:
        """Digests of blobs that have a name in the models folder too."""
        inodes = self._sets.inodes()
        return [blob.digest for blob in self._open_store().list_() if inode_of(blob.path) in inodes]

    def _blobs_of(self, chosen: Sequence[StoredSet]) -> list[str]:
        inodes = {inode for each in chosen for inode in each.inodes}
        return [blob.digest for blob in self._open_store().list_() if inode_of(blob.path) in inodes]
