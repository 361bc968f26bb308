"""Puts the files of models on this worker, complete and verified, before a process that reads them is started.

    <models>/<model>/<set>/<path>     read by backends: a hard link to the blob, never a file that is being written
    <models>/.blobs/                  the same files by digest, and partial downloads, on the same file system

So models and revisions that share weights fetch and store them once. The order names the files and their sources;
`fleet_blobs.py` fetches a blob, `blobs/` resumes and verifies it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from corral.blobs.digests import check_digest, hash_file, hex_of
from corral.blobs.disk import DiskSpace
from corral.blobs.errors import from_os
from corral.blobs.progress import FilesProgress, OnProgress, Progress, ignore_progress
from corral.blobs.store import Blob, BlobStore
from corral.blobs.transfer.fetcher import Fetcher, FetchLimits
from corral.blobs.transfer.partial_file import ExpectedBlob
from corral.contract.codec import Undecodable, decode
from corral.contract.messages.backends import Phase
from corral.contract.messages.replicas import ReplicaFile
from corral.contract.messages.staging import FilesOnNode
from corral.contract.sources import is_safe_path
from corral.kit.clock import Clock
from corral.kit.errors import Failed, Invalid
from corral.kit.log import get_log
from corral.kit.tasks import run_every
from corral.kit.threads import StopToken, run_in_thread, run_uncancelled
from corral.worker.files.cleanup import BLOBS, CleanupPolicy, FileCleanup
from corral.worker.files.file_sets import FileSets
from corral.worker.files.fleet_blobs import FleetBlobs
from corral.worker.files.garbage import stored_bytes

log = get_log(__name__)


class WorkerFiles:
    def __init__(
        self,
        models: Path,
        fleet: FleetBlobs,
        clock: Clock,
        *,
        nearby: Path | None = None,
        in_use: Callable[[], Collection[Path]] = frozenset,
        space: DiskSpace | None = None,
        limits: FetchLimits | None = None,
        cleanup: CleanupPolicy | None = None,
    ) -> None:
        """`nearby` is a folder of finished blobs of a controller on this machine. `in_use` lists the files that
        processes read, or will read again when they are restarted."""
        self._models = models
        self._fleet = fleet
        self._clock = clock
        self._nearby = nearby
        self._in_use = in_use
        self._space = space or DiskSpace()
        self._limits = limits or FetchLimits()
        self._sets = FileSets(models / BLOBS / "sets", models)
        self._opened: BlobStore | None = None
        self._wanted: dict[object, frozenset[Path]] = {}  # protected from concurrent calls that free space
        self._cleanup = FileCleanup(
            models, self._sets, self._open_store, self._busy, space=self._space, policy=cleanup or CleanupPolicy()
        )
        self.sweep = self._cleanup.sweep
        self.keep_only = self._cleanup.keep_only
        self.tidy = self._cleanup.tidy
        self.collect = self._cleanup.collect

    async def ensure(
        self,
        files: Sequence[ReplicaFile],
        sources: Sequence[str],
        token: str,
        on_progress: OnProgress = ignore_progress,
    ) -> None:
        """Put all files that have a digest into the models folder. May be cancelled and called again: transfers are
        resumed.

        Raises Invalid, NotFound (no source has the file), NoSpace, Unreachable, Denied, WrongDigest, Failed."""
        wanted = [file for file in files if file.digest]
        if not wanted:
            return
        for file in wanted:
            check_digest(file.digest)
            self._path(file)
        try:
            with self.protect(wanted), self._store.hold(*(file.digest for file in wanted)):
                # Before the first file has its name: a file that belongs to no set would never be removed.
                await run_uncancelled(self._sets.use, [file.path for file in wanted])
                await self._fetch_missing(wanted, sources, token, on_progress)
                await run_uncancelled(self._sets.use, [file.path for file in wanted])
                if not await run_uncancelled(self._all_there, wanted):
                    # A concurrent call chose this set for removal before it was marked as used; it is marked now.
                    await self._fetch_missing(wanted, sources, token, on_progress)
        except OSError as error:
            raise from_os(error, f"writing into {self._models}") from error

    async def read_list(self, digest: str, sources: Sequence[str], token: str) -> tuple[ReplicaFile, ...]:
        """The list of files of an order with too many files to name them. Raises what `ensure` raises."""
        check_digest(digest)
        try:
            with self._store.hold(digest):
                blob = await self._fetch(ReplicaFile("the list of its files", digest), sources, token, ignore_progress)
                return decode(tuple[ReplicaFile, ...], await run_uncancelled(blob.path.read_bytes))
        except Undecodable as error:
            raise Invalid(f"the list of its files cannot be read: {error}") from error
        except OSError as error:
            raise from_os(error, f"writing into {self._models}") from error
        finally:
            self._store.discard(digest)

    @contextlib.contextmanager
    def protect(self, files: Sequence[ReplicaFile]) -> Iterator[None]:
        """Keep these files while the block runs: from before they are fetched until a process that reads them is
        known."""
        key = object()
        self._wanted[key] = frozenset(self._models / file.path for file in files)
        try:
            yield
        finally:
            del self._wanted[key]

    async def run(self) -> None:
        await run_every("sweep model files", self._cleanup.policy.sweep_every_s, self.sweep, clock=self._clock)

    async def measure(self, files: Sequence[ReplicaFile]) -> FilesOnNode:
        """How much of each file is on this machine. Raises Invalid for a path outside the models folder."""
        for file in files:
            self._path(file)
        return await run_uncancelled(self._measure, tuple(files))

    def leave(self) -> None:
        """The worker is ending: the next worker process resumes the partial downloads."""
        if self._opened is not None:
            self._opened.leave()

    def find_store(self) -> BlobStore | None:
        """The store, unless nothing was ever fetched."""
        return self._store if (self._models / BLOBS).is_dir() else None

    # Inside

    @property
    def _store(self) -> BlobStore:
        return self._open_store()

    def _open_store(self) -> BlobStore:
        """Opened when it is first needed: a models folder that is only read needs no store."""
        if self._opened is None:
            self._opened = BlobStore(
                self._models / BLOBS, Fetcher(self._limits, space=self._space, clock=self._clock), open_to_all=True
            )
        return self._opened

    async def _fetch_missing(
        self, files: Sequence[ReplicaFile], sources: Sequence[str], token: str, on_progress: OnProgress
    ) -> None:
        missing = [file for file in files if not await self._is_here(file, on_progress)]
        if not missing:
            return
        await self._cleanup.free_space(sum({file.digest: file.size_bytes for file in missing}.values()))
        bar = FilesProgress([file.size_bytes for file in files], on_progress, time.monotonic)
        for index, file in enumerate(files):
            if file in missing:
                blob = await self._fetch(file, sources, token, bar.listener(index))
                await run_uncancelled(self._place, blob, self._path(file))
            bar.complete(index)

    async def _is_here(self, file: ReplicaFile, on_progress: OnProgress) -> bool:
        path, blob = self._path(file), self._store.find(file.digest)
        if blob is None and self._nearby is not None:
            blob = await self._store.adopt(file.digest, self._nearby / hex_of(file.digest), file.size_bytes)
        if blob is not None:
            await run_uncancelled(self._place, blob, path)
            return True
        if not path.is_file() or (file.size_bytes and path.stat().st_size != file.size_bytes):
            return False
        # A user put it there, or the file system has no hard links: only its hash tells whether it is this file.
        on_progress(Progress(Phase.VERIFYING, file.path, 0, file.size_bytes))
        if await run_in_thread(lambda stop: _digest(path, stop)) != file.digest:
            log.warning("a model file has other content than ordered and is fetched", file=file.path)
            return False
        await run_uncancelled(self._adopt, path, file.digest)
        return True

    async def _fetch(self, file: ReplicaFile, sources: Sequence[str], token: str, on_progress: OnProgress) -> Blob:
        wanted = ExpectedBlob(file.digest, file.size_bytes)
        return await self._fleet.obtain(self._store, wanted, sources, token, on_progress, name=file.path)

    def _all_there(self, files: Sequence[ReplicaFile]) -> bool:
        return all(self._path(file).is_file() for file in files)

    def _measure(self, files: Sequence[ReplicaFile]) -> FilesOnNode:
        has_store = (self._models / BLOBS).is_dir()
        return FilesOnNode(
            have_bytes=tuple(self._have_bytes(file, has_store=has_store) for file in files),
            free_bytes=self._space.measure(self._models),
            cache_bytes=stored_bytes(self._sets.list_stored(())) if has_store else 0,
        )

    def _have_bytes(self, file: ReplicaFile, *, has_store: bool) -> int:
        path = self._path(file)
        if path.is_file() and file.size_bytes in (0, size := path.stat().st_size):
            return size
        if not file.digest or not has_store:
            return 0
        blob = self._store.find(file.digest)
        return blob.size if blob is not None else self._store.partial_bytes(file.digest)

    def _busy(self) -> frozenset[Path]:
        return frozenset(self._in_use()).union(*tuple(self._wanted.values()))

    def _path(self, file: ReplicaFile) -> Path:
        if not is_safe_path(file.path) or file.path.startswith(BLOBS):
            raise Invalid(f"{file.path[:200]!r} does not stay inside the models folder")
        return self._models / file.path

    def _place(self, blob: Blob, path: Path) -> None:
        if path.exists() and path.samefile(blob.path):
            return
        if not path.parent.resolve().is_relative_to(self._models.resolve()):  # through a link
            raise Invalid(f"{path} leads out of the models folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._store.link(blob, path)
        except OSError as error:  # a file system without hard links: the blob itself is moved there
            log.info("the file system of the models folder has no hard links", reason=error.strerror)
            os.replace(blob.path, path)

    def _adopt(self, path: Path, digest: str) -> None:
        """Link a read-only file into the store: it was a blob before the blob folder was emptied. A writable file is a
        user's own: later changes of it would reach every other model with this file, so it is not linked and is hashed
        each time it is needed."""
        if path.stat().st_mode & 0o222:
            return
        try:
            os.link(path, self._store.path(digest))
        except OSError as error:
            log.info("the file system of the models folder has no hard links", reason=error.strerror)


def _digest(path: Path, stop: StopToken) -> str:
    return hash_file(path, on_bytes=lambda _size: stop.check())


def remove_model(models: Path, name: str) -> None:
    """Remove a model's staged files (docs/reference/wire/models.md#delete): the folder of that name with its content;
    else the file of that name, and the files beside it whose names begin with it and a dot. It is no error if there
    are none. Raises Invalid for a name that leads outside the folder, Failed if the disk refuses."""
    root = models.resolve()
    if not name.strip() or "\0" in name:
        raise Invalid("a model's name is needed")
    path = root / name
    # The parent must be inside: a symbolic link of that name is removed itself, never its target.
    if path.name in ("", ".", "..") or ".." in Path(name).parts or path == root:
        raise Invalid(f"{name[:200]!r} leads out of the models folder")
    if not path.parent.resolve().is_relative_to(root):
        raise Invalid(f"{name[:200]!r} leads out of the models folder")
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
            return
        path.unlink(missing_ok=True)
        if path.parent.is_dir():
            for beside in [each for each in path.parent.iterdir() if each.name.startswith(f"{path.name}.")]:
                if not beside.is_dir() or beside.is_symlink():
                    beside.unlink(missing_ok=True)
    except OSError as error:
        raise Failed(f"cannot remove {name}: {error.strerror}") from error
