"""An archive of any kind we take, into a folder. Runs in a thread."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, cast

from corral.blobs.archives.bounds import Bounds, Count
from corral.blobs.archives.decompress import ZIP, read_plain
from corral.blobs.archives.tar import read_tar
from corral.blobs.archives.unpack import Unpacker
from corral.blobs.archives.zip import read_zip
from corral.blobs.space import Room
from corral.kit.threads import StopToken


def unpack_archive(
    path: Path,
    folder: Path,
    bounds: Bounds,
    *,
    room: Room | None = None,
    stop: StopToken | None = None,
    each: Callable[[int], None] | None = None,
) -> None:
    """tar (plain, gzip, xz, bzip2, zstd where Python has it) or zip, told by content. `folder` exists and is empty.
    `each` hears how many packed bytes were read."""
    unpacker = Unpacker(folder, Count(bounds, path.stat().st_size), room=room)
    with watch_reads(path, each) as file:
        head = file.read(4)
        file.seek(0)
        unpacker.add(read_zip(file) if head in ZIP else read_tar(read_plain(file)), stop)
    unpacker.finish()


def watch_reads(path: Path, each: Callable[[int], None] | None) -> BinaryIO:
    """The file, telling how much of it was read: how far unpacking is, whatever it unpacks to."""
    file = path.open("rb", buffering=0)
    return cast(BinaryIO, _Watched(file, each) if each is not None else file)


class _Watched(io.RawIOBase):
    def __init__(self, file: io.RawIOBase, each: Callable[[int], None]) -> None:
        super().__init__()
        self._file = file
        self._each = each

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int | None:  # type: ignore[override]
        size = self._file.readinto(buffer)
        self._each(size or 0)
        return size

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        self._file.close()
        super().close()
