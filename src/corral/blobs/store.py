"""The blob store: files on disk, named by their digest. A finished file is complete or absent; concurrent requests for
one digest share a transfer.

    <folder>/sha256/<hex>            finished, never changed again
    <folder>/incoming/<key>.part     partial download; a later process resumes it
    <folder>/incoming/<key>.sparse   the same, in chunks from several sources (swarm/)
    <folder>/chunks/<hex>.json       chunk list of a finished file; made when it is first requested

A reader holds a blob while it reads, so that sweeping never removes it. `serving/` sends blobs to other machines; it
opens the finished files by `path`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import stat
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from corral.blobs.chunks import list_chunks
from corral.blobs.digests import PREFIX, hash_file, hex_of
from corral.blobs.errors import WrongDigest, from_os
from corral.blobs.progress import OnProgress, Progress, ignore_progress
from corral.blobs.swarm.chunk_file import remove_chunk_file
from corral.blobs.transfer.fetcher import Fetcher
from corral.blobs.transfer.partial_file import ExpectedBlob, OnBytes, remove_partial
from corral.blobs.transfer.remote import Remote
from corral.contract.codec import encode
from corral.contract.messages.backends import Phase
from corral.contract.sources import is_digest
from corral.kit.clock import Clock
from corral.kit.errors import NotFound, Unavailable
from corral.kit.files import sync_folder, write_atomically
from corral.kit.log import get_log
from corral.kit.single_flight import SingleFlight
from corral.kit.tasks import run_every
from corral.kit.threads import StopToken, run_in_thread, run_uncancelled

log = get_log(__name__)

KEEP_PARTIAL_S = 24 * 3600.0
SWEEP_EVERY_S = 3600.0
REPORT_EVERY_S = 0.1
CHUNK_LIST_WAIT_S = 5.0  # for another thread that makes the same chunk list
SPARSE = ".sparse"


@dataclass(frozen=True)
class Blob:
    digest: str
    size: int
    path: Path


class KeyedLocks:
    """One lock per key, for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._locks: dict[str, tuple[threading.Lock, int]] = {}  # with the number of threads that use it

    @contextlib.contextmanager
    def hold(self, key: str, timeout_s: float) -> Iterator[None]:
        """Raises Unavailable if another thread keeps the lock for longer."""
        with self._lock:
            lock, users = self._locks.get(key, (threading.Lock(), 0))
            self._locks[key] = lock, users + 1
        is_held = lock.acquire(timeout=timeout_s)
        try:
            if not is_held:
                raise Unavailable(f"{key} is in use by another thread")
            yield
        finally:
            if is_held:
                lock.release()
            with self._lock:
                users = self._locks[key][1]
                if users == 1:
                    del self._locks[key]
                else:
                    self._locks[key] = lock, users - 1


@dataclass(frozen=True)
class RemovedBlob:
    name: str  # of its file
    freed_bytes: int  # 0 when the file has another name too


@dataclass(frozen=True)
class IncomingBlob:
    """A blob that is being fetched."""

    digest: str
    have: int
    size: int  # of the whole blob; 0: unknown
    path: Path  # of the bytes that are here; unverified


