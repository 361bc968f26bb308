"""Decompresses a stream into blocks. The first bytes tell the format, never the file name."""

from __future__ import annotations

import bz2
import importlib
import lzma
import zlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import BinaryIO, Protocol

from corral.blobs.errors import BadArchive

READ_BYTES = 256 << 10
MAX_BLOCK_BYTES = 1 << 20
XZ_MEMORY_BYTES = 512 << 20  # a stream may demand gigabytes of dictionary

GZIP = b"\x1f\x8b"
XZ = b"\xfd7zXZ\x00"
BZIP2 = b"BZh"
ZSTD = b"\x28\xb5\x2f\xfd"
ZIP = (b"PK\x03\x04", b"PK\x05\x06")


class Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


class _Decompressor(Protocol):
    """The common interface of bz2, lzma and zstd."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int = -1) -> bytes: ...


def decompress_blocks(file: Readable) -> Iterator[bytes]:
    """Blocks of the decompressed stream, each of a bounded size. Raises BadArchive."""
    head = file.read(len(XZ))
    blocks = _with_head(head, file)
    zstd = _zstd_module()
    damaged: tuple[type[Exception], ...] = (zlib.error, lzma.LZMAError, EOFError, ValueError)
    if zstd is not None:
        damaged += (zstd.ZstdError,)
    try:
        if head.startswith(GZIP):
            yield from _gunzip(blocks)
        elif head.startswith(XZ):
            yield from _unpack(blocks, lambda: lzma.LZMADecompressor(memlimit=XZ_MEMORY_BYTES), XZ)
        elif head.startswith(BZIP2):
            yield from _unpack(blocks, bz2.BZ2Decompressor, BZIP2)
        elif head.startswith(ZSTD):
            if zstd is None:
                raise BadArchive(
                    "the archive is compressed with zstd, which this Python does not support; Python 3.14 does"
                )
            yield from _unpack(blocks, zstd.ZstdDecompressor, ZSTD)
        else:
            yield from blocks
    except damaged as error:
        raise BadArchive(f"the compressed stream is damaged: {error}") from error
    except OSError as error:
        if error.errno is None:  # bz2 reports damaged data in this way
            raise BadArchive(f"the compressed stream is damaged: {error}") from error
        raise


def is_packed(file: BinaryIO) -> bool:
    """Whether the file as a whole is compressed. Seeks back to the beginning."""
    head = file.read(len(XZ))
    file.seek(0)
    return head.startswith((GZIP, XZ, BZIP2, ZSTD))


def can_unpack_zstd() -> bool:
    return _zstd_module() is not None


def _with_head(head: bytes, file: Readable) -> Iterator[bytes]:
    if head:
        yield head + file.read(READ_BYTES)
    while block := file.read(READ_BYTES):
        yield block


def _gunzip(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Uses zlib directly: ten times faster than the gzip module. Several members in a row are one stream."""
    stream = zlib.decompressobj(wbits=31)
    started = False
    for packed in blocks:
        while packed:
            if stream.eof:
                if not packed.startswith(GZIP[:1]):
                    return  # padding behind the last member, whose checksum was right
                stream = zlib.decompressobj(wbits=31)
            plain = stream.decompress(packed, MAX_BLOCK_BYTES)
            packed = stream.unconsumed_tail or stream.unused_data
            started = True
            if plain:
                yield plain
    if started and not stream.eof:
        raise BadArchive("the compressed stream ends too early")


def _unpack(blocks: Iterator[bytes], make: Callable[[], _Decompressor], magic: bytes) -> Iterator[bytes]:
    stream = make()
    for packed in blocks:
        while packed or not (stream.needs_input or stream.eof):
            if stream.eof:
                if not packed.startswith(magic[:1]):
                    return
                stream = make()
            plain = stream.decompress(packed, MAX_BLOCK_BYTES)
            packed = stream.unused_data if stream.eof else b""
            if plain:
                yield plain
    if not stream.eof:
        raise BadArchive("the compressed stream ends too early")


def _zstd_module() -> ModuleType | None:
    for name in ("compression.zstd", "backports.zstd"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None
