"""Content on disk under its own digest. A finished file is whole or absent; all who want one digest share a transfer.

    <folder>/sha256/<hex>            finished, never changed again
    <folder>/incoming/<key>.part     on its way; a later process goes on from there

Who reads a blob holds it meanwhile, so that tidying never takes it away. Serving blobs to other machines reads the
finished files by `path`, and needs no more from here.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from corral.blobs.digests import PREFIX, hash_file, hex_of
from corral.blobs.fetcher import Fetcher
from corral.blobs.partial import At, Wanted, drop
from corral.blobs.progress import Progress, Tell, tell_nobody
from corral.blobs.remote import Remote
from corral.blobs.sharing import SharedRuns
from corral.blobs.threads import to_the_end
from corral.contract.messages.backends import Phase
from corral.kit.clock import Clock
from corral.kit.errors import NotFound
from corral.kit.files import sync_folder
from corral.kit.log import get_log
from corral.kit.tasks import run_every

log = get_log(__name__)

KEEP_PARTIAL_S = 24 * 3600.0
SWEEP_EVERY_S = 3600.0


@dataclass(frozen=True)
class Blob:
    digest: str
    size: int
    path: Path


class BlobStore:
    def __init__(self, folder: Path, fetcher: Fetcher | None = None) -> None:
        self.folder = folder
        self._finished = folder / "sha256"
        self._incoming = folder / "incoming"
        self._fetcher = fetcher or Fetcher()
        self._runs: SharedRuns[str, Blob] = SharedRuns()
        self._held: Counter[str] = Counter()
        self.leaving = False
        for part in (self._finished, self._incoming):
            part.mkdir(parents=True, exist_ok=True, mode=0o700)

    def path(self, digest: str) -> Path:
        """Where the blob is once it is here."""
        return self._finished / hex_of(digest)

    def find(self, digest: str) -> Blob | None:
        path = self.path(digest)
        try:
            return Blob(digest, path.stat().st_size, path)
        except FileNotFoundError:
            return None

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

        return await self._runs.join(key, fetch, tell)

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

    async def sweep(self, *, older_than_s: float = KEEP_PARTIAL_S) -> int:
        """Remove what nobody came back for: partial and finished files untouched for that long. How many went."""
        return await to_the_end(self._sweep, time.time() - older_than_s)

    async def verify(self, digest: str) -> bool:
        """Read it again. A blob that is no longer what its name says is removed."""
        path = self.get(digest).path
        if await to_the_end(hash_file, path) == digest:
            return True
        log.error("a stored blob is damaged and was removed", digest=digest)
        path.unlink(missing_ok=True)
        return False

    async def _fetch(self, remote: Remote, wanted: Wanted, partial: Path, at: At) -> Blob:
        fetched = await self._fetcher.fetch(remote, partial, wanted, at)
        return await to_the_end(self._finish, partial, fetched.digest, fetched.size)

    def _finish(self, partial: Path, digest: str, size: int) -> Blob:
        path = self._finished / digest.removeprefix(PREFIX)
        os.replace(partial, path)
        sync_folder(self._finished)
        drop(partial)
        return Blob(digest, size, path)

    def _sweep(self, before: float) -> int:
        gone = 0
        for path in (*self._incoming.iterdir(), *self._finished.iterdir()):
            in_use = path.name.partition(".")[0] in self._runs or self._held[PREFIX + path.name]
            with contextlib.suppress(FileNotFoundError):
                if not in_use and path.stat().st_mtime < before:
                    path.unlink()
                    gone += 1
        return gone


def _url_key(key: str) -> str:
    return "url-" + hashlib.sha256(key.encode()).hexdigest()


def _as_at(tell: Tell, name: str) -> At:
    def at(have: int, total: int) -> None:
        tell(Progress(Phase.DOWNLOADING, name, have, total))

    return at
