"""Accepts load and unload requests of gateways and users. It only stores them; the reconciler carries them out.

One row per model: a hundred requests for the same cold model cause one load, and all wait for it.
"""

from __future__ import annotations

from datetime import datetime

from msgspec.structs import replace

from corral.contract.loads import LoadState, LoadStatus
from corral.contract.models import Definition
from corral.controller.inventory.installed import find_installed
from corral.controller.inventory.routing import read_routing
from corral.controller.models.service import Models
from corral.controller.models.suggestions import unknown_model
from corral.controller.replicas import load_jobs as jobs
from corral.controller.replicas.lifecycle import mark_leaving
from corral.controller.replicas.load_jobs import NOT_INSTALLED, Cooldown
from corral.controller.replicas.snapshot import read_desired, storable_job, storable_replica
from corral.controller.runtime.change_feed import INVENTORY, LOADS, REPLICAS, ChangeFeed
from corral.kit.clock import Clock
from corral.kit.errors import Conflict, NotFound
from corral.kit.log import get_log
from corral.store.engine.transactions import Store, Transaction
from corral.store.records import LoadJob, ReplicaStage
from corral.store.tables import load_jobs, model_schedules, models, node_backends, replicas, revisions

log = get_log(__name__)


class LoadService:
    def __init__(
        self, store: Store, models: Models, feed: ChangeFeed, clock: Clock, *, cooldown: Cooldown | None = None
    ) -> None:
        self._store = store
        self._models = models
        self._feed = feed
        self._clock = clock
        self._cooldown = cooldown or Cooldown()

    async def request(self, name: str, *, by: str = "", install: bool = True, current: bool = False) -> LoadStatus:
        """Request a replica of the model. Raises NotFound, with similar names. `install`: also a model that the fleet
        does not have yet. `current`: replicas of an earlier definition do not count."""
        definition = await self._models.ensure(name, by=by, install=install)
        model = definition.name
        if definition.disabled:
            raise NotFound(f"the model {model} is disabled; `corral models edit {model} --unset disabled` enables it")
        known = await self._known(definition, current=current)
        if known is not None:
            return known
        async with self._store.write() as tx:
            now, before = await tx.now(), await load_jobs.find(tx, model)
            if before is not None and await _is_valid(tx, before, definition, now, current=current):
                return jobs.status_of(before, now)
            job = jobs.begin(model, definition.revision, now, before)
            if before is None and not await load_jobs.claim(tx, storable_job(job)):
                return jobs.status_of(job, now)  # a concurrent request began the same load
            await load_jobs.put(tx, [storable_job(job)])
            await revisions.bump(tx, LOADS)
        log.info("load requested", model=model, by=by)
        self._feed.notify(LOADS, model)
        return jobs.status_of(job, now)

    async def find(self, model: str, *, current: bool = False) -> LoadStatus | None:
        """None: it is not being loaded and has no ready replica."""
        async with self._store.read() as tx:
            return await self._find(tx, model, current=current)

    async def wait(
        self, model: str, *, since: int = 0, wait_s: float = 0.0, current: bool = False
    ) -> LoadStatus | None:
        """Return as soon as the version is newer than `since`, or when the time is over."""
        return await self._feed.read_until(
            (LOADS, REPLICAS, INVENTORY),
            lambda: self.find(model, current=current),
            lambda found: found is None or found.version > since,
            timeout_s=wait_s,
        )

    async def list_(self, *, past: bool = False) -> list[LoadStatus]:
        """Active loads and recent failures; with `past` also failures that can be retried by now and are still
        stored."""
        async with self._store.read() as tx:
            now = await tx.now()
            known = await load_jobs.list_(tx)
        return [jobs.status_of(job, now) for job in known if past or jobs.is_listed(job, now, self._cooldown)]

    async def unload(self, model: str, *, node_id: str = "", force: bool = False, by: str = "") -> int:
        """Stop the model's replicas after their requests; with `force`, at once. Returns how many. Raises Conflict
        where a schedule would start them again, NotFound when there is none."""
        async with self._store.write() as tx:
            rows, known = await read_desired(tx)
            now = await tx.now()
            own = [row for row in rows if row.model == model and node_id in ("", row.node_id)]
            schedule = await model_schedules.find(tx, model)
            if schedule is not None and (schedule.min_replicas or schedule.spread_all) and not node_id:
                raise Conflict(f"the schedule of {model} requires replicas: change its schedule first")
            if not own and model not in known:
                if await models.find(tx, model) is None:
                    raise NotFound(unknown_model(model, await models.list_ids(tx)))
                host = "there" if node_id else "anywhere"
                raise NotFound(f"no replica of {model} runs {host}")
            ordered = [row for row in own if row.stage is not ReplicaStage.PLACED]
            await replicas.delete(tx, [row for row in own if row.stage is ReplicaStage.PLACED])
            await replicas.put(
                tx, [storable_replica(mark_leaving(row, "a user unloaded it", now, force=force)) for row in ordered]
            )
            if not node_id:
                await load_jobs.delete(tx, [model])
            await revisions.bump(tx, LOADS)
            await revisions.bump(tx, REPLICAS)
        log.info("model unloaded", model=model, node_id=node_id, replicas=len(own), by=by)
        self._feed.notify(LOADS, model)
        self._feed.notify(REPLICAS, model)
        return len(own)

    async def _known(self, definition: Definition, *, current: bool) -> LoadStatus | None:
        """The status when no new load is needed: it is loaded, being loaded, or in its cooldown."""
        model = definition.name
        async with self._store.read() as tx:
            now, job = await tx.now(), await load_jobs.find(tx, model)
            answering = await self._answering(tx, model)
            is_valid = job is not None and await _is_valid(tx, job, definition, now, current=current)
        if definition.revision in answering or (answering and not current):
            return _loaded(model, now)
        if job is None or not is_valid:
            return None
        return _with_serving(jobs.status_of(job, now), answering)

    async def _find(self, tx: Transaction, model: str, *, current: bool) -> LoadStatus | None:
        now, job = await tx.now(), await load_jobs.find(tx, model)
        if job is not None and job.active:
            return jobs.status_of(job, now)
        answering = await self._answering(tx, model)
        known = await models.find(tx, model) if current and answering else None
        if answering and (known is None or known.revision in answering):
            return _loaded(model, now)
        if job is None or not jobs.is_listed(job, now, self._cooldown):
            return None
        return _with_serving(jobs.status_of(job, now), answering)

    async def _answering(self, tx: Transaction, model: str) -> set[str]:
        """The revisions that have a routable replica."""
        shown, _ = await read_routing(tx, model)
        return {replica.revision for replica in shown}


