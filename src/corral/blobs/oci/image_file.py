"""An image in a local tar file: the output of `docker save`, and OCI layouts. Blocking: call it in a thread.

Layers are read from the file directly, without a copy, and checked against the digests inside the file: the file may
have been copied incompletely.
"""

from __future__ import annotations

import hashlib
import posixpath
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO

import msgspec

from corral.blobs.archives.decompress import decompress_blocks
from corral.blobs.archives.entries import Entry
from corral.blobs.archives.tar import read_tar
from corral.blobs.digests import PREFIX, digest_of
from corral.blobs.errors import BadArchive, WrongDigest
from corral.blobs.oci.documents import (
    Descriptor,
    Index,
    Manifest,
    check_platform,
    choose_image,
    read_config,
    read_document,
    read_layout,
)

READ_BYTES = 256 << 10
MAX_MEMBERS = 20_000
MAX_DOCUMENT_BYTES = 4 << 20


class _Saved(msgspec.Struct, frozen=True, rename="pascal"):
    config: str
    layers: tuple[str, ...] = ()


@dataclass(frozen=True)
class FileLayer:
    member: tarfile.TarInfo
    digest: str = ""  # of the bytes in the file
    diff_id: str = ""  # of the decompressed layer


class ImageFile:
    """An image file, opened for one platform. Raises BadArchive, NoBuild, WrongDigest."""

    def __init__(self, file: BinaryIO, platform: str, name: str) -> None:
        self._name = name
        try:
            self._tar = tarfile.open(fileobj=file, mode="r:")  # noqa: SIM115 - the caller closes `file`
            self._members = dict(self._read_members())
        except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:
            raise BadArchive(f"{name} is not an image in a tar file: {error}") from error
        if "index.json" in self._members:
            self.layers = self._from_layout(platform)
        elif "manifest.json" in self._members:
            self.layers = self._from_saved(platform)
        else:
            raise BadArchive(f"{name} contains neither index.json nor manifest.json: it is not an image")

    @property
    def size_bytes(self) -> int:
        return sum(layer.member.size for layer in self.layers)

    def entries(self, layer: FileLayer) -> Iterator[Entry]:
        """The layer's entries. Raises WrongDigest at the end if the layer does not have its digest."""
        source = self._tar.extractfile(layer.member)
        if source is None:
            raise BadArchive(f"{self._name}: {layer.member.name[:200]!r} is not a file")
        packed = _HashingReader(source)
        plain = hashlib.sha256()
        blocks = _hash_blocks(decompress_blocks(packed), plain)
        yield from read_tar(blocks)
        for _ in blocks:  # the digests include the padding
            pass
        packed.drain()
        for wanted, got in ((layer.digest, packed.digest), (layer.diff_id, PREFIX + plain.hexdigest())):
            if wanted and wanted != got:
                raise WrongDigest(f"{self._name}: a layer is {got}, not {wanted}")

    def _read_members(self) -> Iterator[tuple[str, tarfile.TarInfo]]:
        for number, member in enumerate(self._tar):
            if number > MAX_MEMBERS:
                raise BadArchive(f"{self._name} contains more than {MAX_MEMBERS} files: it is not an image")
            yield posixpath.normpath(member.name), member

    def _from_layout(self, platform: str) -> tuple[FileLayer, ...]:
        described = read_layout(self._read("index.json"), self._name)
        manifest = self._manifest(described, platform)
        return tuple(FileLayer(self._find(_blob(layer.digest)), digest=layer.digest) for layer in manifest.layers)

    def _manifest(self, described: tuple[Descriptor, ...], platform: str) -> Manifest:
        named = tuple((str(each.platform), each) for each in described if each.platform is not None)
        if len(described) == 1:
            chosen = described[0]
        elif named:
            chosen = choose_image(Index("", named), platform, self._name)
        else:
            raise BadArchive(f"{self._name} contains {len(described)} images without platforms")
        document = self._document(chosen)
        if isinstance(document, Index):
            document = self._document(choose_image(document, platform, self._name))
            if isinstance(document, Index):
                raise BadArchive(f"{self._name} contains an index of indexes")
        else:
            check_platform(read_config(self._read(_blob(document.config.digest)), self._name), platform, self._name)
        return document

    def _document(self, descriptor: Descriptor) -> Index | Manifest:
        body = self._read(_blob(descriptor.digest))
        if digest_of(body) != descriptor.digest:
            raise WrongDigest(f"{self._name}: a manifest is {digest_of(body)}, not {descriptor.digest}")
        return read_document(body, descriptor.digest, self._name)

    def _from_saved(self, platform: str) -> tuple[FileLayer, ...]:
        try:
            images = msgspec.json.decode(self._read("manifest.json"), type=tuple[_Saved, ...])
        except msgspec.MsgspecError as error:
            raise BadArchive(f"{self._name}: manifest.json cannot be read: {error}") from error
        if len(images) != 1:
            raise BadArchive(f"{self._name} contains {len(images)} images; save exactly one")
        config = read_config(self._read(images[0].config), self._name)
        check_platform(config, platform, self._name)
        names, diff_ids = images[0].layers, config.rootfs.diff_ids
        if len(names) != len(diff_ids):
            raise BadArchive(f"{self._name} has {len(names)} layers, but its config lists {len(diff_ids)}")
        return tuple(FileLayer(self._find(name), diff_id=diff) for name, diff in zip(names, diff_ids, strict=True))

    def _find(self, name: str) -> tarfile.TarInfo:
        member = self._members.get(posixpath.normpath(name))
        if member is not None and member.issym():  # older versions store a layer once and link to it
            target = posixpath.normpath(posixpath.join(posixpath.dirname(member.name), member.linkname))
            member = self._members.get(target)
        if member is None or not member.isreg():
            raise BadArchive(f"{self._name} has no {name[:200]!r}")
        return member

    def _read(self, name: str) -> bytes:
        member = self._find(name)
        if member.size > MAX_DOCUMENT_BYTES:
            raise BadArchive(f"{self._name}: {name[:200]!r} has {member.size} bytes")
        source = self._tar.extractfile(member)
        return source.read() if source is not None else b""


@contextmanager
def open_image_file(path: Path, platform: str) -> Iterator[ImageFile]:
    with path.open("rb") as file:
        yield ImageFile(file, platform, path.name)


def _blob(digest: str) -> str:
    return "blobs/" + digest.replace(":", "/", 1)


def _hash_blocks(blocks: Iterator[bytes], whole: hashlib._Hash) -> Iterator[bytes]:
    for block in blocks:
        whole.update(block)
        yield block


class _HashingReader:
    """A file that hashes its bytes while they are read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = hashlib.sha256()

    @property
    def digest(self) -> str:
        return PREFIX + self._hash.hexdigest()

    def read(self, size: int) -> bytes:
        block = self._file.read(size)
        self._hash.update(block)
        return block

    def drain(self) -> None:
        while self.read(READ_BYTES):
            pass
