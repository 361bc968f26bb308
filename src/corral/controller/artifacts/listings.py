"""The blobs of a source: which they are, and where each is fetched from.

A listing is stored as a file once it is known, so that a second worker needs neither the registry nor, for an archive
without a known digest, the archive's server, also after a restart of the controller.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec

from corral.blobs.digests import PREFIX, digest_of_parts
from corral.blobs.oci.documents import Descriptor
from corral.blobs.oci.registry import RegistryBlob, RegistryClient
from corral.blobs.progress import OnProgress
from corral.blobs.store import BlobStore
from corral.blobs.transfer.partial_file import ExpectedBlob
from corral.blobs.transfer.remote import Remote, UrlRemote
from corral.contract import sources
from corral.contract.codec import Message, Undecodable, always, decode, encode
from corral.contract.sources import Source, parse_reference
from corral.kit.errors import Invalid
from corral.kit.files import write_atomically
from corral.kit.log import get_log

log = get_log(__name__)

KINDS = (sources.OCI, sources.HTTP, sources.PYPI)  # other sources lie on the worker's own disk, or in the order itself
KEEP_UNUSED_S = 30 * 86400.0

HeadersFor = Callable[[str], Mapping[str, str]]


class ListedBlob(Message, frozen=True):
    digest: str = always(str)
    size_bytes: int = 0  # 0: unknown


class ArtifactListing(Message, frozen=True):
    digest: str = always(str)  # that inventories report
    content_digest: str = always(str)
    blobs: tuple[ListedBlob, ...] = always(tuple)


@dataclass(frozen=True)
class Origins:
    """Where blobs come from. `headers_for`: the headers that the server of a URL needs."""

    session: aiohttp.ClientSession
    registry: RegistryClient
    headers_for: HeadersFor

    def remote(self, source: Source, digest: str) -> Remote:
        """Raises Invalid for a digest that the source does not have."""
        match source.kind:
            case sources.OCI:
                return RegistryBlob(self.registry, parse_reference(source.uri), digest)
            case sources.HTTP:
                return self.url(source.uri)
            case sources.PYPI:
                for wheel in source.wheels:
                    if PREFIX + wheel.sha256 == digest:
                        return self.url(wheel.url)
        raise Invalid(f"{digest} is not a blob of {source.uri[:200]}")

    def url(self, url: str) -> UrlRemote:
        return UrlRemote(self.session, url, self.headers_for(url))


class Listings:
    def __init__(self, folder: Path, blobs: BlobStore, origins: Origins) -> None:
        self._folder = folder
        self._blobs = blobs
        self._origins = origins
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def find(self, key: str) -> ArtifactListing | None:
        """The stored listing. Blocking."""
        path = self._folder / key
        try:
            listing = decode(ArtifactListing, path.read_bytes())
            os.utime(path)
        except (OSError, Undecodable):
            return None
        return listing if listing.blobs else None

    def store(self, key: str, listing: ArtifactListing) -> None:
        """Blocking."""
        write_atomically(self._folder / key, encode(listing))

    def forget(self, key: str) -> None:
        """Blocking."""
        (self._folder / key).unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove listings that no worker has asked for in a long time. Blocking."""
        before = time.time() - KEEP_UNUSED_S
        for path in self._folder.iterdir():
            if path.stat().st_mtime < before:
                path.unlink(missing_ok=True)

    async def make(self, source: Source, platform: str, on_progress: OnProgress) -> ArtifactListing:
        """Ask the registry for the layers, or fetch the archive whose digest is not known. Raises what fetching
        raises."""
        match source.kind:
            case sources.OCI:
                return await self._list_image(source, platform)
            case sources.HTTP:
                return await self._list_archive(source, on_progress)
            case sources.PYPI:
                return _list_wheels(source)
        raise Invalid(f"{source.kind[:40]!r} sources are not fetched by the controller")

    async def _list_image(self, source: Source, platform: str) -> ArtifactListing:
        reference = source.uri
        if source.digest:  # the tag may point to another image by now
            parsed = parse_reference(source.uri)
            reference = f"{parsed.host}/{parsed.repository}@{source.digest}"
        image = await self._origins.registry.resolve(reference, platform)
        return ArtifactListing(image.digest, image.content_digest, tuple(map(_listed, image.layers)))

    async def _list_archive(self, source: Source, on_progress: OnProgress) -> ArtifactListing:
        digest, size = source.digest, source.size
        if not digest:
            blob = await self._blobs.obtain(self._origins.url(source.uri), ExpectedBlob(size=size), on_progress)
            digest, size = blob.digest, blob.size
        return ArtifactListing(digest, digest, (ListedBlob(digest, size),))


def listing_key(source: Source, platform: str, target: str) -> str:
    """Names the listing of a source. What an archive or a tag without a digest contains is found out once per `target`:
    all nodes of an operation get the same bytes, and the next operation reads the source again."""
    platform = platform if source.kind == sources.OCI else ""
    parts = (source.kind, source.uri, source.digest or target, platform, *(wheel.sha256 for wheel in source.wheels))
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


def _listed(layer: Descriptor) -> ListedBlob:
    return ListedBlob(layer.digest, layer.size)


def _list_wheels(source: Source) -> ArtifactListing:
    blobs = tuple(ListedBlob(PREFIX + wheel.sha256, wheel.size) for wheel in source.wheels)
    return ArtifactListing(source.digest, digest_of_parts("wheels", *(blob.digest for blob in blobs)), blobs)
