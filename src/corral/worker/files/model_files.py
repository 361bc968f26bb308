"""Files of models are here, whole and verified, before anything is started that reads them.

    <models>/<model>/<set>/<path>     what a backend reads: another name of the blob, never a file being written
    <models>/.blobs/                  the same by digest, and what is on its way; on the same disk, so a link is enough

So the same weights of two models, or of two revisions, are fetched and kept once. Fetching, resuming and verifying are
`blobs/`'s; which files, and from where, is the order's to say.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from corral.blobs.digests import check_digest, hash_file, hex_of
from corral.blobs.disk import DiskSpace
from corral.blobs.errors import NoSpace, from_os
from corral.blobs.progress import FilesProgress, OnProgress, Progress, ignore_progress
from corral.blobs.store import Blob, BlobStore
from corral.blobs.transfer.fetcher import Fetcher, FetchLimits
from corral.blobs.transfer.partial_file import ExpectedBlob
from corral.blobs.transfer.remote import UrlRemote
from corral.contract.codec import Undecodable, decode
from corral.contract.messages.backends import Phase
from corral.contract.messages.replicas import ReplicaFile
from corral.contract.sources import is_safe_path
from corral.kit.clock import Clock
from corral.kit.errors import CorralError, Denied, Failed, Invalid, NotFound, Unreachable
from corral.kit.log import get_log
from corral.kit.tasks import run_every
from corral.kit.threads import StopToken, run_in_thread, run_uncancelled
from corral.worker.files.file_sets import FileSet, FileSets, inode_of

log = get_log(__name__)

BLOBS = ".blobs"
_HOST = "{host}"


@dataclass(frozen=True)
class CleanupPolicy:
    unused_s: float = 7 * 86400.0  # a set nobody started anything from for so long goes
    sweep_every_s: float = 3600.0
    partial_s: float = 86400.0  # and what was never fetched to the end
    fresh_s: float = 600.0  # a set used so lately belongs to a model, whoever says there is none


class WorkerFiles:
    def __init__(
        self,
        models: Path,
        session: aiohttp.ClientSession,
        clock: Clock,
        *,
        controller: str = "",
        nearby: Path | None = None,
        fresh_token: Callable[[], Awaitable[str]] | None = None,
        in_use: Callable[[], Collection[Path]] = frozenset,
        space: DiskSpace | None = None,
        limits: FetchLimits | None = None,
        cleanup: CleanupPolicy | None = None,
    ) -> None:
        """`controller` is the URL this worker reaches the cluster by: `{host}` in a source is its host. `nearby` is a
        folder of finished blobs on this machine: a controller's beside us. `fresh_token` asks for another when the
        order's has run out. `in_use` tells which files processes read, or will again when they are restarted."""
        self._models = models
        self._session = session
        self._clock = clock
        self._host = _host_of(controller)
        self._nearby = nearby
        self._fresh_token = fresh_token
        self._in_use = in_use
        self._space = space or DiskSpace()
        self._limits = limits or FetchLimits()
        self._cleanup = cleanup or CleanupPolicy()
        self._sets = FileSets(models / BLOBS / "sets", models)
        self._opened: BlobStore | None = None
        self._wanted: dict[object, frozenset[Path]] = {}  # others may look for room meanwhile

    async def ensure(
        self,
        files: Sequence[ReplicaFile],
        sources: Sequence[str],
        token: str,
        on_progress: OnProgress = ignore_progress,
    ) -> None:
        """All files that have a digest are in the models folder. May be cancelled and called again: it goes on.

        Raises Invalid, NotFound (it is nowhere to be had), NoSpace, Unreachable, Denied, WrongDigest, Failed."""
        wanted = [file for file in files if file.digest]
        if not wanted:
            return
        for file in wanted:
            check_digest(file.digest)
            self._path(file)
        places = [self._filled_in(source) for source in sources]
        try:
            with self.protect(wanted), self._store.hold(*(file.digest for file in wanted)):
                # Before the first has its name: what is not in a set is nobody's, and would never go.
                await run_uncancelled(self._sets.use, [file.path for file in wanted])
                await self._fetch_missing(wanted, places, token, on_progress)
                await run_uncancelled(self._sets.use, [file.path for file in wanted])
                if not await run_uncancelled(self._all_there, wanted):
                    # Somebody was making room by what they had seen before we came; from now on they see us.
                    await self._fetch_missing(wanted, places, token, on_progress)
        except OSError as error:
            raise from_os(error, f"writing into {self._models}") from error

    async def read_list(self, digest: str, sources: Sequence[str], token: str) -> tuple[ReplicaFile, ...]:
        """Files too many for an order to name. Raises as `ensure` does."""
        check_digest(digest)
        places = [self._filled_in(source) for source in sources]
        try:
            with self._store.hold(digest):
                blob = await self._fetch(ReplicaFile("the list of its files", digest), places, token, ignore_progress)
                return decode(tuple[ReplicaFile, ...], await run_uncancelled(blob.path.read_bytes))
        except Undecodable as error:
            raise Invalid(f"the list of its files cannot be read: {error}") from error
        except OSError as error:
            raise from_os(error, f"writing into {self._models}") from error
        finally:
            self._store.discard(digest)

    @contextlib.contextmanager
    def protect(self, files: Sequence[ReplicaFile]) -> Iterator[None]:
        """Nobody makes room with these meanwhile: from before they are fetched until a process is known to read."""
        key = object()
        self._wanted[key] = frozenset(self._models / file.path for file in files)
        try:
            yield
        finally:
            del self._wanted[key]

    async def run(self) -> None:
        await run_every("sweep model files", self._cleanup.sweep_every_s, self.sweep, clock=self._clock)

    async def sweep(self) -> None:
        """What nobody has used for long goes, and blobs that are under no other name any more."""
        if not (self._models / BLOBS).is_dir():
            return
        before = time.time() - self._cleanup.unused_s
        for unused in await run_uncancelled(self._sets.unused, self._busy(), before=before):
            await run_uncancelled(self._remove, unused)
        await self._store.sweep(older_than_s=self._cleanup.partial_s, keep=await run_uncancelled(self._linked))

    async def keep_only(self, models: Collection[str]) -> None:
        """These are all models there are. Files of others go, unless something reads them, or they are so fresh that
        their model may be newer than the list."""
        if not (self._models / BLOBS).is_dir():
            return
        before = time.time() - self._cleanup.fresh_s
        for unused in await run_uncancelled(self._sets.unused, self._busy(), before=before):
            if not any(path.startswith(f"{model}/") for path in unused.paths for model in models):
                await run_uncancelled(self._remove, unused)
        await self._store.sweep_finished(await run_uncancelled(self._linked))

    def leave(self) -> None:
        """The worker ends: what is on its way is gone on with by the next."""
        if self._opened is not None:
            self._opened.leave()

    async def tidy(self) -> None:
        """A model was deleted: its blobs need not wait for the next sweep."""
        if (self._models / BLOBS).is_dir():
            await self._store.sweep_finished(await run_uncancelled(self._linked))

    # Inside

    @property
    def _store(self) -> BlobStore:
        """Made when first needed: a models folder that is only read needs none."""
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
        await self._free_space(missing)
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
        # Somebody else put it there, or this disk knows no links: only reading it tells whether it is the one.
        on_progress(Progress(Phase.VERIFYING, file.path, 0, file.size_bytes))
        if await run_in_thread(lambda stop: _digest(path, stop)) != file.digest:
            log.warning("a model file is not what it should be, and is fetched", file=file.path)
            return False
        await run_uncancelled(self._adopt, path, file.digest)
        return True

    async def _fetch(self, file: ReplicaFile, sources: Sequence[str], token: str, on_progress: OnProgress) -> Blob:
        """From the first source that has it; what one sent before it failed, the next goes on from."""
        if not sources:
            raise NotFound(f"{file.path} is not on this machine, and the order names no place to fetch it from")
        failure: CorralError | None = None
        for source in sources:
            try:
                return await self._fetch_from(source, file, token, on_progress)
            except (Unreachable, NotFound, Denied, Failed) as error:
                log.warning("a source does not give the file", file=file.path, source=source, reason=error.message)
                failure = failure or error
        assert failure is not None
        raise type(failure)(f"{file.path}: {failure.message}") from failure

    async def _fetch_from(self, source: str, file: ReplicaFile, token: str, on_progress: OnProgress) -> Blob:
        def named(progress: Progress) -> None:
            on_progress(replace(progress, file=file.path))

        url, wanted = f"{source.rstrip('/')}/blobs/{file.digest}", ExpectedBlob(file.digest, file.size_bytes)
        try:
            return await self._store.obtain(UrlRemote(self._session, url, _shown(token)), wanted, named)
        except Denied:
            # Hours may have passed on a slow line; what came is kept, and another token opens the rest.
            if self._fresh_token is None:
                raise
            page = UrlRemote(self._session, url, _shown(await self._fresh_token()))
            return await self._store.obtain(page, wanted, named)

    async def _free_space(self, missing: Sequence[ReplicaFile]) -> None:
        """For all of them, before the first byte: what was not used for longest goes, if that is what it takes."""
        need = sum({file.digest: file.size_bytes for file in missing}.values())
        what = "the model's files"
        for unused in [*await run_uncancelled(self._sets.unused, self._busy()), None]:
            try:
                self._space.require(self._models, need, what)
                return
            except NoSpace:
                if unused is None:
                    raise
            await run_uncancelled(self._remove, unused)
            await self._store.sweep_finished(await run_uncancelled(self._linked))

    def _remove(self, unused: FileSet) -> None:
        """Unless somebody came for it since it was chosen."""
        if not self._sets.is_used(unused, self._busy()):
            self._sets.remove(unused)

    def _all_there(self, files: Sequence[ReplicaFile]) -> bool:
        return all(self._path(file).is_file() for file in files)

    def _linked(self) -> list[str]:
        """Digests of blobs that have a name in the models folder too."""
        inodes = self._sets.inodes()
        blobs = self._store.list_()
        return [blob.digest for blob in blobs if inode_of(blob.path) in inodes]

    def _busy(self) -> frozenset[Path]:
        return frozenset(self._in_use()).union(*tuple(self._wanted.values()))

    def _path(self, file: ReplicaFile) -> Path:
        if not is_safe_path(file.path) or file.path.startswith(BLOBS):
            raise Invalid(f"{file.path[:200]!r} does not stay inside the models folder")
        return self._models / file.path

    def _place(self, blob: Blob, path: Path) -> None:
        if path.exists() and path.samefile(blob.path):
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.parent.resolve().is_relative_to(self._models.resolve()):
            raise Invalid(f"{path} leads out of the models folder")
        try:
            self._store.link(blob, path)
        except OSError as error:  # a file system without links: the file itself moves there, and is all there is
            log.info("the models folder knows no links", reason=error.strerror)
            os.replace(blob.path, path)

    def _adopt(self, path: Path, digest: str) -> None:
        """What nobody may write into is taken for a blob: it was one before somebody emptied their folder. A person's
        own file is not: they may write into it, and every other model with such a file would read what they wrote. It
        stays what it is, and is read through each time it is wanted."""
        if path.stat().st_mode & 0o222:
            return
        try:
            os.link(path, self._store.path(digest))
        except OSError as error:
            log.info("the models folder knows no links", reason=error.strerror)

    def _filled_in(self, source: str) -> str:
        return source.replace(_HOST, self._host)


def _shown(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"} if token else {}


def _digest(path: Path, stop: StopToken) -> str:
    return hash_file(path, on_bytes=lambda _size: stop.check())


def _host_of(url: str) -> str:
    try:
        host = urlsplit(url).hostname or "127.0.0.1"
    except ValueError:
        host = "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def remove_model(models: Path, name: str) -> None:
    """Remove a model's staged files (docs/reference/wire/models.md#delete): a folder of that name with all that is in
    it; else the file of that name, and those beside it that begin with it and a dot. Nothing there is fine. Raises
    Invalid for a name that leads elsewhere, Failed if the disk refuses."""
    root = models.resolve()
    if not name.strip() or "\0" in name:
        raise Invalid("a model's name is needed")
    path = root / name
    # The parent is what must be inside: a link of that name is itself removed, never what it points to.
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
