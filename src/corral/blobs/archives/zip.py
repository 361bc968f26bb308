"""Reads zip archives. Their table of contents is read first, so sizes are known before anything is unpacked."""

from __future__ import annotations

import contextlib
import lzma
import stat
import time
import zipfile
import zlib
from collections.abc import Iterator
from typing import BinaryIO

from corral.blobs.archives.entries import MAX_NAME_BYTES, Entry, EntryKind
from corral.blobs.errors import BadArchive, UnsafeArchive

READ_BYTES = 1 << 20
MADE_ON_UNIX = 3


def read_zip(file: BinaryIO) -> Iterator[Entry]:
    """Entries in order. Raises BadArchive, UnsafeArchive."""
    with _translated():
        archive = zipfile.ZipFile(file)
    with archive:
        for info in archive.infolist():
            yield _entry(archive, info)


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, NotImplementedError, EOFError) as error:
        raise BadArchive(f"the zip archive is damaged or uses an unsupported feature: {error}") from error


def _entry(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Entry:
    if info.flag_bits & 0x1:
        raise BadArchive(f"{info.filename[:200]!r} is encrypted")
    mode = info.external_attr >> 16 if info.create_system == MADE_ON_UNIX else 0
    modified_s = _modified(info)
    if info.is_dir():
        return Entry(info.filename, EntryKind.FOLDER, mode=0o755)
    if stat.S_ISLNK(mode):
        return Entry(info.filename, EntryKind.SYMLINK, target=_link(archive, info))
    if stat.S_IFMT(mode) not in (0, stat.S_IFREG):
        raise UnsafeArchive(
            f"{info.filename[:200]!r} is neither a file, a folder nor a link: a backend may contain nothing else"
        )
    return Entry(
        info.filename,
        EntryKind.FILE,
        size=info.file_size,
        mode=stat.S_IMODE(mode) or 0o644,
        modified_s=modified_s,
        data=_data(archive, info),
    )


def _data(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Iterator[bytes]:
    """Never more bytes than the table of contents says: the library stops there, and the checksum is wrong then."""
    with _translated():
        file = archive.open(info)
    with file:
        while True:
            with _translated():
                block = file.read(READ_BYTES)
            if not block:
                return
            yield block


def _link(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> str:
    if info.file_size > MAX_NAME_BYTES:
        raise BadArchive(f"{info.filename[:200]!r} is a link of {info.file_size} bytes")
    return b"".join(_data(archive, info)).decode("utf-8", "surrogateescape")


def _modified(info: zipfile.ZipInfo) -> float:
    try:
        return time.mktime((*info.date_time, 0, 0, -1))
    except (ValueError, OverflowError):
        return 0.0
