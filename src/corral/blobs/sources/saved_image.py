"""An image in a tar file on this disk. Its digest is that of the file."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from corral.blobs.archives.bounds import Count
from corral.blobs.archives.decompress import is_packed, read_plain
from corral.blobs.archives.unpack import Unpacker
from corral.blobs.digests import hex_of
from corral.blobs.errors import from_os
from corral.blobs.oci.image_file import open_image_file
from corral.blobs.progress import Tally, Tell
from corral.blobs.sources.archive import hash_local
from corral.blobs.sources.means import Means, check_wanted, count_in_thread, require_unpack_room
from corral.contract.messages.backends import Phase
from corral.contract.sources import Source
from corral.kit.threads import StopToken, run_in_thread


async def open_saved_image(means: Means, source: Source, tell: Tell) -> SavedImage:
    path = Path(source.uri)
    digest = await hash_local(path, tell)
    check_wanted(source.digest, digest, str(path))
    return SavedImage(means, path, source.platform or means.platform, digest)


@dataclass(frozen=True)
class SavedImage:
    means: Means
    path: Path
    platform: str
    digest: str

    @property
    def content_digest(self) -> str:
        return self.digest

    @property
    def blobs(self) -> tuple[str, ...]:
        return ()

    async def write_to(self, folder: Path, tell: Tell) -> None:
        size = self.path.stat().st_size
        require_unpack_room(self.means, folder, size, 0, self.path.name)
        tally = Tally(Phase.EXTRACTING, tell, time.monotonic, total_bytes=size)
        each = count_in_thread(tally, self.path.name)

        def work(stop: StopToken) -> None:
            try:
                with self._plain(folder, stop) as path, open_image_file(path, self.platform) as image:
                    unpacker = Unpacker(folder, Count(self.means.bounds, size), rootfs=True, room=self.means.room)
                    for layer in image.layers:
                        unpacker.add(image.entries(layer), stop)
                        each(layer.member.size)
                    unpacker.finish()
            except OSError as error:
                raise from_os(error, f"reading {self.path}") from error

        await run_in_thread(work)
        tally.at(self.path.name, size)

    @contextlib.contextmanager
    def _plain(self, folder: Path, stop: StopToken) -> Iterator[Path]:
        """The tar file itself. One that was packed as a whole is unpacked aside first: its parts lie in any order."""
        with self.path.open("rb") as file:
            if not is_packed(file):
                yield self.path
                return
            aside = folder.parent / f".{hex_of(self.digest)[:16]}.tar"
            count = Count(self.means.bounds, self.path.stat().st_size)
            try:
                with aside.open("xb") as plain:
                    for block in read_plain(file):
                        stop.check()
                        count.grow(len(block))
                        self.means.room.require(folder, len(block), f"unpacking {self.path.name}")
                        plain.write(block)
                yield aside
            finally:
                aside.unlink(missing_ok=True)
