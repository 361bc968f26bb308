"""A folder on this disk, copied. Its digest is that of everything in it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from corral.blobs.folders import copy_tree
from corral.blobs.progress import Tally, Tell
from corral.blobs.sources.means import Means, check_wanted, count_in_thread
from corral.blobs.trees import Listing, compare, list_tree
from corral.contract.messages.backends import Phase
from corral.contract.sources import Source
from corral.kit.errors import Conflict, Invalid, NotFound
from corral.kit.threads import run_in_thread, run_uncancelled


async def open_folder(means: Means, source: Source, tell: Tell) -> FolderContent:
    path = await run_uncancelled(_find, source.uri)
    each = count_in_thread(Tally(Phase.VERIFYING, tell, time.monotonic), path.name)
    listing = await run_in_thread(lambda stop: list_tree(path, stop, each=each))
    check_wanted(source.digest, listing.digest, str(path))
    return FolderContent(means, path, listing)


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
    means: Means
    path: Path
    listing: Listing

    @property
    def digest(self) -> str:
        return self.listing.digest

    @property
    def content_digest(self) -> str:
        return self.listing.digest

    @property
    def blobs(self) -> tuple[str, ...]:
        return ()

    async def write_to(self, folder: Path, tell: Tell) -> None:
        await run_uncancelled(_refuse_itself, self.path, folder)
        size = self.listing.size_bytes
        self.means.room.require(folder, size, f"copying {self.path}")
        tally = Tally(Phase.EXTRACTING, tell, time.monotonic, total_bytes=size)
        each = count_in_thread(tally, self.path.name)
        await run_in_thread(lambda stop: copy_tree(self.path, folder, self.means.bounds, stop=stop, each=each))
        copied = await run_in_thread(lambda stop: list_tree(folder, stop))
        if copied != self.listing:
            difference = compare(self.listing, copied)
            names = (*difference.missing, *difference.changed, *difference.added)
            raise Conflict(f"{self.path} changed while it was copied: {', '.join(names[:5])}")
        tally.at(self.path.name, size)
