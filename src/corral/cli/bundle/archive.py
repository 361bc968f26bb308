"""The archive of a bundle: a plain tar with the manifest first, then its blobs in their order, and nothing else.

    corral-bundle/<64 hex>.json  named by its SHA-256, which is the digest of the bundle
    blobs/sha256/<64 hex>        one for each blob of the manifest

Only these members are accepted, as ordinary files of the expected size. No name of the archive becomes a path.
"""

from __future__ import annotations

import hashlib
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from corral.cli.common.output import OnBytes
from corral.contract.bundles import (
    MAX_DOCUMENT_BYTES,
    BundledBlob,
    BundleManifest,
    digest_of_bundle,
    read_manifest,
)
from corral.kit.errors import Invalid
from corral.kit.threads import StopToken

MANIFESTS = "corral-bundle/"
FOLDER = "blobs/sha256/"
RECORD = tarfile.BLOCKSIZE
BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class BundleArchive:
    path: Path
    document: bytes
    manifest: BundleManifest
    offsets: dict[str, int]  # by digest: where the blob's bytes begin

    @property
    def digest(self) -> str:
        return digest_of_bundle(self.document)


def open_archive(path: Path) -> BundleArchive:
    """Reads the manifest and the heads of all members; `verify` reads the blobs. Raises Invalid."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = _read_head(file, path)
            if not head.name.startswith(MANIFESTS) or not 0 < head.size <= MAX_DOCUMENT_BYTES:
                raise Invalid(f"{path} is no bundle: it does not begin with a manifest")
            document = file.read(head.size)
            if len(document) < head.size:
                raise _truncated(path)
            if head.name != manifest_name(document):
                raise Invalid(f"{path} is damaged: its manifest has another hash; copy or create the bundle again")
            manifest = read_manifest(document)
            offsets = dict(_find_blobs(file, path, manifest, RECORD + _padded(head.size), size))
    except OSError as error:
        raise Invalid(f"{path} cannot be read: {error.strerror}") from error
    return BundleArchive(path, document, manifest, offsets)


def verify(archive: BundleArchive, on_bytes: OnBytes, stop: StopToken) -> None:
    """Blocking. Raises Invalid for the first blob with another hash."""
    done = 0
    with archive.path.open("rb") as file:
        for blob in archive.manifest.blobs:
            file.seek(archive.offsets[blob.digest])
            found, left = hashlib.sha256(), blob.size_bytes
            while left and (block := file.read(min(BLOCK_BYTES, left))):
                stop.check()
                found.update(block)
                left -= len(block)
                done += len(block)
                on_bytes(done)
            if left or f"sha256:{found.hexdigest()}" != blob.digest:
                raise Invalid(
                    f"{archive.path} is damaged: the content of {FOLDER}{blob.digest.removeprefix('sha256:')} has "
                    "another hash; copy or create the bundle again"
                )


def head_of(name: str, size: int) -> bytes:
    """The tar record before the bytes of a member. The same for the same content."""
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o644
    return member.tobuf(tarfile.GNU_FORMAT)


def manifest_name(document: bytes) -> str:
    return f"{MANIFESTS}{digest_of_bundle(document).removeprefix('sha256:')}.json"


def name_of(blob: BundledBlob) -> str:
    return FOLDER + blob.digest.removeprefix("sha256:")


def padding_of(size: int) -> bytes:
    return bytes(_padded(size) - size)


END = bytes(2 * RECORD)


def _find_blobs(file: BinaryIO, path: Path, manifest: BundleManifest, at: int, size: int) -> Iterator[tuple[str, int]]:
    for blob in manifest.blobs:
        file.seek(at)
        head = _read_head(file, path)
        if (head.name, head.size) != (name_of(blob), blob.size_bytes):
            raise Invalid(f"{path} is damaged: {head.name[:100]!r} is not the next blob of its manifest")
        yield blob.digest, at + RECORD
        at += RECORD + _padded(blob.size_bytes)
        if at > size:
            raise _truncated(path)
    file.seek(at)
    if len(end := file.read(len(END))) < len(END):
        raise _truncated(path)
    if end != END or file.read(1):
        raise Invalid(f"{path} is damaged: it has more members than its manifest")


def _read_head(file: BinaryIO, path: Path) -> tarfile.TarInfo:
    record = file.read(RECORD)
    if 0 < len(record) < RECORD or not record:
        raise _truncated(path)
    try:
        head = tarfile.TarInfo.frombuf(record, "utf-8", "strict")
    except (tarfile.HeaderError, ValueError) as error:
        raise Invalid(f"{path} is no bundle, or is damaged: {error}") from error
    if head.type != tarfile.REGTYPE or head.size < 0:
        raise Invalid(f"{path} is no bundle: {head.name[:100]!r} is not an ordinary file")
    return head


def _truncated(path: Path) -> Invalid:
    return Invalid(f"{path} is not complete: copy or create the bundle again")


def _padded(size: int) -> int:
    return -(-size // RECORD) * RECORD