def _with_serving(status: LoadStatus, answering: set[str]) -> LoadStatus:
    """Add to a failed load that replicas of an earlier definition still serve requests."""
    if status.state != LoadState.FAILED or not answering:
        return status
    return replace(status, error=f"{status.error}\nreplicas of the definition before the edit still serve requests")


async def _is_valid(tx: Transaction, job: LoadJob, definition: Definition, now: datetime, *, current: bool) -> bool:
    """Whether the load is active, or failed too recently to be retried. A job of an earlier definition does not count
    if it failed, nor, with `current`, if it is active."""
    same = job.revision == definition.revision
    if job.active:
        return same or not current
    return same and not job.may_try(now) and not await _has_its_backend(tx, job)


async def _has_its_backend(tx: Transaction, job: LoadJob) -> bool:
    """Whether a backend is there by now that could not be installed: whoever has mended that need not wait."""
    for node_id, error in job.failed_on.items():
        backend, lacked, _ = error.partition(NOT_INSTALLED)
        inventory = await node_backends.find(tx, node_id) if lacked else None
        if inventory is not None and find_installed(inventory.backends, backend) is not None:
            return True
    return False


def _loaded(model: str, now: datetime) -> LoadStatus:
    return replace(LoadStatus(model, LoadState.LOADED), progress=100.0, version=int(now.timestamp() * 1000))
