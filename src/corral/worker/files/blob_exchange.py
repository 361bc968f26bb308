"""Finds other workers with the blobs that this one is downloading: announces to the controller what is here and what is
wanted, and offers the workers that the controller names to the downloads.

The controller's answer is a hint. Without one (the controller is away, or older than this call) a download uses the
controllers' blob listeners alone, without restriction.
"""

from __future__ import annotations

import contextlib
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from corral.blobs.store import BlobStore
from corral.blobs.swarm.chunk_set import decode_chunks
from corral.blobs.swarm.download import SwarmDownload
from corral.blobs.swarm.planner import SourceKind
from corral.blobs.swarm.rate_limit import RateLimit
from corral.blobs.swarm.sources import HttpSource
from corral.contract.messages.blobs import AnnounceBlobs, BlobHints, BlobPeer, BlobSources
from corral.kit.clock import Clock
from corral.kit.errors import CorralError, Denied, Invalid
from corral.kit.log import get_log
from corral.kit.tasks import Wake
from corral.kit.threads import run_uncancelled
from corral.worker.files.served_blobs import ServedBlobs

log = get_log(__name__)

FULL_EVERY_S = 60.0  # so often all finished blobs are announced
MIN_INTERVAL_S = 0.2
DEFAULT_INTERVAL_S = 0.5
RETRY_S = 5.0  # after a failed announcement
STORAGE = "object storage"  # the name of that source

Announce = Callable[[AnnounceBlobs], Awaitable[BlobHints | None]]  # None: this worker has not joined a cluster


@dataclass
class PeerToken:
    """The latest token for one peer and one blob."""

    token: str

    async def authorize(self, is_refused: bool) -> Mapping[str, str]:
        if is_refused:
            raise Denied("the peer refused the token")
        return {"Authorization": f"Bearer {self.token}"}


async def _no_credentials(is_refused: bool) -> Mapping[str, str]:
    if is_refused:
        raise Denied("the object storage refused the signed URL")
    return {}


