"""Model files put together for a controller: sessions, tools, folders, and the door."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from corral.blobs.oci.credentials import DockerConfig
from corral.blobs.oci.registry import RegistryClient, RegistrySettings
from corral.blobs.store import BlobStore
from corral.blobs.transfer.fetcher import Fetcher
from corral.blobs.transfer.remote import HttpTimeouts, open_session
from corral.controller.files.door import DoorSettings, open_door
from corral.controller.files.fetches import FetchPace
from corral.controller.files.hub import HubSettings
from corral.controller.files.images import Images
from corral.controller.files.missing import Missing
from corral.controller.files.model_files import ModelFiles, Upkeep
from corral.controller.files.neighbours import Neighbours
from corral.controller.files.origins import Origins, OriginSettings
from corral.controller.files.packages import Packages
from corral.controller.files.sizes import FileSizes
from corral.controller.settings import ControllerSettings
from corral.controller.wiring.access import Trust
from corral.controller.wiring.runtime import Part, Runtime
from corral.gallery.pypi.find_locker import find_locker
from corral.gallery.pypi.pip import own_platform, own_python
from corral.gallery.pypi.wheel_sizes import WheelSizes


@dataclass(frozen=True)
class OpenedFiles:
    files: ModelFiles
    sizes: FileSizes
    url: str  # of the door, for workers; `{host}` is theirs to fill in
    parts: tuple[Part, ...]  # to be run


@asynccontextmanager
async def open_model_files(
    settings: ControllerSettings,
    runtime: Runtime,
    trust: Trust,
    registries: RegistrySettings,
    env: Mapping[str, str],
) -> AsyncIterator[OpenedFiles]:
    store, clock, tokens, active = runtime.store, runtime.clock, trust.ingress_tokens, trust.active_nodes
    data = settings.data.expanduser()
    # Where a person may put files for models to name, beside the definitions themselves.
    own = (settings.models.models_folder or data / "models").expanduser()
    async with open_session(HttpTimeouts(stall_s=settings.files.download_stall_s)) as session:
        blobs = BlobStore((settings.files.blobs or data / "blobs").expanduser(), Fetcher(clock=clock))
        locker = find_locker(env, cache_folder=data / "cache" / "uv", alone=True)
        origin_settings = _origin_settings(settings, own)
        origins = Origins(
            session,
            Packages(session, locker, WheelSizes(session), platform=own_platform(), python=own_python()),
            Images(
                RegistryClient(session, credentials=DockerConfig(env), settings=registries, clock=clock),
                platform=own_platform(),
            ),
            origin_settings,
        )
        door = DoorSettings(
            settings.files.blob_host,
            settings.files.blob_port,
            settings.files.blob_url,
            settings.files.blob_tls_cert,
            settings.files.blob_tls_key,
            moves=settings.files.blob_port_moves,
        )
        places = Neighbours(
            store,
            clock,
            own="",
            live_for_s=settings.runtime.lease_ttl_s,
            every_s=max(1.0, settings.runtime.lease_ttl_s / 3),
        )
        upkeep = Upkeep(folder=own, unused_s=settings.files.keep_blobs_s)
        files = ModelFiles(
            store, blobs, origins, tokens, clock, places=places, credential_of=active.credential, upkeep=upkeep
        )
        missing = Missing(files.bring_back)
        async with open_door(door, blobs, tokens.public_key, clock, active, coming=missing.coming) as url:
            places.own = url
            yield OpenedFiles(files, FileSizes(own, origin_settings.folders), url, (files, places, missing))


def fetch_pace(settings: ControllerSettings) -> FetchPace:
    return FetchPace(
        tell_s=settings.backends.progress_interval_s,
        first_retry_s=settings.backends.retry_first_s,
        last_retry_s=settings.backends.retry_cap_s,
    )


def _origin_settings(settings: ControllerSettings, own: Path) -> OriginSettings:
    return OriginSettings(
        folders=(own, *(Path(folder).expanduser() for folder in settings.files.file_folders)),
        hub=HubSettings(settings.files.huggingface_url, settings.files.huggingface_token),
    )
