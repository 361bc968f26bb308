"""Content on disk under its own digest. A finished file is whole or absent; all who want one digest share a transfer.

    <folder>/sha256/<hex>            finished, never changed again
    <folder>/incoming/<key>.part     on its way; a later process goes on from there

Who reads a blob holds it meanwhile, so that tidying never takes it away. Serving blobs to other machines (`serving/`)
opens the finished files by `path`, and needs no more from here.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from corral.blobs.digests import PREFIX, hash_file, hex_of
from corral.blobs.errors import WrongDigest, from_os
from corral.blobs.fetcher import Fetcher
from corral.blobs.partial import At, Wanted, drop
from corral.blobs.progress import Progress, Tell, tell_nobody
from corral.blobs.remote import Remote
from corral.contract.messages.backends import Phase
from corral.contract.sources import is_digest
from corral.kit.clock import Clock
from corral.kit.errors import NotFound
from corral.kit.files import sync_folder
from corral.kit.log import get_log
from corral.kit.single_flight import SingleFlight
from corral.kit.tasks import run_every
from corral.kit.threads import StopToken, run_in_thread, run_uncancelled

log = get_log(__name__)

KEEP_PARTIAL_S = 24 * 3600.0
SWEEP_EVERY_S = 3600.0
TELL_S = 0.1


@dataclass(frozen=True)
class Blob:
    digest: str
    size: int
    path: Path


class BlobStore:
    def __init__(self, folder: Path, fetcher: Fetcher | None = None, *, open_to_all: bool = False) -> None:
        """`open_to_all`: others on this machine may read what is finished (a backend that runs as somebody else), and
        nobody should write into it."""
        self.folder = folder
        self._mode = 0o444 if open_to_all else 0o600
        self._finished = folder / "sha256"
        self._incoming = folder / "incoming"
        self._fetcher = fetcher or Fetcher()
        self._runs: SingleFlight[str, Progress, Blob] = SingleFlight()
        self._held: Counter[str] = Counter()
        self.leaving = False
        for part in (self._finished, self._incoming):
            part.mkdir(parents=True, exist_ok=True, mode=0o755 if open_to_all else 0o700)

    def path(self, digest: str) -> Path:
        """Where the blob is once it is here."""
        return self._finished / hex_of(digest)

    def find(self, digest: str) -> Blob | None:
        path = self.path(digest)
        try:
            return Blob(digest, path.stat().st_size, path)
        except FileNotFoundError:
            return None

    def list_(self) -> list[Blob]:
        """All that are finished. Blocking."""
        found = (self.find(PREFIX + path.name) for path in self._finished.iterdir() if is_digest(PREFIX + path.name))
        return [blob for blob in found if blob is not None]

    def get(self, digest: str) -> Blob:
        if (blob := self.find(digest)) is None:
            raise NotFound(f"{digest} is not here")
        return blob

    async def obtain(self, remote: Remote, wanted: Wanted, tell: Tell = tell_nobody) -> Blob:
        """The blob, fetched unless it is here. Raises what the fetcher raises.

        Hold the digest first when it is known; else hold what comes back before the next await.
        """
        if wanted.digest and (blob := self.find(wanted.digest)) is not None:
            return blob
        key = hex_of(wanted.digest) if wanted.digest else _url_key(remote.key)

        async def fetch(tell: Tell) -> Blob:
            return await self._fetch(remote, wanted, self._incoming / f"{key}.part", _as_at(tell, remote.name))

        return await self._runs.run(key, fetch, tell)

    async def write(
        self,
        key: str,
        blocks: Callable[[], Iterator[bytes]],
        wanted: Wanted,
        name: str,
        tell: Tell = tell_nobody,
        *,
        phase: Phase = Phase.DOWNLOADING,
    ) -> Blob:
        """The blob these blocks make: read in a thread, once for all who ask under the same `key`. Raises what they
        raise, WrongDigest and NoSpace."""
        if wanted.digest and (blob := self.find(wanted.digest)) is not None:
            return blob
        partial = self._incoming / f"{_url_key(key)}.part"

        async def copy(tell: Tell) -> Blob:
            each = _from_thread(_as_at(tell, name, phase), wanted.size)
            try:
                return await run_in_thread(lambda stop: self._write(partial, blocks(), wanted, name, each, stop))
            except OSError as error:
                raise from_os(error, f"writing {name}") from error
            finally:
                await run_uncancelled(drop, partial)

        return await self._runs.run(_url_key(key), copy, tell)

    def link(self, blob: Blob, path: Path) -> None:
        """The same file under another name as well, in place of whatever is there: whole from the first moment. What
        is linked stays when the blob is swept. Blocking; both must be on one file system."""
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        aside.unlink(missing_ok=True)
        os.link(blob.path, aside)
        os.replace(aside, path)
        aside.unlink(missing_ok=True)  # renaming onto the very same file does nothing at all
        sync_folder(path.parent)

    @contextlib.contextmanager
    def hold(self, *digests: str) -> Iterator[None]:
        """While held, a blob is not discarded, whoever asks for it."""
        self._held.update(digests)
        try:
            yield
        finally:
            self._held.subtract(digests)
            self._held += Counter()  # drops what nobody holds any more

    def discard(self, *digests: str) -> None:
        """Remove what nobody holds."""
        for digest in digests:
            if not self._held[digest]:
                self.path(digest).unlink(missing_ok=True)

    def forget(self, *digests: str, key: str = "") -> None:
        """Somebody cancelled on purpose: what came so far goes too, unless others want it. `key` is the remote's, for
        what has no digest yet."""
        if self.leaving:
            return
        self.discard(*digests)
        for name in (*map(hex_of, digests), *([_url_key(key)] if key else [])):
            if name not in self._runs and not self._held[PREFIX + name]:
                drop(self._incoming / f"{name}.part")

    def leave(self) -> None:
        """This process ends: what is cancelled from now on is to be gone on with by the next."""
        self.leaving = True

    async def run(self, clock: Clock, every_s: float = SWEEP_EVERY_S) -> None:
        """Sweep now and then, for ever."""

        async def step() -> None:
            await self.sweep()

        await run_every("sweep blobs", every_s, step, clock=clock)

    async def sweep(self, *, older_than_s: float = KEEP_PARTIAL_S, keep: Collection[str] = ()) -> int:
        """Remove what nobody came back for: partial and finished files untouched for that long, but for the digests
        to `keep`. How many went."""
        return await run_uncancelled(self._sweep, time.time() - older_than_s, frozenset(keep))

    async def sweep_finished(self, keep: Collection[str] = ()) -> None:
        """Finished blobs that nobody holds and that are not to be kept, however young."""
        await run_uncancelled(self._sweep_files, list(self._finished.iterdir()), time.time() + 1.0, frozenset(keep))

    async def adopt(self, digest: str, path: Path, size: int) -> Blob | None:
        """The blob, if that file is called after it and is of our own user, on our own file system: it becomes ours as
        well, without a byte copied. None: it must be fetched."""
        return await run_uncancelled(self._adopt, digest, path, size)

    async def verify(self, digest: str) -> bool:
        """Read it again. A blob that is no longer what its name says is removed."""
        path = self.get(digest).path
        if await run_uncancelled(hash_file, path) == digest:
            return True
        log.error("a stored blob is damaged and was removed", digest=digest)
        path.unlink(missing_ok=True)
        return False

    async def _fetch(self, remote: Remote, wanted: Wanted, partial: Path, at: At) -> Blob:
        fetched = await self._fetcher.fetch(remote, partial, wanted, at)
        return await run_uncancelled(self._finish, partial, fetched.digest, fetched.size)

    def _write(
        self,
        partial: Path,
        blocks: Iterator[bytes],
        wanted: Wanted,
        name: str,
        each: Callable[[int], None],
        stop: StopToken,
    ) -> Blob:
        whole, size = hashlib.sha256(), 0
        with partial.open("wb") as file:
            for block in blocks:
                stop.check()
                file.write(block)
                whole.update(block)
                size += len(block)
                each(size)
            file.flush()
            os.fsync(file.fileno())
        digest = PREFIX + whole.hexdigest()
        if wanted.digest not in ("", digest):
            raise WrongDigest(f"{name} is {digest}, not {wanted.digest}")
        return self._finish(partial, digest, size)

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
            log.debug("a blob nearby cannot be used", path=str(path), reason=error.strerror)
            return None
        return Blob(digest, size, target)

    def _finish(self, partial: Path, digest: str, size: int) -> Blob:
        path = self._finished / digest.removeprefix(PREFIX)
        os.chmod(partial, self._mode)
        os.replace(partial, path)
        sync_folder(self._finished)
        drop(partial)
        return Blob(digest, size, path)

    def _sweep(self, before: float, keep: frozenset[str]) -> int:
        return self._sweep_files([*self._incoming.iterdir(), *self._finished.iterdir()], before, keep)

    def _sweep_files(self, paths: Sequence[Path], before: float, keep: frozenset[str]) -> int:
        gone = 0
        for path in paths:
            name = PREFIX + path.name
            in_use = path.name.partition(".")[0] in self._runs or self._held[name] or name in keep
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                if not in_use and status.st_mtime < before:
                    path.unlink()
                    gone += 1
        return gone


def _url_key(key: str) -> str:
    return "url-" + hashlib.sha256(key.encode()).hexdigest()


def _as_at(tell: Tell, name: str, phase: Phase = Phase.DOWNLOADING) -> At:
    def at(have: int, total: int) -> None:
        tell(Progress(phase, name, have, total))

    return at


def _from_thread(at: At, total: int) -> Callable[[int], None]:
    """For work in a thread: tells in the loop, now and then. Call this in the loop."""
    loop = asyncio.get_running_loop()
    told_s = 0.0

    def each(done: int) -> None:
        nonlocal told_s
        if time.monotonic() - told_s >= TELL_S:
            told_s = time.monotonic()
            loop.call_soon_threadsafe(at, done, total)

    return each
