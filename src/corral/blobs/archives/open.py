"""Unpacks an archive of any supported format into a folder. Blocking: call it in a thread."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, cast

from corral.blobs.archives.decompress import ZIP, decompress_blocks
from corral.blobs.archives.entries import Bounds, UnpackCounter
from corral.blobs.archives.tar import read_tar
from corral.blobs.archives.unpack import Unpacker
from corral.blobs.archives.zip import read_zip
from corral.blobs.disk import DiskSpace
from corral.kit.threads import StopToken


def unpack_archive(
    path: Path,
    folder: Path,
    bounds: Bounds,
    *,
    space: DiskSpace | None = None,
    stop: StopToken | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """tar (plain, gzip, xz, bzip2, zstd where Python has it) or zip, detected by content. `folder` exists and is empty.
    `on_bytes` is called with the number of packed bytes read."""
    unpacker = Unpacker(folder, UnpackCounter(bounds, path.stat().st_size), space=space)
    with watch_reads(path, on_bytes) as file:
        head = file.read(4)
        file.seek(0)
        unpacker.add(read_zip(file) if head in ZIP else read_tar(decompress_blocks(file)), stop)
    unpacker.finish()


def watch_reads(path: Path, on_bytes: Callable[[int], None] | None) -> BinaryIO:
    """Open the file so that `on_bytes` is called with the size of every read: the progress of unpacking."""
    file = path.open("rb", buffering=0)
    return cast(BinaryIO, _Watched(file, on_bytes) if on_bytes is not None else file)


class _Watched(io.RawIOBase):
    def __init__(self, file: io.RawIOBase, on_bytes: Callable[[int], None]) -> None:
        super().__init__()
        self._file = file
        self._on_bytes = on_bytes

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int | None:  # type: ignore[override]
        size = self._file.readinto(buffer)
        self._on_bytes(size or 0)
        return size

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        self._file.close()
        super().close()
