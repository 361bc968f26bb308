"""Answers a worker that asks for the artifacts of a source it was ordered to install.

The controller fetches only sources that it resolved itself and that belong to an order of the asking node: a worker
names a source, and the URLs and logins come from the controller's own database and settings.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import NamedTuple

from corral.blobs.store import BlobStore
from corral.contract.messages.artifacts import ArtifactBlob, ArtifactOffer, ArtifactRequest
from corral.contract.sources import Source, public_source
from corral.controller.artifacts.fetches import ArtifactFetches, SourceState
from corral.controller.artifacts.listings import KINDS, ListedBlob, listing_key
from corral.kit.errors import NotFound
from corral.kit.redact import redact_urls
from corral.store.engine.transactions import Store
from corral.store.records import IntentStage
from corral.store.tables import backend_intents, backend_rules, backend_targets

WAIT_S = 2.0  # for a listing, before the worker is told to ask again

SourcesFor = Callable[[str], tuple[tuple[str, ...], str]]


class OrderedSource(NamedTuple):
    source: Source  # with its logins
    target: str  # the id of the target it belongs to


class Artifacts:
    def __init__(self, store: Store, blobs: BlobStore, fetches: ArtifactFetches, sources_for: SourcesFor) -> None:
        """`sources_for`: the URLs of blob listeners for a node, and the token that opens them."""
        self._store = store
        self._blobs = blobs
        self._fetches = fetches
        self._sources_for = sources_for

    async def offer(self, node_id: str, request: ArtifactRequest) -> ArtifactOffer:
        """Raises NotFound if no order of this node has such a source."""
        if not request.wanted:  # the order may have been withdrawn by now: it is not looked up
            self._fetches.release(node_id, lambda source: _is_same(source, request))
            return ArtifactOffer()
        found = await self._find(node_id, request)
        key = listing_key(found.source, request.platform, found.target)
        state = self._fetches.want(key, found.source, request.platform, node_id)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WAIT_S):
                await state.listed.wait()
        return self._offer(node_id, state)

    async def _find(self, node_id: str, request: ArtifactRequest) -> OrderedSource:
        if request.kind in KINDS:
            for ordered in await self._ordered_sources(node_id):
                if _is_same(ordered.source, request):
                    return ordered
        raise NotFound(f"no order of this node has the source {request.uri[:200]}")

    async def _ordered_sources(self, node_id: str) -> list[OrderedSource]:
        async with self._store.read() as tx:
            intents = await backend_intents.list_(tx, [node_id])
            generations = {each.generation for each in intents if each.stage is not IntentStage.IDLE}
            rules = [rule for rule in await backend_rules.list_live(tx) if rule.generation in generations]
            targets = await backend_targets.list_for(tx, sorted({rule.target for rule in rules if rule.target}))
        return [
            OrderedSource(source, target.id)
            for target in targets
            if target.build is not None
            for source in target.build.sources
        ]

    def _offer(self, node_id: str, state: SourceState) -> ArtifactOffer:
        if state.listing is None:
            return ArtifactOffer(
                have_bytes=state.have_bytes, size_bytes=state.size_bytes, error=redact_urls(state.error)
            )
        urls, token = self._sources_for(node_id)
        return ArtifactOffer(
            digest=state.listing.digest,
            content_digest=state.listing.content_digest,
            blobs=tuple(self._blob(state, blob) for blob in state.listing.blobs),
            error=redact_urls(state.error),
            sources=urls,
            token=token,
        )

    def _blob(self, state: SourceState, blob: ListedBlob) -> ArtifactBlob:
        error = redact_urls(state.blob_errors.get(blob.digest, ""))
        if (stored := self._blobs.find(blob.digest)) is not None:
            return ArtifactBlob(blob.digest, stored.size, stored.size)
        incoming = self._blobs.find_incoming(blob.digest)
        have, size = (incoming.have, incoming.size) if incoming is not None else (0, 0)
        return ArtifactBlob(blob.digest, blob.size_bytes or size, have, error)


def _is_same(source: Source, request: ArtifactRequest) -> bool:
    public = public_source(source)
    if (public.kind, public.uri, public.digest) != (request.kind, request.uri, request.digest):
        return False
    return not public.platform or public.platform == request.platform
