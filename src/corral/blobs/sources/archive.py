"""Archives: fetched from a URL into the blob store, or read from the local disk. The digest is that of the file."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from corral.blobs.archives.open import unpack_archive
from corral.blobs.digests import hash_file
from corral.blobs.errors import from_os
from corral.blobs.progress import OnProgress, PartsProgress, Progress
from corral.blobs.sources.context import (
    ProvidedSource,
    SourceContext,
    check_expected,
    count_in_thread,
    report_into,
    require_unpack_space,
)
from corral.blobs.transfer.partial_file import ExpectedBlob
from corral.blobs.transfer.remote import UrlRemote
from corral.contract.messages.backends import Phase
from corral.contract.sources import Source
from corral.kit.errors import NotFound
from corral.kit.threads import StopToken, run_in_thread, run_uncancelled


async def open_url(
    context: SourceContext, source: Source, on_progress: OnProgress, provided: ProvidedSource | None = None
) -> ArchiveContent:
    page = UrlRemote(context.session, source.uri)
    wanted = ExpectedBlob(source.digest, source.size)
    if provided is not None and provided.blobs:  # the controller may know the digest of an archive that states none
        wanted = ExpectedBlob(provided.blobs[0].digest, provided.blobs[0].size)
    tally = PartsProgress(Phase.DOWNLOADING, on_progress, time.monotonic, total_bytes=source.size)

    def watch(progress: Progress) -> None:
        if progress.total_bytes and not source.size:
            tally.set_total(progress.total_bytes)
        step(progress)

    step = report_into(tally, page.name)
    blob = await context.obtain(provided, page, wanted, watch, name=page.name)
    on_progress(Progress(Phase.VERIFYING, page.name, blob.size, blob.size))  # it was hashed while it was fetched
    return ArchiveContent(context, blob.path, page.name, blob.digest, (blob.digest,))


async def open_file(context: SourceContext, source: Source, on_progress: OnProgress) -> ArchiveContent:
    path = Path(source.uri)
    digest = await hash_local(path, on_progress)
    check_expected(source.digest, digest, str(path))
    return ArchiveContent(context, path, path.name, digest, ())


async def hash_local(path: Path, on_progress: OnProgress) -> str:
    """Digest of a local file. Raises NotFound."""
    size = await run_uncancelled(_size_of, path)
    on_bytes = count_in_thread(PartsProgress(Phase.VERIFYING, on_progress, time.monotonic, total_bytes=size), path.name)

    def work(stop: StopToken) -> str:
        def step(size: int) -> None:
            stop.check()
            on_bytes(size)

        return hash_file(path, on_bytes=step)

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
    context: SourceContext
    path: Path
    name: str
    digest: str
    blobs: tuple[str, ...]

    @property
    def content_digest(self) -> str:
        return self.digest

    async def write_to(self, folder: Path, on_progress: OnProgress) -> None:
        size = self.path.stat().st_size
        require_unpack_space(self.context, folder, size, 0, self.name)
        tally = PartsProgress(Phase.EXTRACTING, on_progress, time.monotonic, total_bytes=size)
        on_bytes = count_in_thread(tally, self.name)
        await run_in_thread(
            lambda stop: unpack_archive(
                self.path, folder, self.context.bounds, space=self.context.space, stop=stop, on_bytes=on_bytes
            )
        )
        tally.at(self.name, size)
