"""Workers that exchange blobs, in one process: real ingresses, listeners, tokens and announcements; no orders.

async with open_swarm(tmp_path) as swarm:
    file = swarm.source.add("w", content)
    nodes = [await swarm.join(name) for name in ("a", "b")]
    await nodes[0].obtain(file)
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import cast

import aiohttp

from corral.blobs.progress import Progress
from corral.blobs.store import Blob, BlobStore
from corral.blobs.swarm.planner import PlanLimits, SourceKind
from corral.blobs.swarm.rate_limit import RateLimit
from corral.blobs.transfer.partial_file import ExpectedBlob
from corral.blobs.transfer.remote import open_session
from corral.bus.api import Bus
from corral.bus.local import LocalHub
from corral.contract.http import Request, Responder
from corral.contract.messages.blobs import REVOKE_BLOB_TOKENS, AnnounceBlobs, BlobHints, RevokeBlobTokens
from corral.contract.messages.replicas import ReplicaFile
from corral.controller.access.active_nodes import ActiveNodes
from corral.controller.access.signing import IngressTokens
from corral.controller.files.swarm.blob_peers import BlobPeers
from corral.controller.files.swarm.blob_tracker import BlobTracker
from corral.inference.request_files import LocalFiles
from corral.kit.certificates import Ca, make_ca
from corral.kit.clock import SystemClock
from corral.kit.errors import Unreachable
from corral.kit.signing import Signer
from corral.kit.tasks import background
from corral.relay import RelayServer
from corral.worker.files.blob_exchange import PeerExchange, RevokedNodes
from corral.worker.files.fleet_blobs import FleetBlobs
from corral.worker.files.served_blobs import ServedBlobs
from corral.worker.ingress.blobs import BlobRoutes
from corral.worker.ingress.routes import IngressRoutes
from corral.worker.ingress.tokens import TokenVerifier
from corral.worker.metrics import WorkerMetrics
from corral.worker.status import WorkerStatus
from corral.worker.supervisor.logs import LogBook
from tests.support.blob_source import BlobSource, blob_source

CLOCK = SystemClock()


class Members:
    """Stands for the controller's snapshot of approved nodes."""

    def __init__(self) -> None:
        self.credentials: dict[str, str] = {}

    def credential(self, node_id: str) -> str:
        return self.credentials.get(node_id, "")

    def is_current(self, node_id: str, credential: str) -> bool:
        return bool(credential) and self.credentials.get(node_id) == credential


@dataclass
class SwarmNode:
    name: str
    swarm: Swarm
    store: BlobStore
    served: ServedBlobs
    exchange: PeerExchange
    fleet: FleetBlobs
    server: RelayServer
    url: str
    received: Counter[str] = field(default_factory=Counter)
    sent: list[int] = field(default_factory=list)
    seen: list[Progress] = field(default_factory=list)

    @property
    def node_id(self) -> str:
        return f"id-{self.name}"

    async def obtain(self, file: ReplicaFile) -> Blob:
        wanted = ExpectedBlob(file.digest, file.size_bytes)
        with self.store.hold(file.digest):
            return await self.fleet.obtain(
                self.store, wanted, self.swarm.source.urls, self.swarm.source.token, self.seen.append, name=file.path
            )


class SpoilingRoutes:
    """An ingress whose blobs are wrong, or never come."""

    def __init__(self, routes: IngressRoutes) -> None:
        self.routes = routes
        self.spoils = False
        self.stalls = False

    async def handle(self, request: Request, responder: Responder) -> None:
        if not (self.spoils or self.stalls) or not request.route.startswith(b"/blobs/"):
            await self.routes.handle(request, responder)
            return
        if self.stalls:
            await asyncio.sleep(3600)
        span = (request.header(b"range") or b"").decode().removeprefix("bytes=")
        first, last = (int(each) for each in span.split("-"))
        headers = ((b"content-range", f"bytes {first}-{last}/*".encode()),)
        await responder.send(206, headers, b"x" * (last - first + 1))