class PeerExchange:
    def __init__(
        self,
        served: ServedBlobs,
        session: aiohttp.ClientSession,
        announce: Announce,
        clock: Clock,
        *,
        max_download: RateLimit,
        storage_ca: Path | None = None,
    ) -> None:
        """`storage_ca`: a CA of the object storage, in addition to those of the system."""
        self._served = served
        self._session = session
        self._announce = announce
        self._clock = clock
        self._max_download = max_download
        self._storage_ca = storage_ca
        self._storage_trust: ssl.SSLContext | None = None
        self._wake = Wake()
        self._full_s = float("-inf")
        self._tokens: dict[tuple[str, str], PeerToken] = {}  # by peer and digest
        self._trust: tuple[str, ssl.SSLContext | bool] = ("", True)

    @contextlib.asynccontextmanager
    async def take_part(self, download: SwarmDownload, store: BlobStore) -> AsyncIterator[None]:
        """Offer peers to the download, and its chunks to peers, while the block runs."""
        self._served.add_store(store)
        download.on_chunk = lambda: self._on_chunk(download)
        # Until the first answer nothing is requested: nodes that start together would all begin with the same chunks.
        download.assign([], is_unrestricted=False)
        with self._served.downloading(download):
            self._wake.set()
            try:
                yield
            finally:
                self._tokens = {key: token for key, token in self._tokens.items() if key[1] != download.digest}

    def announce_soon(self) -> None:
        """Announce all blobs: one was stored, or the connection to the cluster is new."""
        self._full_s = float("-inf")
        self._wake.set()

    async def run(self) -> None:
        """Announce for ever."""
        wait_s = 0.0
        while True:
            await self._wake.wait(wait_s if self._served.downloads or wait_s == RETRY_S else FULL_EVERY_S)
            try:
                wait_s = await self.run_once()
            except CorralError as error:
                log.info("blobs could not be announced", reason=error.message)
                self._full_s = float("-inf")
                self._use_controllers()
                wait_s = RETRY_S
            except Exception:
                log.exception("announcing blobs failed")
                self._use_controllers()
                wait_s = RETRY_S
            await self._clock.sleep(MIN_INTERVAL_S)

    async def run_once(self) -> float:
        """Announce, and apply the answer. Returns when to announce again while blobs are wanted."""
        downloads = dict(self._served.downloads)
        is_full = self._clock.monotonic() - self._full_s >= FULL_EVERY_S
        if is_full:
            self._full_s = self._clock.monotonic()
        finished = await run_uncancelled(self._served.finished) if is_full else {}
        have = finished | {digest: each.have.encode() for digest, each in downloads.items()}
        want = {digest: each.have.count for digest, each in downloads.items()}
        message = AnnounceBlobs(have=have, want=want, is_full=is_full, free_slots=self._served.free_slots)
        hints = await self._announce(message)
        if hints is None:
            self._use_controllers()
            return RETRY_S
        for digest, download in downloads.items():
            self._apply(download, hints.blobs.get(digest, BlobSources(is_unrestricted=True)), hints.ca)
        return hints.next_s or DEFAULT_INTERVAL_S

    def _on_chunk(self, download: SwarmDownload) -> None:
        if download.needs_assignment:
            self._wake.set()

    def _use_controllers(self) -> None:
        for download in self._served.downloads.values():
            download.assign([], is_unrestricted=True)

    def _apply(self, download: SwarmDownload, sources: BlobSources, ca: str) -> None:
        download.keep_only_peers([peer.name for peer in sources.peers])
        for peer in sources.peers:
            try:
                has = decode_chunks(peer.have, download.have.count)
            except Invalid as error:
                log.debug("the chunks of a peer cannot be read", node=peer.name, reason=error.message)
                continue
            download.offer(self._source(peer, download.digest, ca), has)
        if sources.stored:
            download.offer(self._storage(sources.stored))
        download.assign(sources.assigned, is_unrestricted=sources.is_unrestricted)

    def _storage(self, url: str) -> HttpSource:
        """The URL is signed: there are no other credentials, and its text is a secret."""
        trust = self._trust_for_storage() if url.startswith("https:") else True
        return HttpSource(
            self._session, STORAGE, SourceKind.STORAGE, url, _no_credentials, self._max_download, trust=trust
        )

    def _trust_for_storage(self) -> ssl.SSLContext:
        if self._storage_trust is None:
            self._storage_trust = ssl.create_default_context()
            if self._storage_ca is not None:
                self._storage_trust.load_verify_locations(self._storage_ca)
        return self._storage_trust

    def _source(self, peer: BlobPeer, digest: str, ca: str) -> HttpSource:
        token = self._tokens.setdefault((peer.node_id, digest), PeerToken(peer.token))
        token.token = peer.token
        is_secure = peer.url.startswith("https:")
        return HttpSource(
            self._session,
            peer.name,
            SourceKind.PEER,
            f"{peer.url}/blobs/{digest}",
            token.authorize,
            self._max_download,
            trust=self._trust_of(ca) if is_secure else True,
            server_name=peer.node_id if is_secure else "",
        )

    def _trust_of(self, ca: str) -> ssl.SSLContext | bool:
        """Only the cluster's CA signs the certificates of workers."""
        if ca and self._trust[0] != ca:
            context = ssl.create_default_context(cadata=ca)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            self._trust = (ca, context)
        return self._trust[1] if ca else True


class RevokedNodes:
    """Nodes whose tokens were revoked before they expired."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        """`now` is the controller's clock in seconds since the epoch."""
        self._now = now
        self._until: dict[str, int] = {}  # by node: tokens that expire at this time or earlier

    def revoke(self, node_id: str, until: int) -> None:
        self._until = {node: at for node, at in self._until.items() if at > self._now()}
        self._until[node_id] = max(until, self._until.get(node_id, 0))
        log.info("blob tokens of a node were revoked", node_id=node_id)

    def is_revoked(self, node_id: str, expires_at: int) -> bool:
        return expires_at <= self._until.get(node_id, 0)
