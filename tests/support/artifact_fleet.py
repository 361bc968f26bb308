"""The artifacts of a controller in this process, on a real database and with a real blob listener, and workers that
install through it.

async with open_site(tmp_path) as site:
    await site.order("barn", source)
    async with site.worker("barn") as barn:
        await barn.install(source)
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from corral.blobs.contents import Contents
from corral.blobs.oci.credentials import FixedLogins
from corral.blobs.oci.registry import RegistryClient, RegistrySettings
from corral.blobs.progress import Progress
from corral.blobs.serving.server import BlobListener, Refusal
from corral.blobs.sources.context import SourceContext
from corral.blobs.store import BlobStore
from corral.blobs.transfer.fetcher import Fetcher
from corral.blobs.transfer.remote import HttpTimeouts, open_session
from corral.contract.messages.artifacts import ArtifactOffer, ArtifactRequest
from corral.contract.sources import Source, public_source
from corral.controller.artifacts.cache import ArtifactCache, CacheLimits
from corral.controller.artifacts.fetches import ArtifactFetches, ArtifactPace
from corral.controller.artifacts.listings import Listings, Origins
from corral.controller.artifacts.service import Artifacts
from corral.controller.bundles.library import Bundles
from corral.controller.wiring.artifacts import ArtifactParts
from corral.kit.clock import SystemClock
from corral.kit.errors import Unreachable
from corral.kit.tasks import background
from corral.store import Store, open_store
from corral.store.records import TargetBuild
from corral.store.tables import backend_intents, backend_rules, backend_targets, nodes
from corral.worker.files.fleet_blobs import FleetBlobs
from corral.worker.files.fleet_sources import FleetSources, OfferPace
from tests.integration.store.rows import a_node, a_rule, a_target, an_intent
from tests.support.installing import LIMITS, ROOM, open_source_context
from tests.support.processes import free_port

TOKEN = "good"
QUICK = OfferPace(ask_again_s=0.05, renew_s=0.2, patience_s=5.0)


@dataclass
class ArtifactSite:
    """One controller's artifacts. `close` and `open` again: it was killed and restarted."""

    folder: Path
    store: Store
    logins: FixedLogins | None
    pace: ArtifactPace
    limits: CacheLimits
    bundles: Bundles | None = None
    port: int = field(default_factory=free_port)
    parts: ArtifactParts | None = None
    heard: list[tuple[str, ArtifactRequest]] = field(default_factory=list)  # what workers asked
    sent: list[ArtifactOffer] = field(default_factory=list)  # and what they were answered
    _stack: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)

    async def open(self) -> None:
        clock = SystemClock()
        session = await self._stack.enter_async_context(open_session(HttpTimeouts(connect_s=20.0, stall_s=20.0)))
        registry = RegistryClient(session, credentials=self.logins, settings=RegistrySettings(first_wait_s=0.01))
        base = self.bundles.blobs if self.bundles is not None else None
        blobs = BlobStore(self.folder / "artifacts", Fetcher(LIMITS, space=ROOM), base=base)
        origins = Origins(session, registry, lambda _url: {})
        cache = ArtifactCache(blobs, clock, self.limits, disk=ROOM)
        listings = Listings(self.folder / "artifacts" / "listings", blobs, origins)
        find_bundled = self.bundles.find_listing if self.bundles is not None else lambda _source, _platform: None
        fetches = ArtifactFetches(blobs, listings, origins, cache, clock, self.pace, find_bundled=find_bundled)
        cache.wanted = fetches.wanted_digests
        url = f"http://127.0.0.1:{self.port}"
        artifacts = Artifacts(self.store, blobs, fetches, lambda _node: ((url,), TOKEN))
        self.parts = ArtifactParts(artifacts, cache, fetches, blobs, origins)
        listener = await self._stack.enter_async_context(
            BlobListener(
                cache.find,
                lambda shown: None if shown == f"Bearer {TOKEN}" else Refusal(401, "no"),
                find_growing=self.parts.find_growing,
                is_expected=fetches.is_expected,
                list_chunks=blobs.chunk_list,
            )
        )
        await listener.listen("127.0.0.1", self.port)
        await self._stack.enter_async_context(background(fetches.run()))

    async def close(self) -> None:
        self.parts = None
        await self._stack.aclose()

    @property
    def opened(self) -> ArtifactParts:
        assert self.parts is not None
        return self.parts

    async def order(self, node: str, *sources: Source, target: str = "t") -> None:
        """As the reconciler writes it before it sends the order."""
        async with self.store.write() as tx:
            if await nodes.find(tx, node) is None:
                await nodes.insert(tx, a_node(id=node, name=node))
            rule = next((each for each in await backend_rules.list_live(tx) if each.target == target), None)
            if rule is None:
                rule = a_rule(target=target, backend=target)
                await backend_rules.insert(tx, rule)
                await backend_targets.add(tx, [a_target(id=target, build=TargetBuild("build", sources=sources))])
            await backend_intents.put(tx, [an_intent(node, target, generation=rule.generation, stage="sent")])

    @contextlib.asynccontextmanager
    async def worker(self, node: str, *, is_old_controller: bool = False) -> AsyncIterator[ArtifactWorker]:
        async def ask(request: ArtifactRequest) -> ArtifactOffer:
            if self.parts is None:
                raise Unreachable("the controller is away")
            self.heard.append((node, request))
            offer = await self.parts.artifacts.offer(node, request)
            self.sent.append(offer)
            return offer

        folder = self.folder / node
        async with open_source_context(folder) as context, open_session(inside=True) as session:
            sources = FleetSources(ask, FleetBlobs(session), SystemClock(), pace=QUICK)
            provider = None if is_old_controller else sources
            yield ArtifactWorker(folder, replace(context, provider=provider, anonymous_registry=context.registry))


@dataclass
class ArtifactWorker:
    folder: Path
    context: SourceContext
    told: list[Progress] = field(default_factory=list)

    async def install(self, source: Source) -> str:
        """Fetch and unpack what an order for this source names. Returns the digest."""
        contents, target = Contents(self.context), self.folder / "installed"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        async with contents.open(public_source(source), self.told.append) as opened:
            await opened.write_to(target, self.told.append)
        contents.discard(opened)
        return opened.digest

    def read(self, name: str) -> bytes:
        return (self.folder / "installed" / name).read_bytes()


@contextlib.asynccontextmanager
async def open_site(
    folder: Path,
    *,
    logins: FixedLogins | None = None,
    pace: ArtifactPace | None = None,
    limits: CacheLimits | None = None,
    bundles: Bundles | None = None,
) -> AsyncIterator[ArtifactSite]:
    pace = pace or ArtifactPace(retry_after_s=0.2, check_every_s=0.05)
    async with open_store(f"sqlite:///{folder}/corral.db") as store:
        site = ArtifactSite(folder, store, logins, pace, limits or CacheLimits(), bundles)
        await site.open()
        try:
            yield site
        finally:
            await site.close()


async def install_everywhere(site: ArtifactSite, source: Source, *names: str) -> None:
    """At once, each with an order of its own."""

    async def one(name: str) -> None:
        await site.order(name, source)
        async with site.worker(name) as worker:
            await worker.install(source)

    async with asyncio.TaskGroup() as tasks:
        for name in names:
            tasks.create_task(one(name))
