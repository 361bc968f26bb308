"""Assembles the artifacts of backends that workers fetch through this controller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from corral.blobs.oci.registry import RegistryClient
from corral.blobs.serving.growing_file import GrowingFile
from corral.blobs.store import BlobStore
from corral.blobs.transfer.fetcher import Fetcher
from corral.contract.sources import HUB
from corral.controller.artifacts.cache import ArtifactCache, CacheLimits
from corral.controller.artifacts.fetches import ArtifactFetches
from corral.controller.artifacts.listings import HeadersFor, Listings, Origins
from corral.controller.artifacts.service import Artifacts, SourcesFor
from corral.controller.bundles.library import Bundles
from corral.controller.settings.models import FileSettings
from corral.controller.wiring.runtime import Part
from corral.kit.clock import Clock
from corral.store.engine.transactions import Store

FOLDER = "artifacts"  # beside the blobs of models


@dataclass(frozen=True)
class ArtifactParts:
    artifacts: Artifacts
    cache: ArtifactCache
    fetches: ArtifactFetches
    blobs: BlobStore
    origins: Origins

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.fetches, self.cache

    def find_growing(self, digest: str) -> GrowingFile | None:
        """A blob that is being fetched and whose size is known. Called in threads."""
        incoming = self.blobs.find_incoming(digest)
        if incoming is None or not incoming.size:
            return None
        return GrowingFile(incoming.path, incoming.size, lambda: self.blobs.find_incoming(digest) is not None)


def make_artifacts(
    settings: FileSettings,
    folder: Path,
    store: Store,
    session: aiohttp.ClientSession,
    registry: RegistryClient,
    sources_for: SourcesFor,
    clock: Clock,
    bundles: Bundles,
) -> ArtifactParts:
    """`folder`: of the blobs of models."""
    blobs = BlobStore(folder / FOLDER, Fetcher(clock=clock), base=bundles.blobs)
    cache = ArtifactCache(blobs, clock, CacheLimits(settings.artifacts_limit_bytes))
    origins = Origins(session, registry, _hub_headers(settings))
    listings = Listings(folder / FOLDER / "listings", blobs, origins)
    fetches = ArtifactFetches(blobs, listings, origins, cache, clock, find_bundled=bundles.find_listing)
    cache.wanted = fetches.wanted_digests
    return ArtifactParts(Artifacts(store, blobs, fetches, sources_for), cache, fetches, blobs, origins)


def _hub_headers(settings: FileSettings) -> HeadersFor:
    """The hub's token is shown to the hub and to no other server."""
    hubs = tuple(f"{url.rstrip('/')}/" for url in (settings.huggingface_url, HUB))

    def headers_for(url: str) -> Mapping[str, str]:
        if settings.huggingface_token and url.startswith(hubs):
            return {"Authorization": f"Bearer {settings.huggingface_token}"}
        return {}

    return headers_for
