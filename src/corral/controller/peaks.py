"""Learns what processes of models really take: the most any of them was seen to hold, by what their nodes tell.

Only of models and revisions that are there still, and only what is new: most looks write nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from corral.contract.messages.replicas import ReplicaProcess
from corral.controller.leadership import Leadership
from corral.kit.clock import Clock
from corral.kit.log import get_log
from corral.kit.tasks import run_every
from corral.store import model_peaks, models, node_backends
from corral.store.api import Store
from corral.store.model_peaks import Peak

log = get_log(__name__)

_LEASE = "peaks"
# A node that lies, or counts wrong, must not make a model impossible to place for ever.
_MOST_BYTES = 1 << 46


class Peaks:
    name = "peaks"

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
            told = [process for each in (await node_backends.list_processes(tx)).values() for process in each.processes]
            known = {(peak.model, peak.revision): peak.peak_bytes for peak in await model_peaks.list_(tx)}
            revisions = {row.id: row.revision for row in await models.list_(tx)}
        new = [peak for peak in highest(told, revisions) if peak.peak_bytes > known.get((peak.model, peak.revision), 0)]
        if not new:
            return
        async with self._store.write() as tx:
            await self._leadership.require(tx, _LEASE)
            await model_peaks.raise_(tx, new)
        for peak in new:
            log.info("learned what a model takes", model=peak.model, peak_bytes=peak.peak_bytes)


def highest(told: Iterable[ReplicaProcess], revisions: dict[str, str]) -> list[Peak]:
    """By model, of its present revision."""
    found: dict[str, int] = {}
    for process in told:
        if process.revision and revisions.get(process.model) == process.revision:
            peak = process.peak_bytes if 0 < process.peak_bytes <= _MOST_BYTES else 0
            found[process.model] = max(found.get(process.model, 0), peak)
    return [Peak(model, revisions[model], peak) for model, peak in sorted(found.items()) if peak]
