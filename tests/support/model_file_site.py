"""A controller's model files, with a server of files, an index of one package and a node that may fetch them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from corral.blobs.disk import DiskSpace
from corral.blobs.oci.registry import RegistryClient, RegistrySettings
from corral.blobs.progress import Progress
from corral.blobs.store import BlobStore
from corral.blobs.transfer.fetcher import Fetcher, FetchLimits
from corral.blobs.transfer.remote import open_session
from corral.contract.models import Definition, read_definition
from corral.contract.sources import Wheel
from corral.controller.access.active_nodes import ActiveNodes
from corral.controller.access.signing import IngressTokens, open_ingress_tokens
from corral.controller.files.blob_listener import ControllerBlobUrls
from corral.controller.files.file_resolver import FileResolver, ResolverSettings
from corral.controller.files.hubs.hub import HubSettings
from corral.controller.files.images import Images
from corral.controller.files.model_cache import ModelCache, ModelCacheLimits
from corral.controller.files.model_files import FileRetention, ModelFiles
from corral.controller.files.packages import Packages
from corral.gallery.pypi.lock import Lock
from corral.kit.clock import SystemClock
from corral.kit.errors import NotFound
from corral.store import Store, open_store
from corral.store.tables import model_files, models, nodes
from corral.store.tables.models import StoredModel
from tests.integration.store.rows import a_node
from tests.support.blob_server import BlobServer
from tests.support.sqlite import sqlite_url

WEIGHTS = os.urandom(1_500_000)
DIGEST = "sha256:" + hashlib.sha256(WEIGHTS).hexdigest()
QUICK = FetchLimits(tries=9, first_wait_s=0.01, cap_wait_s=0.1)


class OneWheel:
    """An index of one package, whose wheel a server has."""

    def __init__(self) -> None:
        self.wheel: Wheel | None = None
        self.asked: list[str] = []

    async def lock(self, requirement: str, *, platform: str, python: str) -> Lock:
        self.asked.append(requirement)
        if self.wheel is None:
            raise NotFound(f"{requirement} cannot be had")
        pinned = f"{self.wheel.project}=={self.wheel.version}"
        return Lock(pinned, self.wheel.version, python, (self.wheel,))

    async def lock_pinned(self, requirements: str, *, platform: str, python: str) -> tuple[Wheel, ...]:
        return (await self.lock(requirements, platform=platform, python=python)).wheels

    async def fill(self, wheels: tuple[Wheel, ...]) -> tuple[Wheel, ...]:
        return wheels


@dataclass
class Site:
    folder: Path
    store: Store
    blobs: BlobStore
    server: BlobServer
    index: OneWheel
    tokens: IngressTokens
    session: aiohttp.ClientSession
    active: ActiveNodes
    free: int = 100 << 30
    told: list[Progress] = field(default_factory=list)
    hub: str = "http://hub.invalid"
    hub_token: str = ""
    blob_urls: ControllerBlobUrls | None = None
    cache: ModelCache = field(init=False)

    def __post_init__(self) -> None:
        self.measure: Callable[[], int] = lambda: self.free

    def files(self, folder: str = "blobs", *, limits: ModelCacheLimits | None = None) -> ModelFiles:
        """Another `folder` is another controller."""
        self.blobs = BlobStore(self.folder / folder, Fetcher(QUICK))
        blob_urls = self.blob_urls or ControllerBlobUrls(self.store, SystemClock(), own="", live_for_s=1.0, every_s=1.0)
        registry = RegistryClient(self.session, settings=RegistrySettings(tries=1))
        resolver = FileResolver(
            self.session,
            Packages(self.session, self.index, self.index, platform="linux/amd64", python="3.11"),
            Images(registry, platform="linux/amd64"),
            ResolverSettings(
                folders=(self.folder / "open", self.folder / "models"), hub=HubSettings(self.hub, self.hub_token)
            ),
        )
        disk = DiskSpace(reserve_bytes=0, measure=lambda _folder: self.measure())
        retention = FileRetention(folder=self.folder / "models", unused_s=100.0)
        self.cache = ModelCache(self.store, self.blobs, SystemClock(), limits, disk=disk)
        return ModelFiles(
            self.store,
            self.blobs,
            resolver,
            self.tokens,
            SystemClock(),
            blob_urls=blob_urls,
            credential_of=self.active.credential,
            disk=disk,
            retention=retention,
            cache=self.cache,
        )

    async def install(self, **words: Any) -> Definition:
        definition = read_definition({"name": "m", "backend": "tiny"} | words)
        async with self.store.write() as tx:
            now = await tx.now()
            await models.put(
                tx,
                StoredModel(
                    id=definition.name,
                    definition=definition.whole,
                    revision=definition.revision,
                    origin="person",
                    created_at=now,
                    updated_at=now,
                ),
            )
        return definition

    async def rows(self) -> dict[str, tuple[str, str]]:
        async with self.store.read() as tx:
            return {row.path: (row.resolved, row.digest) for row in await model_files.list_(tx)}


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    for name in ("open", "models"):
        (tmp_path / name).mkdir()
    async with (
        open_store(sqlite_url(tmp_path)) as store,
        open_session(inside=True) as session,
        BlobServer() as server,
    ):
        tokens = await open_ingress_tokens(store, SystemClock())
        async with store.write() as tx:
            await nodes.insert(tx, a_node(id="node-1", name="barn", token_hash="ab" * 32, approved=True))
        active = ActiveNodes(store, SystemClock())
        await active.refresh()
        yield Site(tmp_path, store, BlobStore(tmp_path / "blobs"), server, OneWheel(), tokens, session, active)


def listed(*files: tuple[str, str], **more: str) -> dict[str, Any]:
    return {"download_files": [{"filename": path, "uri": uri} | more for path, uri in files]}
