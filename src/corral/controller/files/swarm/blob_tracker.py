"""Which worker has which chunks, and which chunks each worker should fetch from the controller. Pure: the caller passes
the time, and randomness is seeded.

Everything here is a hint in memory: after a restart it is empty, and fills again with the next announcements. While
several workers want a blob, each chunk is assigned to one of them, so that the controller sends it about once and the
workers exchange the rest. The number of chunks assigned at a time follows the rate at which they arrive. When every
chunk has left the controller, it helps with the rarest ones, within `EXTRA_SHARE` of the blob. A worker that finds
complete copies elsewhere still gets one chunk at a time: they may all be behind one slow link.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from corral.blobs.swarm.chunk_set import ChunkSet, decode_chunks
from corral.kit.errors import Invalid

SAMPLE = 16  # peers in one answer
HOLDER_S = 180.0  # without an announcement, a worker's blobs are forgotten
WANTER_S = 15.0  # the same for its wishes and assignments
# Chunks of one blob that are assigned at a time, over all workers and to each. The fewer are sent at a time, the sooner
# the first ones are whole and can be passed on; fast links get more, because the numbers follow the rate of arrivals.
MIN_ASSIGNED = 4
MIN_ASSIGNED_EACH = 1
ALONE_AFTER_S = 0.5  # a worker counts as the only one when no other came within this time
ENOUGH_HOLDERS = 2  # complete copies: the controller sends each worker one chunk at a time
EXTRA_SHARE = 0.3
MIN_INTERVAL_S = 0.5
ANNOUNCEMENTS_PER_S = 40.0  # of all workers together, while they want blobs
MAX_BLOBS = 20_000
EXPIRE_EVERY_S = 1.0


@dataclass(frozen=True)
class PeerAddress:
    name: str
    url: str


@dataclass(frozen=True)
class PeerHint:
    node_id: str
    address: PeerAddress
    have: str


@dataclass(frozen=True)
class TrackerHints:
    peers: tuple[PeerHint, ...] = ()
    assigned: tuple[int, ...] = ()
    is_unrestricted: bool = False


@dataclass
class TrackedBlob:
    holdings: dict[str, str] = field(default_factory=dict)  # by node, as announced
    wanted_s: dict[str, float] = field(default_factory=dict)  # by node: when it was first announced
    leases: dict[int, str] = field(default_factory=dict)  # chunk: node
    arrivals: deque[tuple[float, str]] = field(default_factory=lambda: deque[tuple[float, str]](maxlen=4096))
    assigned_count: int = 0


@dataclass
class TrackedNode:
    address: PeerAddress
    free_slots: int
    seen_s: float
    holds: set[str] = field(default_factory=set)  # digests
    wants: set[str] = field(default_factory=set)


class BlobTracker:
    def __init__(self, *, seed: int | None = None) -> None:
        self._random = random.Random(seed)
        self._blobs: dict[str, TrackedBlob] = {}
        self._nodes: dict[str, TrackedNode] = {}
        self._expired_s = float("-inf")

    def announce(
        self,
        node_id: str,
        address: PeerAddress,
        have: Mapping[str, str],
        want: Mapping[str, int],
        *,
        is_full: bool,
        free_slots: int,
        now_s: float,
    ) -> None:
        self._expire(now_s)
        node = self._nodes.setdefault(node_id, TrackedNode(address, free_slots, now_s))
        node.address, node.free_slots, node.seen_s = address, free_slots, now_s
        for digest in node.holds - have.keys() if is_full else ():
            self._end_holding(digest, node_id)
        for digest, chunks in have.items():
            if (blob := self._blob(digest)) is not None:
                node.holds.add(digest)
                self._hold(blob, node_id, chunks, want.get(digest, 0), now_s)
        for digest in node.wants - want.keys():
            self._end_want(digest, node_id)
        for digest in want:
            if (blob := self._blob(digest)) is not None:
                node.wants.add(digest)
                blob.wanted_s.setdefault(node_id, now_s)

    def hints(self, node_id: str, digest: str, count: int, now_s: float) -> TrackerHints:
        """Whom the worker should ask for this blob of `count` chunks."""
        blob = self._blobs.get(digest)
        if blob is None:
            return TrackerHints(is_unrestricted=True)
        own = self._chunks(blob, node_id, count)
        others = {
            each: chunks
            for each in blob.holdings
            if each != node_id and each in self._nodes and len(chunks := self._chunks(blob, each, count))
        }
        useful = [each for each, chunks in others.items() if len(chunks.minus(own))]
        is_alone = not others and blob.wanted_s.keys() <= {node_id}
        is_alone = is_alone and now_s - blob.wanted_s.get(node_id, now_s) >= ALONE_AFTER_S
        assigned = () if is_alone else self._assign(blob, node_id, own, others, count, now_s)
        peers = tuple(PeerHint(each, self._nodes[each].address, others[each].encode()) for each in self._sample(useful))
        return TrackerHints(peers, assigned, is_alone)

    def forget(self, node_id: str) -> None:
        if (node := self._nodes.get(node_id)) is not None:
            for digest in tuple(node.holds):
                self._end_holding(digest, node_id)
            for digest in tuple(node.wants):
                self._end_want(digest, node_id)
            del self._nodes[node_id]

    def next_s(self) -> float:
        """When a worker that wants a blob should announce again."""
        wanting = sum(bool(node.wants) for node in self._nodes.values())
        return max(MIN_INTERVAL_S, wanting / ANNOUNCEMENTS_PER_S)

    def _blob(self, digest: str) -> TrackedBlob | None:
        """None: too many blobs are tracked already."""
        if digest not in self._blobs and len(self._blobs) >= MAX_BLOBS:
            return None
        return self._blobs.setdefault(digest, TrackedBlob())

    def _hold(self, blob: TrackedBlob, node_id: str, chunks: str, count: int, now_s: float) -> None:
        blob.holdings[node_id] = chunks
        leased = [chunk for chunk, holder in blob.leases.items() if holder == node_id]
        if not leased:
            return
        has = self._chunks(blob, node_id, count) if count else ChunkSet(0)
        for chunk in leased:
            if not count or chunk in has:
                del blob.leases[chunk]
                blob.arrivals.append((now_s, node_id))

    def _assign(
        self, blob: TrackedBlob, node_id: str, own: ChunkSet, others: Mapping[str, ChunkSet], count: int, now_s: float
    ) -> tuple[int, ...]:
        leased = [chunk for chunk, holder in blob.leases.items() if holder == node_id]
        recent = [holder for at_s, holder in blob.arrivals if at_s > now_s - 1.0]
        total = max(MIN_ASSIGNED, 2 * len(recent))
        is_covered = sum(chunks.is_complete for chunks in others.values()) >= ENOUGH_HOLDERS
        each = 1 if is_covered else max(MIN_ASSIGNED_EACH, 2 * recent.count(node_id))
        missing = ChunkSet.complete(count).minus(own)
        absent, rare = self._candidates(missing, others)
        # A worker may have named another number of chunks.
        taken = ChunkSet.of(count, (chunk for chunk in blob.leases if chunk < count))
        candidates = (absent if len(absent) else missing if is_covered else rare).minus(taken)
        most = count if len(absent) else round((1.0 + EXTRA_SHARE) * count) - blob.assigned_count
        while len(candidates) and most > 0 and len(leased) < each and len(blob.leases) < total:
            chunk = candidates.pick(self._random)
            candidates = candidates.minus(ChunkSet.of(count, [chunk]))
            blob.leases[chunk] = node_id
            blob.assigned_count += 1
            most -= 1
            leased.append(chunk)
        return tuple(sorted(chunk for chunk in leased if chunk < count))

    def _candidates(self, missing: ChunkSet, others: Mapping[str, ChunkSet]) -> tuple[ChunkSet, ChunkSet]:
        """Of the missing chunks, those that no other worker has, and those that at most one other has."""
        once, twice = ChunkSet(missing.count), ChunkSet(missing.count)
        for chunks in others.values():
            twice = twice.union(ChunkSet(missing.count, once.bits & chunks.bits))
            once = once.union(chunks)
        return missing.minus(once), missing.minus(twice)

    def _chunks(self, blob: TrackedBlob, node_id: str, count: int) -> ChunkSet:
        try:
            return decode_chunks(blob.holdings[node_id], count) if node_id in blob.holdings else ChunkSet(count)
        except Invalid:
            return ChunkSet(count)

    def _sample(self, nodes: list[str]) -> list[str]:
        """A random sample; workers with free upload slots are more likely."""
        weighted = {node: self._random.random() ** (1.0 / (1 + self._nodes[node].free_slots)) for node in nodes}
        return sorted(nodes, key=lambda node: -weighted[node])[:SAMPLE]

    def _end_holding(self, digest: str, node_id: str) -> None:
        self._nodes[node_id].holds.discard(digest)
        if (blob := self._blobs.get(digest)) is not None:
            blob.holdings.pop(node_id, None)
            self._drop_if_empty(digest)

    def _end_want(self, digest: str, node_id: str) -> None:
        self._nodes[node_id].wants.discard(digest)
        blob = self._blobs.get(digest)
        if blob is None or blob.wanted_s.pop(node_id, None) is None:
            return
        for chunk in [chunk for chunk, holder in blob.leases.items() if holder == node_id]:
            del blob.leases[chunk]
        if not blob.wanted_s:
            blob.assigned_count = 0
        self._drop_if_empty(digest)

    def _drop_if_empty(self, digest: str) -> None:
        blob = self._blobs[digest]
        if not blob.holdings and not blob.wanted_s:
            del self._blobs[digest]

    def _expire(self, now_s: float) -> None:
        if now_s < self._expired_s + EXPIRE_EVERY_S:
            return
        self._expired_s = now_s
        for node_id, node in list(self._nodes.items()):
            if node.seen_s < now_s - HOLDER_S:
                self.forget(node_id)
            elif node.seen_s < now_s - WANTER_S:
                for digest in tuple(node.wants):
                    self._end_want(digest, node_id)
