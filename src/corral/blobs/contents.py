"""Any `Source`, opened and written into a folder. Start reading this room here.

`Contents.open` says what the source is (its digests), and has fetched whatever it takes to know; `write_to` puts it
into an empty folder. Which folder that is, and what becomes of it, is the caller's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from corral.blobs.digests import digest_of_parts
from corral.blobs.errors import NoSpace
from corral.blobs.progress import Tell, tell_nobody
from corral.blobs.sources.archive import open_file, open_url
from corral.blobs.sources.environment import open_wheels
from corral.blobs.sources.folder import open_folder
from corral.blobs.sources.image import open_image
from corral.blobs.sources.means import Content, Means
from corral.blobs.sources.saved_image import open_saved_image
from corral.blobs.sources.texts import check_texts, digest_of_texts, open_inline, write_texts
from corral.contract import sources
from corral.contract.sources import INLINE, Source, is_digest
from corral.kit.errors import Invalid
from corral.kit.threads import run_uncancelled


@dataclass(frozen=True)
class Opened:
    """A source and what it turned out to be."""

    source: Source
    content: Content

    @property
    def digest(self) -> str:
        """As it is reported to the cluster."""
        return self.content.digest

    @property
    def content_digest(self) -> str:
        """Names the version's folder: with other glue it is another version."""
        if self.source.kind == INLINE or not self.source.files:
            return self.content.content_digest
        return digest_of_parts(self.content.content_digest, digest_of_texts(self.source.files))

    @property
    def blobs(self) -> tuple[str, ...]:
        return self.content.blobs

    async def write_to(self, folder: Path, tell: Tell = tell_nobody) -> None:
        """Into an empty folder. When it raises, what is in there is rubbish."""
        await self.content.write_to(folder, tell)
        await write_texts(folder, self.source.files)


class Contents:
    def __init__(self, means: Means) -> None:
        self._means = means

    @contextlib.asynccontextmanager
    async def open(
        self, source: Source, tell: Tell = tell_nobody, *, keep: Callable[[], bool] = lambda: False
    ) -> AsyncIterator[Opened]:
        """Raises what time cannot cure (`errors.is_final`): Invalid, NotFound, NoBuild, WrongDigest, BadArchive,
        TooLarge; and what it may: Unreachable, Denied, Failed, NoSpace, Unavailable. While open, its blobs stay.
        `keep` is asked when it is cancelled: whether somebody wants to go on from what came."""
        check_texts(source.files)
        store = self._means.store
        try:
            opened = Opened(source, await self._open(source, tell))
        except (asyncio.CancelledError, NoSpace) as error:
            if isinstance(error, NoSpace) or not keep():
                store.forget(*([source.digest] if is_digest(source.digest) else ()), key=source.uri)
            raise
        try:
            with store.hold(*opened.blobs):
                yield opened
        except (asyncio.CancelledError, NoSpace) as error:
            # Nobody wants it any more, or it does not fit: what came so far would only take up room.
            if isinstance(error, NoSpace) or not keep():
                store.forget(*opened.blobs)
            raise

    def discard(self, opened: Opened) -> None:
        """It is unpacked: the packed form is not needed any more."""
        self._means.store.discard(*opened.blobs)

    async def _open(self, source: Source, tell: Tell) -> Content:
        match source.kind:
            case sources.OCI:
                return await open_image(self._means, source, tell)
            case sources.HTTP:
                return await open_url(self._means, source, tell)
            case sources.FILE:
                is_folder = await run_uncancelled(Path(source.uri).is_dir)
                return await (open_folder if is_folder else open_file)(self._means, source, tell)
            case sources.DIRECTORY:
                is_file = await run_uncancelled(Path(source.uri).is_file)
                return await (open_file if is_file else open_folder)(self._means, source, tell)
            case sources.OCIFILE:
                return await open_saved_image(self._means, source, tell)
            case sources.PYPI:
                return await open_wheels(self._means, source, tell)
            case sources.INLINE:
                return open_inline(source)
        raise Invalid(f"{source.kind[:40]!r} is not a kind of source this version knows")
