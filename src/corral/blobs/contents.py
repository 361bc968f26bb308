"""Opens any `Source` and writes its content into a folder. Start reading this package here.

`Contents.open` finds out the digests of the source and fetches what that takes; `write_to` writes the content into an
empty folder. The caller chooses the folder and decides what happens to it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from corral.blobs.digests import digest_of_parts
from corral.blobs.errors import NoSpace
from corral.blobs.progress import OnProgress, ignore_progress
from corral.blobs.sources.archive import open_file, open_url
from corral.blobs.sources.context import Content, ProvidedSource, SourceContext
from corral.blobs.sources.folder import open_folder
from corral.blobs.sources.image import open_image
from corral.blobs.sources.inline_files import check_files, digest_of_files, open_inline, write_files
from corral.blobs.sources.saved_image import open_saved_image
from corral.blobs.sources.wheels import open_wheels
from corral.contract import sources
from corral.contract.sources import INLINE, Source, is_digest
from corral.kit.errors import Invalid
from corral.kit.threads import run_uncancelled


@dataclass(frozen=True)
class OpenedSource:
    """A source and its content."""

    source: Source
    content: Content

    @property
    def digest(self) -> str:
        """The digest that inventories report."""
        return self.content.digest

    @property
    def content_digest(self) -> str:
        """Names the version's folder. Other inline files make another version."""
        if self.source.kind == INLINE or not self.source.files:
            return self.content.content_digest
        return digest_of_parts(self.content.content_digest, digest_of_files(self.source.files))

    @property
    def blobs(self) -> tuple[str, ...]:
        return self.content.blobs

    async def write_to(self, folder: Path, on_progress: OnProgress = ignore_progress) -> None:
        """Write the content into an empty folder. After an error the folder's content must not be used."""
        await self.content.write_to(folder, on_progress)
        await write_files(folder, self.source.files)


class Contents:
    def __init__(self, context: SourceContext) -> None:
        self._context = context

    @contextlib.asynccontextmanager
    async def open(
        self, source: Source, on_progress: OnProgress = ignore_progress, *, keep: Callable[[], bool] = lambda: False
    ) -> AsyncIterator[OpenedSource]:
        """Raises final errors (`errors.is_final`): Invalid, NotFound, NoBuild, WrongDigest, BadArchive, TooLarge; and
        errors that a retry may fix: Unreachable, Denied, Failed, NoSpace, Unavailable. The blobs of an open source are
        not removed. `keep` is called when the work is cancelled: True keeps partial downloads for a later attempt."""
        check_files(source.files)
        async with (
            self._provide(source, on_progress) as provided,
            self._open_and_hold(source, provided, on_progress, keep) as opened,
        ):
            yield opened

    @contextlib.asynccontextmanager
    async def _open_and_hold(
        self, source: Source, provided: ProvidedSource | None, on_progress: OnProgress, keep: Callable[[], bool]
    ) -> AsyncIterator[OpenedSource]:
        store = self._context.store
        learned = [blob.digest for blob in provided.blobs] if provided is not None else []
        try:
            with store.hold(*learned):
                opened = OpenedSource(source, await self._open(source, provided, on_progress))
        except (asyncio.CancelledError, NoSpace) as error:
            if isinstance(error, NoSpace) or not keep():
                store.forget(*([source.digest] if is_digest(source.digest) else ()), *learned, key=source.uri)
            raise
        try:
            with store.hold(*opened.blobs):
                yield opened
        except (asyncio.CancelledError, NoSpace) as error:
            # Cancelled, or the disk is full: partial content would only take up space.
            if isinstance(error, NoSpace) or not keep():
                store.forget(*opened.blobs)
            raise

    def discard(self, opened: OpenedSource) -> None:
        """Remove the packed blobs of a source that was unpacked."""
        self._context.store.discard(*opened.blobs)

    def _provide(
        self, source: Source, on_progress: OnProgress
    ) -> contextlib.AbstractAsyncContextManager[ProvidedSource | None]:
        provider = self._context.provider
        if provider is None or source.kind not in (sources.OCI, sources.HTTP, sources.PYPI):
            return contextlib.nullcontext()
        return provider.open(source, source.platform or self._context.platform, on_progress)

    async def _open(self, source: Source, provided: ProvidedSource | None, on_progress: OnProgress) -> Content:
        match source.kind:
            case sources.OCI:
                return await open_image(self._context, source, on_progress, provided)
            case sources.HTTP:
                return await open_url(self._context, source, on_progress, provided)
            case sources.FILE:
                is_folder = await run_uncancelled(Path(source.uri).is_dir)
                return await (open_folder if is_folder else open_file)(self._context, source, on_progress)
            case sources.DIRECTORY:
                is_file = await run_uncancelled(Path(source.uri).is_file)
                return await (open_file if is_file else open_folder)(self._context, source, on_progress)
            case sources.OCIFILE:
                return await open_saved_image(self._context, source, on_progress)
            case sources.PYPI:
                return await open_wheels(self._context, source, on_progress, provided)
            case sources.INLINE:
                return open_inline(source)
        raise Invalid(f"{source.kind[:40]!r} is a kind of source that this version does not support")
