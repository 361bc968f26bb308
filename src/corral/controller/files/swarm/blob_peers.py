"""Answers workers that look for blobs: other workers to ask, with a token for each, and chunks to fetch from here.

A token is for one asking node, one serving node and one blob, and lives five minutes. When a node is deleted or
replaced, every serving node that it got a token for is told at once, and again for a while: an event may be lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from corral.blobs.swarm.chunk_set import MAX_CHUNKS
from corral.bus.api import Bus
from corral.contract.access import PEER_LIFE_S, Scope
from corral.contract.messages.blobs import (
    REVOKE_BLOB_TOKENS,
    AnnounceBlobs,
    BlobHints,
    BlobPeer,
    BlobSources,
    RevokeBlobTokens,
)
from corral.contract.sources import is_digest
from corral.controller.access.active_nodes import ActiveNodes
from corral.controller.access.signing import IngressTokens
from corral.controller.files.swarm.blob_tracker import BlobTracker, PeerAddress, PeerHint
from corral.kit.clock import Clock
from corral.kit.errors import CorralError, Invalid
from corral.kit.log import get_log
from corral.kit.tasks import run_every

log = get_log(__name__)

RENEW_BEFORE_S = 120.0  # a token with less life left is replaced
CHECK_EVERY_S = 0.5
REPEAT_EVERY_S = 2.0
REPEATS = 5
MAX_HAVE = 5000  # blobs in one announcement
MAX_WANT = 200


@dataclass
class Grant:
    """A token that was given to an asking node for a serving node."""

    token: str
    expires_s: float  # monotonic
    expires_at: int  # seconds since the epoch


@dataclass
class Asker:
    """A node that got tokens."""

    credential: str
    grants: dict[tuple[str, str], Grant] = field(default_factory=dict)  # by serving node and digest


@dataclass
class Revocation:
    message: RevokeBlobTokens
    servers: tuple[str, ...]
    due_s: float
    left: int = REPEATS


class BlobPeers:
    name = "blob peers"

    def __init__(
        self,
        tracker: BlobTracker,
        tokens: IngressTokens,
        nodes: ActiveNodes,
        bus: Bus,
        clock: Clock,
        *,
        ca_pem: str = "",
        find_stored: Callable[[str], str] = lambda _digest: "",
    ) -> None:
        """`ca_pem`: the CA of the workers' certificates; empty: they have none. `find_stored`: the URL of a blob in the
        object storage; empty: it is not there."""
        self._tracker = tracker
        self._tokens = tokens
        self._nodes = nodes
        self._bus = bus
        self._clock = clock
        self._ca_pem = ca_pem
        self._find_stored = find_stored
        self._askers: dict[str, Asker] = {}
        self._revocations: list[Revocation] = []

    def exchange(self, node_id: str, name: str, url: str, announced: AnnounceBlobs) -> BlobHints:
        """The worker is authenticated. Raises Invalid."""
        _check(announced)
        now_s = self._clock.monotonic()
        credential = self._nodes.credential(node_id)
        is_member = bool(credential)  # a node that waits for approval neither serves nor fetches
        self._tracker.announce(
            node_id,
            PeerAddress(name, url),
            announced.have if is_member and url else {},
            announced.want if is_member else {},
            is_full=announced.is_full,
            free_slots=max(0, announced.free_slots),
            now_s=now_s,
        )
        wanted = announced.want if is_member else {}
        asker = self._asker(node_id, credential) if wanted else Asker("")
        blobs = {digest: self._sources(node_id, asker, digest, count, now_s) for digest, count in wanted.items()}
        return BlobHints(blobs=blobs, ca=self._ca_pem if wanted else "", next_s=self._tracker.next_s())

    async def run(self) -> None:
        await run_every(self.name, CHECK_EVERY_S, self.run_once, clock=self._clock)

    async def run_once(self) -> None:
        """Tell serving nodes whose tokens have ended."""
        now_s = self._clock.monotonic()
        for node_id, asker in list(self._askers.items()):
            asker.grants = {key: grant for key, grant in asker.grants.items() if grant.expires_s > now_s}
            if not self._nodes.is_current(node_id, asker.credential):
                self._revoke(node_id, asker, now_s)
            if not asker.grants:
                self._askers.pop(node_id, None)
        for revocation in list(self._revocations):
            if revocation.due_s <= now_s:
                await self._publish(revocation)

    def _sources(self, node_id: str, asker: Asker, digest: str, count: int, now_s: float) -> BlobSources:
        hints = self._tracker.hints(node_id, digest, count, now_s)
        peers = tuple(
            BlobPeer(
                peer.node_id, peer.address.name, peer.address.url, self._token(node_id, asker, peer, digest), peer.have
            )
            for peer in hints.peers
            if self._nodes.credential(peer.node_id)
        )
        return BlobSources(peers, hints.assigned, hints.is_unrestricted, self._find_stored(digest))

    def _asker(self, node_id: str, credential: str) -> Asker:
        known = self._askers.get(node_id)
        if known is not None and known.credential != credential:
            self._revoke(node_id, known, self._clock.monotonic())
            known = None
        if known is None:
            known = self._askers[node_id] = Asker(credential)
        return known

    def _token(self, node_id: str, asker: Asker, peer: PeerHint, digest: str) -> str:
        """The token given before, while it lives long enough: the serving node has verified it already."""
        now_s, key = self._clock.monotonic(), (peer.node_id, digest)
        grant = asker.grants.get(key)
        if grant is None or grant.expires_s < now_s + RENEW_BEFORE_S:
            token = self._tokens.sign(node_id, [Scope.BLOBS], aud=peer.node_id, life_s=PEER_LIFE_S, digests=(digest,))
            expires_at = int(self._clock.now().timestamp() + PEER_LIFE_S)
            grant = asker.grants[key] = Grant(token, now_s + PEER_LIFE_S, expires_at)
        return grant.token

    def _revoke(self, node_id: str, asker: Asker, now_s: float) -> None:
        self._tracker.forget(node_id)
        self._askers.pop(node_id, None)
        servers = tuple(dict.fromkeys(server for server, _ in asker.grants))
        asker.grants = {}
        if servers:
            until = int(self._clock.now().timestamp() + PEER_LIFE_S)
            self._revocations.append(Revocation(RevokeBlobTokens(node_id, until), servers, now_s))
            log.info("blob tokens of a node are revoked", node_id=node_id, servers=len(servers))

    async def _publish(self, revocation: Revocation) -> None:
        revocation.left -= 1
        revocation.due_s += REPEAT_EVERY_S
        if revocation.left <= 0:
            self._revocations.remove(revocation)
        for node_id in revocation.servers:
            try:
                await self._bus.publish(REVOKE_BLOB_TOKENS, revocation.message, node=node_id)
            except CorralError as error:
                log.debug("a revocation could not be published", node_id=node_id, reason=error.message)


def _check(announced: AnnounceBlobs) -> None:
    if len(announced.have) > MAX_HAVE or len(announced.want) > MAX_WANT:
        raise Invalid(f"an announcement has at most {MAX_HAVE} blobs, and wants at most {MAX_WANT}")
    if any(not 0 < count <= MAX_CHUNKS for count in announced.want.values()):
        raise Invalid(f"a wanted blob has between 1 and {MAX_CHUNKS} chunks")
    for digest in (*announced.have, *announced.want):
        if not is_digest(digest):
            raise Invalid(f"{digest[:100]!r} is not a digest")
