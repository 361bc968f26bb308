"""Assembles the model files of a controller: HTTP sessions, tools, folders, and the listener for workers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from corral.blobs.object_store import ObjectStore
from corral.blobs.oci.credentials import DockerConfig
from corral.blobs.oci.registry import RegistryClient, RegistrySettings
from corral.blobs.store import BlobStore
from corral.blobs.transfer.fetcher import Fetcher
from corral.blobs.transfer.remote import HttpTimeouts, open_session
from corral.blobs.upload import Uploads
from corral.controller.artifacts.fetches import ArtifactFetches
from corral.controller.artifacts.service import Artifacts
from corral.controller.bundles.library import Bundles
from corral.controller.distribution.packages import CorralPackages
from corral.controller.files.blob_listener import ControllerBlobUrls, open_blob_listener
from corral.controller.files.file_resolver import FileResolver, ResolverSettings
from corral.controller.files.hubs.hub import HubSettings
from corral.controller.files.images import Images
from corral.controller.files.missing_blobs import MissingBlobs
from corral.controller.files.model_cache import ModelCache, ModelCacheLimits
from corral.controller.files.model_files import FileRetention, ModelFiles
from corral.controller.files.packages import Packages
from corral.controller.files.shared_folder import SharedFolder
from corral.controller.files.sizes import FileSizes
from corral.controller.files.swarm.blob_peers import BlobPeers
from corral.controller.files.swarm.blob_tracker import BlobTracker
from corral.controller.files.swarm.stored_blobs import StoredBlobs, fleet_mark
from corral.controller.settings import ControllerSettings
from corral.controller.wiring.access import Trust
from corral.controller.wiring.artifacts import FOLDER as ARTIFACTS
from corral.controller.wiring.artifacts import make_artifacts
from corral.controller.wiring.runtime import Part, Runtime
from corral.gallery.pypi.find_locker import find_locker
from corral.gallery.pypi.pip import own_platform, own_python
from corral.gallery.pypi.wheel_sizes import WheelSizes


@dataclass(frozen=True)
class OpenedFiles:
    files: ModelFiles
    artifacts: Artifacts
    artifact_fetches: ArtifactFetches
    artifact_blobs: BlobStore
    blobs: BlobStore  # of models
    sizes: FileSizes
    session: aiohttp.ClientSession  # for the hub and other servers
    resolver: FileResolver
    hub: HubSettings
    uploads: Uploads
    packages: CorralPackages
    url: str  # of the listener, for workers, which fill in `{host}`
    peers: BlobPeers
    parts: tuple[Part, ...]  # to be run


@asynccontextmanager
async def open_model_files(
    settings: ControllerSettings,
    runtime: Runtime,
    trust: Trust,
    registries: RegistrySettings,
    env: Mapping[str, str],
    bundles: Bundles,
) -> AsyncIterator[OpenedFiles]:
    store, clock, tokens, active = runtime.store, runtime.clock, trust.ingress_tokens, trust.active_nodes
    data = settings.data.expanduser()
    # Users may put model files beside the definitions.
    own = (settings.models.models_folder or data / "models").expanduser()
    async with open_session(HttpTimeouts(stall_s=settings.files.download_stall_s)) as session:
        folder = blobs_folder(settings)
        blobs = BlobStore(folder, Fetcher(clock=clock), base=bundles.blobs)
        registry = RegistryClient(session, credentials=DockerConfig(env), settings=registries, clock=clock)
        locker = find_locker(env, cache_folder=data / "cache" / "uv", alone=True)
        resolver_settings = _resolver_settings(settings, own)
        resolver = FileResolver(
            session,
            Packages(session, locker, WheelSizes(session), platform=own_platform(), python=own_python()),
            Images(registry, platform=own_platform()),
            resolver_settings,
        )
        blob_urls = ControllerBlobUrls(
            store,
            clock,
            own="",
            live_for_s=settings.runtime.lease_ttl_s,
            every_s=max(1.0, settings.runtime.lease_ttl_s / 3),
        )
        retention = FileRetention(folder=own, unused_s=settings.files.keep_blobs_s)
        cache = ModelCache(store, blobs, clock, ModelCacheLimits(int(settings.files.cache_limit)))
        files = ModelFiles(
            store,
            blobs,
            resolver,
            tokens,
            clock,
            blob_urls=blob_urls,
            credential_of=active.credential,
            retention=retention,
            cache=cache,
            list_bundled=bundles.list_files,
            shared=SharedFolder(own) if settings.replicas.shared_models else None,
        )
        missing = MissingBlobs(files.refetch)
        artifacts = make_artifacts(settings.files, folder, store, session, registry, files.sources_for, clock, bundles)
        packages = CorralPackages(
            artifacts.fetches,
            artifacts.blobs,
            artifacts.origins,
            locker,
            WheelSizes(session),
            folder / ARTIFACTS / "corral",
            trust.ca.fingerprint if trust.ca is not None and not trust.gateways.depends_on_name else "",
            find_bundled=bundles.find_packages,
        )
        async with open_blob_listener(
            settings.files,
            blobs,
            tokens.public_key,
            clock,
            active,
            is_expected=lambda digest: artifacts.fetches.is_expected(digest) or missing.is_expected(digest),
            find=lambda digest: cache.find(digest) or artifacts.cache.find(digest),
            find_growing=artifacts.find_growing,
            list_chunks=lambda digest: (artifacts.blobs if artifacts.blobs.find(digest) else blobs).chunk_list(digest),
        ) as url:
            blob_urls.own = url
            stored = _stored_blobs(settings, blobs, runtime, tokens.public_key)
            peers = BlobPeers(
                BlobTracker(),
                tokens,
                active,
                runtime.bus,
                clock,
                ca_pem=trust.ca_pem,
                find_stored=stored.find_url if stored is not None else lambda _digest: "",
            )
            yield OpenedFiles(
                files,
                artifacts.artifacts,
                artifacts.fetches,
                artifacts.blobs,
                blobs,
                FileSizes(own, resolver_settings.folders),
                session,
                resolver,
                resolver_settings.hub,
                Uploads(blobs, max_bytes=settings.files.upload_limit_bytes),
                packages,
                url,
                peers,
                (files, cache, blob_urls, missing, peers, packages, *artifacts.parts, *((stored,) if stored else ())),
            )


def _stored_blobs(
    settings: ControllerSettings, blobs: BlobStore, runtime: Runtime, public_key: str
) -> StoredBlobs | None:
    if not settings.storage.is_configured:
        return None
    return StoredBlobs(ObjectStore(settings.storage), blobs, runtime.store, runtime.clock, fleet=fleet_mark(public_key))


def blobs_folder(settings: ControllerSettings) -> Path:
    return (settings.files.blobs or settings.data.expanduser() / "blobs").expanduser()


def _resolver_settings(settings: ControllerSettings, own: Path) -> ResolverSettings:
    return ResolverSettings(
        folders=(own, *(Path(folder).expanduser() for folder in settings.files.file_folders)),
        hub=HubSettings(
            settings.files.huggingface_url,
            settings.files.huggingface_token,
            modelscope_url=settings.files.modelscope_url,
            modelscope_token=settings.files.modelscope_token,
            prefers_modelscope=settings.files.model_hub == "modelscope",
        ),
    )
