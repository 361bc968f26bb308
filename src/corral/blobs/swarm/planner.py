"""Decides which chunk to request from which source next. Pure: the caller passes the time, and randomness is seeded.

Rules, in this order:

1. A chunk that the controller assigned to this node is requested from the object storage, if there is one, or else from
   the controller: no other node fetches it there, so it is rare by definition.
2. Every other chunk is requested from the peer with the fewest open requests. Of the chunks that this peer has, one of
   those that the fewest peers have is chosen at random. So nodes that start together choose different chunks.
3. A chunk that no peer has is requested from the storage or a controller without an assignment only if the controller
   allows it (no other node wants the blob), or if no byte arrived for `fallback_s` though peers have missing chunks and
   are not busy.
4. When there is nothing else to request, a slow request is repeated at another source: the first answer wins. At the
   end (all missing chunks are requested) this happens sooner, and at the storage and the controllers too.

A source that sent a wrong chunk is banned for this blob; a source that failed or is busy is left alone for a while.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from corral.blobs.swarm.chunk_set import ChunkSet

EXACT_CHUNKS = 128  # above this number of candidates the rarest chunk is looked for among a random sample
SAMPLED_CHUNKS = 32


class SourceKind(StrEnum):
    CONTROLLER = "controller"
    STORAGE = "storage"  # an object storage; used like a controller, and rather than one
    PEER = "peer"


@dataclass(frozen=True)
class PlanLimits:
    connections: int = 8
    per_peer: int = 2  # with fewer than `many_peers`; otherwise one: a chunk that arrives sooner is passed on sooner
    many_peers: int = 2
    per_controller: int = 4
    overtake_factor: float = 3.0  # a request that takes so many times the usual time may be repeated elsewhere
    end_factor: float = 1.5  # the same when all missing chunks are requested
    min_overtake_s: float = 1.0
    fallback_s: float = 3.0  # without any byte: the controller is used without an assignment, one request at a time
    idle_fallback_s: float = 15.0  # the same while peers are busy, or no peer has a missing chunk yet
    max_copies: int = 2  # open requests for one chunk
    first_pause_s: float = 0.5
    cap_pause_s: float = 15.0
    max_failures: int = 5  # in a row; a source with so many counts as lost


class ChunkRequest(NamedTuple):
    source: str
    chunk: int


@dataclass
class SourceState:
    kind: SourceKind
    has: ChunkSet
    open: dict[int, float] = field(default_factory=dict)  # chunk: time of the request
    failures: int = 0
    paused_until_s: float = 0.0
    is_banned: bool = False
    is_present: bool = True  # False: no longer offered, kept for its ban and its open requests


class ChunkPlanner:
    def __init__(self, have: ChunkSet, limits: PlanLimits | None = None, *, seed: int = 0, now_s: float = 0.0) -> None:
        self.have = have
        self._limits = limits or PlanLimits()
        self._random = random.Random(seed)
        self._sources: dict[str, SourceState] = {}
        self._assigned = ChunkSet(have.count)
        self._is_unrestricted = True
        self._usual_s = 0.0  # moving average of the time that a chunk takes
        self._arrived_s = now_s  # the last byte
        self._busy_s = now_s  # the last answer of a busy peer

    # What the caller knows

    def offer(self, source: str, kind: SourceKind, has: ChunkSet) -> None:
        """The source exists and has these chunks."""
        known = self._sources.get(source)
        if known is None:
            self._sources[source] = SourceState(kind, has)
        else:
            known.has, known.is_present = has, True

    def withdraw(self, source: str) -> None:
        """The source is no longer offered; its open requests go on."""
        if (known := self._sources.get(source)) is not None:
            known.is_present = False

    def assign(self, chunks: Iterable[int], *, is_unrestricted: bool) -> None:
        """The chunks that the controller reserved for this node. `is_unrestricted`: it sends this node any chunk."""
        wanted = (chunk for chunk in chunks if 0 <= chunk < self.have.count)
        self._assigned = ChunkSet.of(self.have.count, wanted)
        self._is_unrestricted = is_unrestricted

    # What happened

    def on_chunk(self, request: ChunkRequest, now_s: float) -> tuple[ChunkRequest, ...]:
        """The chunk arrived and is verified. Returns the other requests for the same chunk, closed now: cancel them."""
        began_s = self._close(request)
        if began_s is not None:
            took_s = now_s - began_s
            self._usual_s = took_s if not self._usual_s else 0.8 * self._usual_s + 0.2 * took_s
        self._sources[request.source].failures = 0
        self.on_bytes(request, now_s)
        self.have = self.have.add(request.chunk)
        losers = tuple(ChunkRequest(name, request.chunk) for name, _ in self._requested(request.chunk))
        for loser in losers:
            self._close(loser)
        return losers

    def on_bytes(self, request: ChunkRequest, now_s: float) -> None:
        """Bytes of an open request arrived. Those of a controller without an assignment do not count: it goes on
        helping until another source sends something."""
        is_peer = self._sources[request.source].kind is SourceKind.PEER
        if is_peer or self._is_unrestricted or request.chunk in self._assigned:
            self._arrived_s = now_s

    def on_failure(self, request: ChunkRequest, now_s: float, *, is_final: bool = False) -> None:
        """The request failed: leave the source alone for a while. `is_final`: it counts as lost at once."""
        self._close(request)
        source = self._sources[request.source]
        source.failures = max(source.failures + 1, self._limits.max_failures if is_final else 0)
        pause_s = min(self._limits.cap_pause_s, self._limits.first_pause_s * 2.0 ** min(source.failures - 1, 16))
        source.paused_until_s = now_s + pause_s * self._random.uniform(0.5, 1.0)

    def on_busy(self, request: ChunkRequest, now_s: float, *, wait_s: float) -> None:
        """The source has no free slot: this is no failure."""
        self._close(request)
        self._busy_s = now_s
        self._sources[request.source].paused_until_s = now_s + wait_s * self._random.uniform(0.5, 1.0)

    def on_missing(self, request: ChunkRequest) -> None:
        """The source does not have this chunk after all."""
        self._close(request)
        source = self._sources[request.source]
        source.has = source.has.minus(ChunkSet.of(self.have.count, [request.chunk]))

    def on_wrong_chunk(self, request: ChunkRequest) -> None:
        self._close(request)
        self._sources[request.source].is_banned = True

    def on_cancelled(self, request: ChunkRequest) -> None:
        self._close(request)

    # Decisions

    @property
    def is_complete(self) -> bool:
        return self.have.is_complete

    @property
    def open_requests(self) -> int:
        return sum(len(source.open) for source in self._sources.values())

    @property
    def banned(self) -> tuple[str, ...]:
        return tuple(name for name, source in self._sources.items() if source.is_banned)

    @property
    def needs_assignment(self) -> bool:
        """Whether this node could use more assigned chunks now."""
        waiting = self._assigned.minus(self.have).minus(self._open_chunks())
        return not self._is_unrestricted and not len(waiting)

    def is_lost(self) -> bool:
        """Whether no source is left: each was banned, withdrawn, or failed too often in a row."""
        return not self.open_requests and not any(
            source.failures < self._limits.max_failures for _, source in self._usable(None)
        )

    def next_request(self, now_s: float) -> ChunkRequest | None:
        """The next request to send; it counts as open from now on. None: wait for an answer, a source or the time."""
        if self.open_requests >= self._limits.connections:
            return None
        chosen = self._choose_missing(now_s) or self._choose_slow(now_s)
        if chosen is not None:
            self._sources[chosen.source].open[chosen.chunk] = now_s
        return chosen

    # Inside

    def _choose_missing(self, now_s: float) -> ChunkRequest | None:
        wanted = ChunkSet.complete(self.have.count).minus(self.have).minus(self._open_chunks())
        if not len(wanted):
            return None
        free = list(self._usable(now_s))
        peers = [(name, source) for name, source in free if source.kind is SourceKind.PEER]
        storages = [(name, source) for name, source in free if source.kind is SourceKind.STORAGE]
        controllers = [(name, source) for name, source in free if source.kind is SourceKind.CONTROLLER]
        assigned = ChunkSet(wanted.count, wanted.bits & self._assigned.bits)
        found = self._from(storages, assigned) or self._from(controllers, assigned) or self._from(peers, wanted)
        if found is None and self._may_use_controller(wanted, now_s):
            in_order = not peers
            found = self._from(storages, wanted, in_order=in_order) or self._from(
                controllers, wanted, in_order=in_order
            )
        return found

    def _may_use_controller(self, wanted: ChunkSet, now_s: float) -> bool:
        if self._is_unrestricted:
            return True
        if any(source.open for source in self._sources.values() if source.kind is not SourceKind.PEER):
            return False
        silent_s = now_s - self._arrived_s
        peers = [source for source in self._sources.values() if source.kind is SourceKind.PEER and source.is_present]
        is_waiting = not any(self._is_bad(source) or source.has.bits & wanted.bits for source in peers)
        is_idle = is_waiting or now_s - self._busy_s < self._limits.fallback_s
        return silent_s >= (self._limits.idle_fallback_s if is_idle else self._limits.fallback_s)

    def _from(
        self, sources: list[tuple[str, SourceState]], wanted: ChunkSet, *, in_order: bool = False
    ) -> ChunkRequest | None:
        self._random.shuffle(sources)
        for name, source in sorted(sources, key=lambda each: len(each[1].open)):
            offered = ChunkSet(wanted.count, wanted.bits & source.has.bits)
            if len(offered):
                # Without peers the order matters to no other node, and an unbroken beginning is hashed from memory.
                return ChunkRequest(name, next(iter(offered)) if in_order else self._rarest(offered))
        return None

    def _rarest(self, offered: ChunkSet) -> int:
        candidates = list(offered) if len(offered) <= EXACT_CHUNKS else list(self._sample(offered))
        self._random.shuffle(candidates)
        peers = [source.has for source in self._sources.values() if self._is_peer(source)]
        return min(candidates, key=lambda chunk: sum(chunk in has for has in peers))

    def _sample(self, offered: ChunkSet) -> Iterator[int]:
        """Random chunks of a large set, without listing the set."""
        for _ in range(SAMPLED_CHUNKS):
            yield offered.pick(self._random)

    def _choose_slow(self, now_s: float) -> ChunkRequest | None:
        missing = ChunkSet.complete(self.have.count).minus(self.have)
        is_end = not len(missing.minus(self._open_chunks()))
        factor = self._limits.end_factor if is_end else self._limits.overtake_factor
        patience_s = max(self._limits.min_overtake_s, factor * self._usual_s)
        free = list(self._usable(now_s))
        for chunk, began_s in sorted(self._oldest_requests().items(), key=lambda each: each[1]):
            askers = dict(self._requested(chunk))
            if now_s - began_s < patience_s or len(askers) >= self._limits.max_copies:
                continue
            for name, source in sorted(free, key=lambda each: (each[1].kind != SourceKind.PEER, len(each[1].open))):
                is_allowed = self._may_repeat_at(source, now_s - began_s, is_end=is_end)
                if is_allowed and name not in askers and chunk in source.has:
                    return ChunkRequest(name, chunk)
        return None

    def _may_repeat_at(self, source: SourceState, age_s: float, *, is_end: bool) -> bool:
        """The controller has other nodes to send to: it gets a slow request at the end only, and later than a peer."""
        if source.kind is SourceKind.PEER or self._is_unrestricted:
            return True
        return is_end and age_s >= max(self._limits.min_overtake_s, self._limits.overtake_factor * self._usual_s)

    def _usable(self, now_s: float | None) -> Iterator[tuple[str, SourceState]]:
        """Sources that may be used; with a time: that may get a request now."""
        peers = sum(self._is_peer(source) for source in self._sources.values())
        per_peer = 1 if peers >= self._limits.many_peers else self._limits.per_peer
        for name, source in self._sources.items():
            if source.is_banned or not source.is_present:
                continue
            limit = per_peer if source.kind is SourceKind.PEER else self._limits.per_controller
            if now_s is None or (source.paused_until_s <= now_s and len(source.open) < limit):
                yield name, source

    def _is_peer(self, source: SourceState) -> bool:
        return source.kind is SourceKind.PEER and source.is_present and not source.is_banned

    def _is_bad(self, source: SourceState) -> bool:
        return source.is_banned or source.failures >= self._limits.max_failures

    def _open_chunks(self) -> ChunkSet:
        opened = (chunk for source in self._sources.values() for chunk in source.open)
        return ChunkSet.of(self.have.count, opened)

    def _requested(self, chunk: int) -> Iterator[tuple[str, float]]:
        for name, source in self._sources.items():
            if chunk in source.open:
                yield name, source.open[chunk]

    def _oldest_requests(self) -> dict[int, float]:
        found: dict[int, float] = {}
        for source in self._sources.values():
            for chunk, began_s in source.open.items():
                found[chunk] = min(began_s, found.get(chunk, began_s))
        return found

    def _close(self, request: ChunkRequest) -> float | None:
        return self._sources[request.source].open.pop(request.chunk, None)