@dataclass
class Swarm:
    folder: Path
    source: BlobSource
    peers: BlobPeers
    members: Members
    tokens: IngressTokens
    session: aiohttp.ClientSession
    hub: LocalHub
    opened: contextlib.AsyncExitStack
    ca: Ca | None
    is_away: bool = False  # the controller's API
    nodes: dict[str, SwarmNode] = field(default_factory=dict)
    spoilers: dict[str, SpoilingRoutes] = field(default_factory=dict)

    async def join(
        self,
        name: str,
        *,
        max_upload: float = 0,
        max_download: float = 0,
        limits: PlanLimits | None = None,
        upload: RateLimit | None = None,
    ) -> SwarmNode:
        """`upload`: a link that several nodes share."""
        node_id, folder = f"id-{name}", self.folder / name
        folder.mkdir()
        self.members.credentials[node_id] = f"credential of {name}"
        verifier = TokenVerifier(lambda: CLOCK.now().timestamp())
        verifier.trust(self.tokens.public_key, node_id)
        served, revoked, sent = ServedBlobs(), RevokedNodes(), list[int]()
        blobs = BlobRoutes(served, verifier, revoked, upload or RateLimit(max_upload, CLOCK), sent.append)
        files = LocalFiles(folder / "requests")
        routes = IngressRoutes(
            WorkerStatus("boot", name), verifier, WorkerMetrics(), lambda _id: None, LogBook(), files, blobs
        )
        spoiler = self.spoilers[name] = SpoilingRoutes(routes)
        server = RelayServer(spoiler, ssl=_tls(self.ca, node_id, folder))
        self.opened.push_async_callback(server.drain, 0.1)
        port = await server.listen("127.0.0.1", 0)
        url = f"http{'s' if self.ca else ''}://127.0.0.1:{port}"

        async def announce(announced: AnnounceBlobs) -> BlobHints:
            if self.is_away:
                raise Unreachable("the controller is away")
            return self.peers.exchange(node_id, name, url, announced)

        limit = RateLimit(max_download, CLOCK)
        exchange = PeerExchange(served, self.session, announce, CLOCK, max_download=limit)
        received: Counter[str] = Counter()

        def on_received(kind: SourceKind, count: int) -> None:
            received[kind.value] += count

        fleet = FleetBlobs(self.session, exchange=exchange, limits=limits, max_download=limit, on_received=on_received)
        bus = await self.opened.enter_async_context(self.hub.join(node_id))

        async def on_revoked(event: RevokeBlobTokens, _tokens: object) -> None:
            revoked.revoke(event.node_id, event.until)

        await bus.subscribe(REVOKE_BLOB_TOKENS, on_revoked, node=node_id)
        await self.opened.enter_async_context(background(exchange.run()))
        node = SwarmNode(name, self, BlobStore(folder / "store"), served, exchange, fleet, server, url, received, sent)
        self.nodes[name] = node
        return node


@contextlib.asynccontextmanager
async def open_swarm(
    folder: Path, *, ca: Ca | None = None, find_stored: Callable[[str], str] = lambda _digest: ""
) -> AsyncIterator[Swarm]:
    hub, members, tokens = LocalHub(CLOCK, seed=1), Members(), IngressTokens(Signer(Signer.new_private_key()), CLOCK)
    async with contextlib.AsyncExitStack() as opened:
        source = await opened.enter_async_context(blob_source(folder))
        session = await opened.enter_async_context(open_session(inside=True))
        bus: Bus = await opened.enter_async_context(hub.join("controller"))
        peers = BlobPeers(
            BlobTracker(seed=1),
            tokens,
            cast(ActiveNodes, members),
            bus,
            CLOCK,
            ca_pem=ca.certificate_pem if ca else "",
            find_stored=find_stored,
        )
        await opened.enter_async_context(background(peers.run()))
        yield Swarm(folder, source, peers, members, tokens, session, hub, opened, ca)


def _tls(ca: Ca | None, node_id: str, folder: Path) -> ssl.SSLContext | None:
    """As a worker's: the certificate is for the node's id and nothing else."""
    if ca is None:
        return None
    issued = ca.issue_server([node_id], CLOCK.now(), life=timedelta(days=1))
    (folder / "ingress.pem").write_text(issued.certificate_pem + issued.key_pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "ingress.pem")
    return context


def make_test_ca() -> Ca:
    issued = make_ca("test", CLOCK.now())
    return Ca(issued.certificate_pem, issued.key_pem)
