"""Writes what `plan` decided: in one transaction, fenced by the lease, and only if nothing was written meanwhile."""

from __future__ import annotations

from datetime import timedelta

from msgspec.structs import replace

from corral.controller.replicas.plan_input import PlanResult
from corral.controller.replicas.snapshot import FleetSnapshot, read_desired, storable_job, storable_replica
from corral.controller.runtime.change_feed import LOADS, REPLICAS, ChangeFeed
from corral.controller.runtime.leadership import Leadership
from corral.store.engine.transactions import Store
from corral.store.records import DesiredReplica, ReplicaStage
from corral.store.tables import load_jobs, model_schedules, models, replicas, revisions

LAST_USE_RESOLUTION = timedelta(seconds=5)  # a later last use is written only when it differs by at least this


class PlanWriter:
    def __init__(self, store: Store, leadership: Leadership, feed: ChangeFeed, *, lease: str) -> None:
        self._store = store
        self._leadership = leadership
        self._feed = feed
        self._lease = lease

    async def write(self, snapshot: FleetSnapshot, result: PlanResult, *, retry_unsatisfiable: bool) -> bool:
        """False: rows or jobs changed since the snapshot, and nothing was written. `retry_unsatisfiable`: end the pause
        of schedules that no node could satisfy."""
        before = {row.key: row for row in snapshot.rows}
        changed = [row for key, row in result.rows.items() if not _is_same(before.get(key), row)]
        removed = [row for key, row in before.items() if key not in result.rows]
        jobs = [job for name, job in result.jobs.items() if snapshot.jobs.get(name) != job]
        done = sorted(snapshot.jobs.keys() - result.jobs.keys())
        settled = {name: revision for name, revision in result.ready.items() if snapshot.previous_revisions.get(name)}
        schedules = {name: found for name, found in result.unsatisfied.items() if snapshot.models[name].schedule.scales}
        if not (changed or removed or jobs or done or settled or schedules or retry_unsatisfiable):
            return True
        routing = bool(removed or settled) or any(_changes_routing(before.get(row.key), row) for row in changed)
        async with self._store.write() as tx:
            await self._leadership.require(tx, self._lease)
            rows, known = await read_desired(tx)
            if rows != snapshot.rows or known != snapshot.jobs:
                return False
            await replicas.delete(tx, removed)
            await replicas.put(tx, [storable_replica(row) for row in changed])
            await load_jobs.put(tx, [storable_job(job) for job in jobs])
            await load_jobs.delete(tx, done)
            for name, revision in sorted(settled.items()):
                await models.forget_previous_revisions(tx, name, revision)
            if retry_unsatisfiable:
                await model_schedules.clear_unsatisfiable(tx)
            for name, (ticks, until) in sorted(schedules.items()):
                await model_schedules.mark_unsatisfiable(tx, name, ticks, until)
            if jobs or done:
                await revisions.bump(tx, LOADS)
            if routing:
                await revisions.bump(tx, REPLICAS)
        if jobs or done:
            self._feed.notify(LOADS)
        if routing:
            self._feed.notify(REPLICAS)
        return True


def _is_same(before: DesiredReplica | None, after: DesiredReplica) -> bool:
    """Apart from a last use that hardly moved."""
    if before is None or before == after:
        return before is not None
    if replace(before, last_used_at=after.last_used_at) != after or after.last_used_at is None:
        return False
    return before.last_used_at is not None and after.last_used_at - before.last_used_at < LAST_USE_RESOLUTION


def _changes_routing(before: DesiredReplica | None, after: DesiredReplica) -> bool:
    return (before is not None and before.stage is ReplicaStage.LEAVING) != (after.stage is ReplicaStage.LEAVING)