class BlobStore:
    def __init__(
        self, folder: Path, fetcher: Fetcher | None = None, *, open_to_all: bool = False, base: BlobStore | None = None
    ) -> None:
        """`open_to_all`: other users of this machine may read finished blobs (a backend that runs as another user), and
        no user should write them. `base`: a store whose finished blobs count as stored here; they are linked when they
        are needed."""
        self.folder = folder
        self._base = base
        self._mode = 0o444 if open_to_all else 0o600
        self._finished = folder / "sha256"
        self._incoming = folder / "incoming"
        self._chunks = folder / "chunks"
        self._fetcher = fetcher or Fetcher()
        self._runs: SingleFlight[str, Progress, Blob] = SingleFlight()
        self._received: dict[str, tuple[int, int]] = {}  # by key of a run: received and total bytes
        self._held: Counter[str] = Counter()
        self._chunk_locks = KeyedLocks()
        self.leaving = False
        for part in (self._finished, self._incoming, self._chunks):
            part.mkdir(parents=True, exist_ok=True, mode=0o755 if open_to_all else 0o700)

    def path(self, digest: str) -> Path:
        """The path of the finished blob, whether it exists or not."""
        return self._finished / hex_of(digest)

    def find(self, digest: str) -> Blob | None:
        path = self.path(digest)
        try:
            return Blob(digest, path.stat().st_size, path)
        except FileNotFoundError:
            return self._link_from_base(digest, path)

    def find_incoming(self, digest: str) -> IncomingBlob | None:
        """The blob while it is being fetched. May be called in any thread."""
        key = hex_of(digest)
        if (received := self._received.get(key)) is None:
            return None
        return IncomingBlob(digest, *received, self._incoming / f"{key}.part")

    def list_(self) -> list[Blob]:
        """All finished blobs. Blocking."""
        found = (self.find(PREFIX + path.name) for path in self._finished.iterdir() if is_digest(PREFIX + path.name))
        return [blob for blob in found if blob is not None]

    def get(self, digest: str) -> Blob:
        if (blob := self.find(digest)) is None:
            raise NotFound(f"the blob {digest} is not stored here")
        return blob

    async def obtain(self, remote: Remote, wanted: ExpectedBlob, on_progress: OnProgress = ignore_progress) -> Blob:
        """The blob, fetched unless it is stored. Raises what the fetcher raises.

        Hold the digest before the call if it is known; otherwise hold the result before the next await.
        """
        if wanted.digest and (blob := self.find(wanted.digest)) is not None:
            return blob
        key = hex_of(wanted.digest) if wanted.digest else _url_key(remote.key)

        async def fetch(on_progress: OnProgress) -> Blob:
            report = _on_bytes(on_progress, remote.name)

            def on_bytes(have: int, total: int) -> None:
                self._received[key] = have, total
                report(have, total)

            try:
                return await self._fetch(remote, wanted, self._incoming / f"{key}.part", on_bytes)
            finally:
                self._received.pop(key, None)

        return await self._runs.run(key, fetch, on_progress)

    async def assemble(
        self,
        wanted: ExpectedBlob,
        fetch: Callable[[Path, OnProgress], Awaitable[None]],
        on_progress: OnProgress = ignore_progress,
    ) -> Blob:
        """The blob, unless it is stored, from `fetch`: it writes and verifies a file at the given path, keeps what it
        has there when it fails or is cancelled, and finds it again when it is called next. Digest and size are known.

        Hold the digest before the call. Raises what `fetch` raises."""
        if (blob := self.find(wanted.digest)) is not None:
            return blob
        key = hex_of(wanted.digest)
        path = self._incoming / f"{key}{SPARSE}"

        async def run(on_progress: OnProgress) -> Blob:
            try:
                await fetch(path, on_progress)
                return await run_uncancelled(self._finish, path, wanted.digest, wanted.size)
            except OSError as error:
                raise from_os(error, f"writing {path.name}") from error

        return await self._runs.run(key, run, on_progress)

    def chunk_list(self, digest: str) -> bytes:
        """The encoded chunk list of a finished blob; made when it is requested for the first time, stored beside the
        blob. Blocking, for minutes with a large blob. Raises NotFound, and Unavailable while another thread makes
        it or when the blob is damaged: it is removed then."""
        path = self._chunks / f"{hex_of(digest)}.json"
        with self._chunk_locks.hold(digest, CHUNK_LIST_WAIT_S):
            blob = self.get(digest)
            try:
                return path.read_bytes()
            except FileNotFoundError:
                try:
                    made = encode(list_chunks(blob.path, digest))
                except WrongDigest as error:
                    self._remove_damaged(digest)
                    raise Unavailable(f"the blob {digest} was damaged and is being fetched again") from error
                write_atomically(path, made, mode=0o600)
                return made

    async def write(
        self,
        key: str,
        blocks: Callable[[], Iterator[bytes]],
        wanted: ExpectedBlob,
        name: str,
        on_progress: OnProgress = ignore_progress,
        *,
        phase: Phase = Phase.DOWNLOADING,
    ) -> Blob:
        """Write a blob from blocks, read in a thread, once for all callers with the same `key`. Raises what `blocks`
        raises, WrongDigest and NoSpace."""
        if wanted.digest and (blob := self.find(wanted.digest)) is not None:
            return blob
        partial = self._incoming / f"{_url_key(key)}.part"

        async def copy(on_progress: OnProgress) -> Blob:
            on_bytes = _report_from_thread(_on_bytes(on_progress, name, phase), wanted.size)
            try:
                return await run_in_thread(lambda stop: self._write(partial, blocks(), wanted, name, on_bytes, stop))
            except OSError as error:
                raise from_os(error, f"writing {name}") from error
            finally:
                await run_uncancelled(remove_partial, partial)

        return await self._runs.run(_url_key(key), copy, on_progress)

    def partial_path(self, name: str) -> Path:
        """For bytes that arrive by other ways; swept like partial downloads when nobody touches the file."""
        return self._incoming / f"{name}.part"

    def accept(self, partial: Path, digest: str, size: int) -> Blob:
        """Make a partial file a finished blob. The caller has verified its bytes. Blocking."""
        return self._finish(partial, digest, size)

    def link(self, blob: Blob, path: Path) -> None:
        """Hard-link the blob to another name, atomically replacing what is there. The link stays when the blob is
        swept. Blocking; both names must be on one file system."""
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        aside.unlink(missing_ok=True)
        os.link(blob.path, aside)
        os.replace(aside, path)
        aside.unlink(missing_ok=True)  # renaming a link onto the same file does nothing
        sync_folder(path.parent)

    @contextlib.contextmanager
    def hold(self, *digests: str) -> Iterator[None]:
        """A held blob is not removed."""
        self._held.update(digests)
        try:
            yield
        finally:
            self._held.subtract(digests)
            self._held += Counter()  # removes entries with a count of zero

    def held(self) -> frozenset[str]:
        return frozenset(self._held)

    def discard(self, *digests: str) -> None:
        """Remove blobs that are not held."""
        for digest in digests:
            if not self._held[digest]:
                self.path(digest).unlink(missing_ok=True)

    def forget(self, *digests: str, key: str = "") -> None:
        """Remove blobs and their partial downloads after a deliberate cancel, unless another caller needs them. `key`:
        the remote's, for content without a known digest."""
        if self.leaving:
            return
        self.discard(*digests)
        for name in (*map(hex_of, digests), *([_url_key(key)] if key else [])):
            if name not in self._runs and not self._held[PREFIX + name]:
                remove_partial(self._incoming / f"{name}.part")
                remove_chunk_file(self._incoming / f"{name}{SPARSE}")

    def leave(self) -> None:
        """This process is ending: keep the partial downloads that are cancelled from now on for the next process."""
        self.leaving = True

    async def run(self, clock: Clock, every_s: float = SWEEP_EVERY_S) -> None:
        """Sweep periodically, for ever."""

        async def step() -> None:
            await self.sweep()

        await run_every("sweep blobs", every_s, step, clock=clock)

    async def sweep(self, *, older_than_s: float = KEEP_PARTIAL_S, keep: Collection[str] = ()) -> int:
        """Remove partial and finished files that were not touched for `older_than_s`, except the digests in `keep`.
        Returns the number of removed files."""
        return await run_uncancelled(self._sweep, time.time() - older_than_s, frozenset(keep))

    async def sweep_finished(self, keep: Collection[str] = ()) -> None:
        """Remove finished blobs of any age that are neither held nor in `keep`."""
        await run_uncancelled(self._sweep_files, list(self._finished.iterdir()), time.time() + 1.0, frozenset(keep))
        await run_uncancelled(self._sweep_chunk_lists)

    async def collect(
        self,
        keep: Collection[str],
        *,
        older_than_s: float,
        partial_older_than_s: float,
        released: Collection[str] = (),
        dry_run: bool = False,
    ) -> list[RemovedBlob]:
        """Remove finished blobs that are neither held nor in `keep`, and abandoned partial files; return what went.
        Those touched within the given times stay, because a transaction may be about to refer to them, unless they are
        in `released`."""
        return await run_uncancelled(
            self._collect, frozenset(keep), frozenset(released), older_than_s, partial_older_than_s, dry_run
        )

    def partial_bytes(self, digest: str) -> int:
        """How much of an unfinished download is on the disk. Blocking."""
        found = 0
        for kind in (".part", SPARSE):
            with contextlib.suppress(FileNotFoundError):
                status = (self._incoming / f"{hex_of(digest)}{kind}").stat()
                # The file may have holes for chunks that are still missing.
                found = max(found, min(status.st_size, status.st_blocks * 512))
        return found

    async def adopt(self, digest: str, path: Path, size: int) -> Blob | None:
        """Hard-link an existing file into the store, if it has the right size, belongs to this user and lies on the
        same file system. None: the blob must be fetched."""
        return await run_uncancelled(self._adopt, digest, path, size)

    async def verify(self, digest: str) -> bool:
        """Hash the blob again. Removes it if its digest is wrong."""
        path = self.get(digest).path
        if await run_uncancelled(hash_file, path) == digest:
            return True
        self._remove_damaged(digest)
        return False

    async def _fetch(self, remote: Remote, wanted: ExpectedBlob, partial: Path, at: OnBytes) -> Blob:
        fetched = await self._fetcher.fetch(remote, partial, wanted, at)
        return await run_uncancelled(self._finish, partial, fetched.digest, fetched.size)

    def _write(
        self,
        partial: Path,
        blocks: Iterator[bytes],
        wanted: ExpectedBlob,
        name: str,
        on_bytes: Callable[[int], None],
        stop: StopToken,
    ) -> Blob:
        whole, size = hashlib.sha256(), 0
        with partial.open("wb") as file:
            for block in blocks:
                stop.check()
                file.write(block)
                whole.update(block)
                size += len(block)
                on_bytes(size)
            file.flush()
            os.fsync(file.fileno())
        digest = PREFIX + whole.hexdigest()
        if wanted.digest not in ("", digest):
            raise WrongDigest(f"{name} is {digest}, not {wanted.digest}")
        return self._finish(partial, digest, size)

    def _link_from_base(self, digest: str, path: Path) -> Blob | None:
        found = self._base.find(digest) if self._base is not None else None
        if found is None:
            return None
        try:
            with contextlib.suppress(FileExistsError):
                os.link(found.path, path)
        except OSError:  # another file system, or one without links: it is read where it is
            return found
        return Blob(digest, found.size, path)

    def _remove_damaged(self, digest: str) -> None:
        log.error("stored blob is damaged and was removed", digest=digest)
        self.path(digest).unlink(missing_ok=True)
        if self._base is not None:
            self._base.path(digest).unlink(missing_ok=True)

    def _adopt(self, digest: str, path: Path, size: int) -> Blob | None:
        target = self.path(digest)
        try:
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode) or status.st_size != size or status.st_uid != os.getuid():
                return None
            with contextlib.suppress(FileExistsError):
                os.link(path, target)
            os.chmod(target, self._mode)
        except OSError as error:
            log.debug("existing file cannot be adopted as a blob", path=str(path), reason=error.strerror)
            return None
        return Blob(digest, size, target)

    def _finish(self, partial: Path, digest: str, size: int) -> Blob:
        path = self._finished / digest.removeprefix(PREFIX)
        os.chmod(partial, self._mode)
        os.replace(partial, path)
        (self._chunks / f"{path.name}.json").unlink(missing_ok=True)  # of earlier bytes, which may have been damaged
        sync_folder(self._finished)
        key = partial.name.partition(".")[0]
        remove_partial(self._incoming / f"{key}.part")
        remove_chunk_file(self._incoming / f"{key}{SPARSE}")
        return Blob(digest, size, path)

    def _sweep(self, before: float, keep: frozenset[str]) -> int:
        gone = self._sweep_files([*self._incoming.iterdir(), *self._finished.iterdir()], before, keep)
        self._sweep_chunk_lists()
        return gone

    def _sweep_chunk_lists(self) -> None:
        """Remove the chunk lists of blobs that were removed."""
        for path in self._chunks.iterdir():
            if not (self._finished / path.name.partition(".")[0]).exists():
                path.unlink(missing_ok=True)

    def _sweep_files(self, paths: Sequence[Path], before: float, keep: frozenset[str]) -> int:
        return len(self._remove_unused(paths, before, keep))

    def _collect(
        self,
        keep: frozenset[str],
        released: frozenset[str],
        older_than_s: float,
        partial_older_than_s: float,
        dry_run: bool,
    ) -> list[RemovedBlob]:
        now = time.time()
        finished, partial = list(self._finished.iterdir()), list(self._incoming.iterdir())
        at_once = [path for path in finished if PREFIX + path.name in released]
        rest = [path for path in finished if PREFIX + path.name not in released]
        return [
            *self._remove_unused(at_once, now + 1.0, keep, dry_run=dry_run),
            *self._remove_unused(rest, now - older_than_s, keep, dry_run=dry_run),
            *self._remove_unused(partial, now - partial_older_than_s, keep, dry_run=dry_run),
        ]

    def _remove_unused(
        self, paths: Sequence[Path], before: float, keep: frozenset[str], *, dry_run: bool = False
    ) -> list[RemovedBlob]:
        gone = []
        for path in paths:
            name = PREFIX + path.name
            in_use = path.name.partition(".")[0] in self._runs or self._held[name] or name in keep
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                if not in_use and status.st_mtime < before:
                    if not dry_run:
                        path.unlink()
                    is_last_name = status.st_nlink == 1
                    gone.append(RemovedBlob(path.name, status.st_size if is_last_name else 0))
        return gone


def _url_key(key: str) -> str:
    return "url-" + hashlib.sha256(key.encode()).hexdigest()


def _on_bytes(on_progress: OnProgress, name: str, phase: Phase = Phase.DOWNLOADING) -> OnBytes:
    def report(have: int, total: int) -> None:
        on_progress(Progress(phase, name, have, total))

    return report


def _report_from_thread(at: OnBytes, total: int) -> Callable[[int], None]:
    """A callback for work in a thread; it reports in the event loop, at most every REPORT_EVERY_S. Call this in the
    event loop."""
    loop = asyncio.get_running_loop()
    reported_s = 0.0

    def on_bytes(done: int) -> None:
        nonlocal reported_s
        if time.monotonic() - reported_s >= REPORT_EVERY_S:
            reported_s = time.monotonic()
            loop.call_soon_threadsafe(at, done, total)

    return on_bytes
