"""Learns from what runs: the most memory any process of a model was seen to hold, and on which nodes its files are.

Both make the next placement better and neither is needed for it. Only what is new is written: most looks write nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta

from corral.contract.messages.replicas import ReplicaProcess, ReplicaState
from corral.controller.leadership import Leadership
from corral.kit.clock import Clock
from corral.kit.log import get_log
from corral.kit.tasks import run_every
from corral.store import model_peaks, models, node_backends, node_files, replicas
from corral.store.api import Store, Transaction
from corral.store.model_peaks import Peak
from corral.store.node_files import NodeFile
from corral.store.replicas import Replica

log = get_log(__name__)

_LEASE = "learning"
# A node that lies, or counts wrong, must not make a model impossible to place for ever.
_MOST_BYTES = 1 << 46
_SEEN_COUNTS = timedelta(hours=1)  # that a file is there is written down no finer than this
_FORGET_AFTER = timedelta(days=7)  # as workers do with files nobody uses


class Learning:
    name = "learning"

    def __init__(self, store: Store, leadership: Leadership, clock: Clock, *, interval_s: float = 30.0) -> None:
        self._store = store
        self._leadership = leadership
        self._clock = clock
        self._interval_s = interval_s

    async def run(self) -> None:
        await run_every(self.name, self._interval_s, self.look, clock=self._clock)

    async def look(self) -> None:
        if not await self._leadership.lead(_LEASE, every_s=self._interval_s):
            return
        async with self._store.read() as tx:
            now = await tx.now()
            told = {each.node_id: each.processes for each in (await node_backends.list_processes(tx)).values()}
            peaks = await self._new_peaks(tx, told)
            known = await node_files.list_(tx)
            files = new_files(await replicas.list_(tx), told, known, now)
        old = any(file.seen_at < now - _FORGET_AFTER for file in known)
        if not (peaks or files or old):
            return
        async with self._store.write() as tx:
            await self._leadership.require(tx, _LEASE)
            await model_peaks.raise_(tx, peaks)
            await node_files.seen(tx, files)
            await node_files.prune(tx, now - _FORGET_AFTER)
        for peak in peaks:
            log.info("learned what a model takes", model=peak.model, peak_bytes=peak.peak_bytes)

    async def _new_peaks(self, tx: Transaction, told: Mapping[str, tuple[ReplicaProcess, ...]]) -> list[Peak]:
        known = {(peak.model, peak.revision): peak.peak_bytes for peak in await model_peaks.list_(tx)}
        revisions = {row.id: row.revision for row in await models.list_(tx)}
        seen = highest((process for processes in told.values() for process in processes), revisions)
        return [peak for peak in seen if peak.peak_bytes > known.get((peak.model, peak.revision), 0)]


def highest(told: Iterable[ReplicaProcess], revisions: Mapping[str, str]) -> list[Peak]:
    """By model, of its present revision."""
    found: dict[str, int] = {}
    for process in told:
        if process.revision and revisions.get(process.model) == process.revision:
            peak = process.peak_bytes if 0 < process.peak_bytes <= _MOST_BYTES else 0
            found[process.model] = max(found.get(process.model, 0), peak)
    return [Peak(model, revisions[model], peak) for model, peak in sorted(found.items()) if peak]


def new_files(
    rows: Iterable[Replica],
    told: Mapping[str, tuple[ReplicaProcess, ...]],
    known: Iterable[NodeFile],
    now: datetime,
) -> list[tuple[str, str]]:
    """By node and digest: what processes that serve were started from, unless that was written down lately."""
    lately = {(file.node_id, file.digest) for file in known if file.seen_at > now - _SEEN_COUNTS}
    serving = {
        (node_id, process.model, process.replica, process.revision)
        for node_id, processes in told.items()
        for process in processes
        if process.state == ReplicaState.READY
    }
    there = {
        (row.node_id, file.digest)
        for row in rows
        if (row.node_id, row.model, row.replica, row.revision) in serving
        for file in row.files or ()
        if file.digest
    }
    return sorted(there - lately)
