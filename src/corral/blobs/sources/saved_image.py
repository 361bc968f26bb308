"""An image in a local tar file. The digest is that of the file."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from corral.blobs.archives.decompress import decompress_blocks, is_packed
from corral.blobs.archives.entries import UnpackCounter
from corral.blobs.archives.unpack import Unpacker
from corral.blobs.digests import hex_of
from corral.blobs.errors import from_os
from corral.blobs.oci.image_file import open_image_file
from corral.blobs.progress import OnProgress, PartsProgress
from corral.blobs.sources.archive import hash_local
from corral.blobs.sources.context import SourceContext, check_expected, count_in_thread, require_unpack_space
from corral.contract.messages.backends import Phase
from corral.contract.sources import Source
from corral.kit.threads import StopToken, run_in_thread


async def open_saved_image(context: SourceContext, source: Source, on_progress: OnProgress) -> SavedImage:
    path = Path(source.uri)
    digest = await hash_local(path, on_progress)
    check_expected(source.digest, digest, str(path))
    return SavedImage(context, path, source.platform or context.platform, digest)


@dataclass(frozen=True)
class SavedImage:
    context: SourceContext
    path: Path
    platform: str
    digest: str

    @property
    def content_digest(self) -> str:
        return self.digest

    @property
    def blobs(self) -> tuple[str, ...]:
        return ()

    async def write_to(self, folder: Path, on_progress: OnProgress) -> None:
        size = self.path.stat().st_size
        require_unpack_space(self.context, folder, size, 0, self.path.name)
        tally = PartsProgress(Phase.EXTRACTING, on_progress, time.monotonic, total_bytes=size)
        on_bytes = count_in_thread(tally, self.path.name)

        def work(stop: StopToken) -> None:
            try:
                with self._plain(folder, stop) as path, open_image_file(path, self.platform) as image:
                    unpacker = Unpacker(
                        folder, UnpackCounter(self.context.bounds, size), rootfs=True, space=self.context.space
                    )
                    for layer in image.layers:
                        unpacker.add(image.entries(layer), stop)
                        on_bytes(layer.member.size)
                    unpacker.finish()
            except OSError as error:
                raise from_os(error, f"reading {self.path}") from error

        await run_in_thread(work)
        tally.at(self.path.name, size)

    @contextlib.contextmanager
    def _plain(self, folder: Path, stop: StopToken) -> Iterator[Path]:
        """The plain tar file. A compressed file is decompressed into a temporary file first, because its parts are read
        in any order."""
        with self.path.open("rb") as file:
            if not is_packed(file):
                yield self.path
                return
            aside = folder.parent / f".{hex_of(self.digest)[:16]}.tar"
            count = UnpackCounter(self.context.bounds, self.path.stat().st_size)
            try:
                with aside.open("xb") as plain:
                    for block in decompress_blocks(file):
                        stop.check()
                        count.grow(len(block))
                        self.context.space.require(folder, len(block), f"unpacking {self.path.name}")
                        plain.write(block)
                yield aside
            finally:
                aside.unlink(missing_ok=True)
