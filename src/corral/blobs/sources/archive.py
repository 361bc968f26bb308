"""Archives: from a URL, by way of the store, or from this disk, where they lie. Their digest is that of the file."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from corral.blobs.archives.open import unpack_archive
from corral.blobs.digests import hash_file
from corral.blobs.errors import from_os
from corral.blobs.partial import Wanted
from corral.blobs.progress import Progress, Tally, Tell
from corral.blobs.remote import Page
from corral.blobs.sources.means import (
    Means,
    check_wanted,
    count_in_thread,
    into_tally,
    require_unpack_room,
)
from corral.contract.messages.backends import Phase
from corral.contract.sources import Source
from corral.kit.errors import NotFound
from corral.kit.threads import StopToken, run_in_thread, run_uncancelled


async def open_url(means: Means, source: Source, tell: Tell) -> ArchiveContent:
    page = Page(means.session, source.uri)
    tally = Tally(Phase.DOWNLOADING, tell, time.monotonic, total_bytes=source.size)

    def watch(progress: Progress) -> None:
        if progress.total_bytes and not source.size:
            tally.set_total(progress.total_bytes)
        step(progress)

    step = into_tally(tally, page.name)
    blob = await means.store.obtain(page, Wanted(source.digest, source.size), watch)
    tell(Progress(Phase.VERIFYING, page.name, blob.size, blob.size))  # it was hashed as it came
    return ArchiveContent(means, blob.path, page.name, blob.digest, (blob.digest,))


async def open_file(means: Means, source: Source, tell: Tell) -> ArchiveContent:
    path = Path(source.uri)
    digest = await hash_local(path, tell)
    check_wanted(source.digest, digest, str(path))
    return ArchiveContent(means, path, path.name, digest, ())


async def hash_local(path: Path, tell: Tell) -> str:
    """Digest of a file on this disk. Raises NotFound."""
    size = await run_uncancelled(_size_of, path)
    each = count_in_thread(Tally(Phase.VERIFYING, tell, time.monotonic, total_bytes=size), path.name)

    def work(stop: StopToken) -> str:
        def step(size: int) -> None:
            stop.check()
            each(size)

        return hash_file(path, each=step)

    try:
        return await run_in_thread(work)
    except OSError as error:
        raise from_os(error, f"reading {path}") from error


def _size_of(path: Path) -> int:
    if not path.is_file():
        raise NotFound(f"there is no file {path} on this machine")
    return path.stat().st_size


@dataclass(frozen=True)
class ArchiveContent:
    means: Means
    path: Path
    name: str
    digest: str
    blobs: tuple[str, ...]

    @property
    def content_digest(self) -> str:
        return self.digest

    async def write_to(self, folder: Path, tell: Tell) -> None:
        size = self.path.stat().st_size
        require_unpack_room(self.means, folder, size, 0, self.name)
        tally = Tally(Phase.EXTRACTING, tell, time.monotonic, total_bytes=size)
        each = count_in_thread(tally, self.name)
        await run_in_thread(
            lambda stop: unpack_archive(
                self.path, folder, self.means.bounds, room=self.means.room, stop=stop, each=each
            )
        )
        tally.at(self.name, size)
