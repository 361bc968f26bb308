"""Records observed usage: the peak memory of a model's last processes, and the nodes that have its files.

Both improve the next placement, and neither is required for it. Only changes are written: most passes write nothing.
The peaks of the last loads count: so neither one excessive nor one unused process decides for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta

from msgspec.structs import replace

from corral.contract.messages.replicas import ReplicaProcess, ReplicaState
from corral.controller.runtime.leadership import Leadership
from corral.kit.clock import Clock
from corral.kit.log import get_log
from corral.kit.tasks import run_every
from corral.store.engine.transactions import Store
from corral.store.records import DesiredReplica
from corral.store.tables import models, node_backends, node_files, process_peaks, replicas
from corral.store.tables.node_files import NodeFile
from corral.store.tables.process_peaks import Peak

log = get_log(__name__)

_LEASE = "learning"
# A node that reports wrong numbers must not make a model impossible to place.
MAX_BYTES = 1 << 46
LAST_LOADS = 5  # of each revision
_OTHER_REVISIONS_FOR = timedelta(days=30)  # an edit may be reverted
_SEEN_COUNTS = timedelta(hours=1)  # the resolution of the time at which a file was last seen
_FORGET_AFTER = timedelta(days=7)  # as workers do with unused files


class UsageRecorder:
    name = "learning"

    def __init__(self, store: Store, leadership: Leadership, clock: Clock, *, interval_s: float = 30.0) -> None:
        self._store = store
        self._leadership = leadership
        self._clock = clock
        self._interval_s = interval_s

    async def run(self) -> None:
        await run_every(self.name, self._interval_s, self.run_once, clock=self._clock)

    async def run_once(self) -> None:
        if not await self._leadership.lead(_LEASE, every_s=self._interval_s):
            return
        async with self._store.read() as tx:
            now = await tx.now()
            processes_by_node = {
                each.node_id: each.processes for each in (await node_backends.list_processes(tx)).values()
            }
            revisions = {row.id: row.revision for row in await models.list_(tx)}
            peaks, stale = new_peaks(await process_peaks.list_(tx), processes_by_node.values(), revisions, now)
            known = await node_files.list_(tx)
            files = new_files(await replicas.list_(tx), processes_by_node, known, now)
        old = any(file.seen_at < now - _FORGET_AFTER for file in known)
        if not (peaks or stale or files or old):
            return
        async with self._store.write() as tx:
            await self._leadership.require(tx, _LEASE)
            await process_peaks.put(tx, peaks)
            await process_peaks.delete(tx, stale)
            await node_files.seen(tx, files)
            await node_files.prune(tx, now - _FORGET_AFTER)
        for peak in peaks:
            log.info(
                "memory peak of a model recorded",
                model=peak.model,
                ram_bytes=peak.ram_bytes,
                device_bytes=peak.device_bytes,
                devices=peak.devices,
            )


def new_peaks(
    known: Sequence[Peak],
    processes_by_node: Iterable[Sequence[ReplicaProcess]],
    revisions: Mapping[str, str],
    now: datetime,
) -> tuple[list[Peak], list[Peak]]:
    """The peaks to store, and those to delete: all but the last loads of each revision, and old revisions."""
    rows = {peak.key: peak for peak in known}
    put = []
    for process in (process for processes in processes_by_node for process in processes):
        if process.revision and revisions.get(process.model) == process.revision:
            before = rows.get((process.model, process.revision, process.process_id))
            after = _raised(before, process, now)
            if after != before and (after.ram_bytes or after.device_bytes):
                rows[after.key] = after
                put.append(after)
    stale = []
    by_revision: dict[tuple[str, str], list[Peak]] = {}
    for peak in sorted(rows.values(), key=lambda peak: (peak.seen_at, peak.process_id)):
        by_revision.setdefault((peak.model, peak.revision), []).append(peak)
    for (model, revision), peaks in by_revision.items():
        over = revisions.get(model) != revision and peaks[-1].seen_at < now - _OTHER_REVISIONS_FOR
        stale += peaks if over else peaks[:-LAST_LOADS]
    return [peak for peak in put if peak not in stale], [peak for peak in stale if peak not in put]


def _raised(before: Peak | None, process: ReplicaProcess, now: datetime) -> Peak:
    """The peak of one process only rises."""
    fresh = before or Peak(model=process.model, revision=process.revision, process_id=process.process_id, seen_at=now)
    on_devices = [_believable(size) for size in process.device_peak_bytes]
    return replace(
        fresh,
        ram_bytes=max(fresh.ram_bytes, _believable(process.peak_bytes)),
        device_bytes=max(fresh.device_bytes, *on_devices, 0),
        devices=max(fresh.devices, len(on_devices)),
    )


def _believable(size_bytes: int) -> int:
    return size_bytes if 0 < size_bytes <= MAX_BYTES else 0


def new_files(
    rows: Iterable[DesiredReplica],
    processes_by_node: Mapping[str, tuple[ReplicaProcess, ...]],
    known: Iterable[NodeFile],
    now: datetime,
) -> list[tuple[str, str]]:
    """By node and digest: the files of ready processes, unless they were stored lately."""
    lately = {(file.node_id, file.digest) for file in known if file.seen_at > now - _SEEN_COUNTS}
    serving = {
        (node_id, process.model, process.replica, process.revision)
        for node_id, processes in processes_by_node.items()
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
