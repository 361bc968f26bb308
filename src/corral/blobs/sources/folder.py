"""A local folder, copied. The digest is that of its listing."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from corral.blobs.disk import copy_tree
from corral.blobs.folder_listing import FolderListing, compare_listings, list_tree
from corral.blobs.progress import OnProgress, PartsProgress
from corral.blobs.sources.context import SourceContext, check_expected, count_in_thread
from corral.contract.messages.backends import Phase
from corral.contract.sources import Source
from corral.kit.errors import Conflict, Invalid, NotFound
from corral.kit.threads import run_in_thread, run_uncancelled


async def open_folder(context: SourceContext, source: Source, on_progress: OnProgress) -> FolderContent:
    path = await run_uncancelled(_find, source.uri)
    on_bytes = count_in_thread(PartsProgress(Phase.VERIFYING, on_progress, time.monotonic), path.name)
    listing = await run_in_thread(lambda stop: list_tree(path, stop, on_bytes=on_bytes))
    check_expected(source.digest, listing.digest, str(path))
    return FolderContent(context, path, listing)


def _find(uri: str) -> Path:
    path = Path(uri).expanduser().absolute()
    if not path.is_dir():
        raise NotFound(f"there is no folder {path} on this machine")
    return path


def _refuse_itself(source: Path, target: Path) -> None:
    if target.resolve().is_relative_to(source.resolve()):
        raise Invalid(f"{source} contains the folder it would be copied to")


@dataclass(frozen=True)
class FolderContent:
    context: SourceContext
    path: Path
    listing: FolderListing

    @property
    def digest(self) -> str:
        return self.listing.digest

    @property
    def content_digest(self) -> str:
        return self.listing.digest

    @property
    def blobs(self) -> tuple[str, ...]:
        return ()

    async def write_to(self, folder: Path, on_progress: OnProgress) -> None:
        await run_uncancelled(_refuse_itself, self.path, folder)
        size = self.listing.size_bytes
        self.context.space.require(folder, size, f"copying {self.path}")
        tally = PartsProgress(Phase.EXTRACTING, on_progress, time.monotonic, total_bytes=size)
        on_bytes = count_in_thread(tally, self.path.name)
        await run_in_thread(
            lambda stop: copy_tree(self.path, folder, self.context.bounds, stop=stop, on_bytes=on_bytes)
        )
        copied = await run_in_thread(lambda stop: list_tree(folder, stop))
        if copied != self.listing:
            difference = compare_listings(self.listing, copied)
            names = (*difference.missing, *difference.changed, *difference.added)
            raise Conflict(f"{self.path} changed while it was copied: {', '.join(names[:5])}")
        tally.at(self.path.name, size)
