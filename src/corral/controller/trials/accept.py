"""Accepts edits of models with a soak: stores an operation and a trial, which the keeper carries out (`keeper.py`)."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace

import msgspec

from corral.contract.catalogue import EditModel, InstallModel, ModelChanged
from corral.contract.models import Definition
from corral.controller.files.required_files import current_files
from corral.controller.models.edits import ModelOrigin, refuse_if_from_file, refuse_if_on_trial
from corral.controller.models.service import COUNTER as MODELS
from corral.controller.models.service import Models
from corral.controller.models.views import definition_of
from corral.controller.operations.progress import new_row
from corral.controller.operations.views import ROLLOUT
from corral.controller.replicas.load_jobs import begin
from corral.controller.replicas.snapshot import SnapshotReader, model_of, storable_job
from corral.controller.replicas.why import PlacementExplainer
from corral.controller.rollouts.options import describe_soak, parse_rollout
from corral.controller.runtime.change_feed import LOADS, RULES, ChangeFeed
from corral.controller.trials.modes import TrialMode, choose_mode
from corral.kit.errors import Conflict, Invalid, NotFound
from corral.kit.log import get_log
from corral.store.engine.transactions import Store, Transaction
from corral.store.records import (
    CONTROLLER,
    BackendRequest,
    ModelTrial,
    Rollout,
    RolloutPhase,
    RolloutSettings,
)
from corral.store.tables import (
    load_jobs,
    model_files,
    models,
    operation_nodes,
    operations,
    replicas,
    revisions,
    rollouts,
)
from corral.store.tables.models import StoredModel
from corral.store.tables.operations import Operation, StoredRequest

log = get_log(__name__)
SCOPE = "controller"  # of the operation: its row stands for the controllers, as that of a fetch does


@dataclass(frozen=True)
class _Change:
    before: StoredModel
    definition: Definition
    origin: ModelOrigin
    source: str
    settings: RolloutSettings


class Trials:
    def __init__(
        self, store: Store, models: Models, snapshots: SnapshotReader, placement: PlacementExplainer, feed: ChangeFeed
    ) -> None:
        self._store = store
        self._models = models
        self._snapshots = snapshots
        self._placement = placement
        self._feed = feed

    async def edit(self, model_id: str, request: EditModel, *, by: str = "", dry_run: bool = False) -> ModelChanged:
        """Like `Models.edit`, but the new revision is tried first."""
        _refuse_recreate(recreate=request.recreate)
        settings = _settings(request)
        async with self._store.read() as tx:
            before, definition = await self._models.read_edit(tx, model_id, request)
        change = _Change(before, definition, ModelOrigin(before.origin), before.source, settings)
        if definition.revision == before.revision:
            if dry_run:
                return _without_trial(before)
            return await self._models.edit(model_id, request)
        return await self._begin(change, by=by, dry_run=dry_run)

    async def install(self, request: InstallModel, *, by: str = "", dry_run: bool = False) -> ModelChanged:
        """Like `Models.install` with `replace`, but the new revision is tried first."""
        _refuse_recreate(recreate=request.recreate)
        settings = _settings(request)
        definition, origin, source = await self._models.resolve_request(request)
        async with self._store.read() as tx:
            before = await models.find(tx, definition.name)
            refuse_if_from_file(before)
            refuse_if_on_trial(await rollouts.find_trial(tx, definition.name))
        if before is None:
            raise Invalid(f"there is no model {definition.name} yet that a new revision could be compared with")
        if not request.replace:
            raise Conflict(f"there is a model {definition.name} already: replace it, or give this another name")
        if definition.revision == before.revision:
            return _without_trial(before) if dry_run else await self._models.install(request, by=by)
        return await self._begin(_Change(before, definition, origin, source, settings), by=by, dry_run=dry_run)

    async def _begin(self, change: _Change, *, by: str, dry_run: bool) -> ModelChanged:
        name, definition = change.definition.name, change.definition
        old = definition_of(change.before)
        if old is None or old.alias or definition.alias:
            raise Invalid(f"{name} is an alias, or was never usable: nothing serves it that could be compared")
        if old.disabled or definition.disabled:
            raise Invalid(f"{name} is disabled: no request would show what its new revision does")
        if not definition.backend:
            raise Invalid(f"the new definition of {name} names no backend, so nothing can serve it")
        if unknown := await self._models.notes_on_backend(definition):
            raise Invalid(f"the new revision of {name} could not be tried: {unknown[0]}")
        mode = await self._choose_mode(change, old)
        notes = (mode.plan, *await self._models.notes(definition))
        soak = describe_soak(change.settings)
        if dry_run:
            return ModelChanged(
                name, change.before.revision, False, f"{name}: the new revision would soak for {soak}", False, notes
            )
        async with self._models.changing(also=RULES) as tx:
            present = await models.find(tx, name)
            if present is None:
                raise NotFound(f"{name} was deleted meanwhile")
            refuse_if_on_trial(await rollouts.find_trial(tx, name))
            if present.row_version != change.before.row_version:
                raise Conflict(f"{name} was changed meanwhile: read it again")
            operation = await self._store_trial(tx, change, mode, by)
        log.info("revision on trial", model=name, operation=operation.id, in_place=mode.in_place, by=by)
        self._feed.notify(MODELS, name)
        self._feed.notify("operations", operation.id)
        message = f"{name}: the new revision {definition.revision[:8]} is on trial, {soak}"
        return ModelChanged(name, definition.revision, False, message, True, notes, rollout_id=operation.id)

    async def _choose_mode(self, change: _Change, old: Definition) -> TrialMode:
        definition = change.definition
        world = await self._placement.world([definition.backend, old.backend])
        async with self._store.read() as tx:
            files = await model_files.list_of(tx, definition.name)
        stored = current_files(definition, files)
        present = world.models[definition.name]
        memory = self._snapshots.memory(definition, stored, ())
        new = replace(model_of(definition, definition.revision, memory, stored), schedule=present.schedule)
        return choose_mode(world, present, new, old, definition)

    async def _store_trial(self, tx: Transaction, change: _Change, mode: TrialMode, by: str) -> Operation:
        before, definition = change.before, change.definition
        now = await tx.now()
        operation = Operation(
            id=str(uuid.uuid4()),
            kind=ROLLOUT,
            backend=before.id,
            scope_kind=SCOPE,
            scope_value="",
            generation=0,
            created_at=now,
            request=StoredRequest(BackendRequest(before.id), rollout=change.settings),
            created_by=by,
        )
        trial = ModelTrial(
            revision=definition.revision,
            old_revision=before.revision,
            definition=definition.whole,
            old_definition=before.definition,
            origin=change.origin,
            old_origin=before.origin,
            source=change.source,
            old_source=before.source,
            in_place=mode.in_place,
            plan=mode.plan,
        )
        await operations.insert(tx, operation)
        row = new_row(operation.id, CONTROLLER, CONTROLLER, now)
        await operation_nodes.put(tx, [msgspec.structs.replace(row, version=definition.revision[:12])])
        rollout = Rollout(
            operation_id=operation.id,
            generation=0,
            subject=before.id,
            phase=RolloutPhase.FETCHING,
            settings=change.settings,
            started_at=now,
            trial=trial,
        )
        await rollouts.put(tx, rollout)
        if mode.in_place:
            await self._models.write(tx, before, definition, origin=change.origin, source=change.source, by=by)
            if await replicas.list_(tx, model=before.id):  # something serves it, so clients use it: switch now
                job = await load_jobs.find(tx, before.id)
                await load_jobs.put(tx, [storable_job(begin(before.id, definition.revision, now, job))])
                await revisions.bump(tx, LOADS)
        for counter in (MODELS, "operations"):
            await revisions.bump(tx, counter)
        return operation


def _settings(request: EditModel | InstallModel) -> RolloutSettings:
    return parse_rollout(
        soak=request.soak,
        max_errors=request.max_errors,
        max_slowdown=request.max_slowdown,
        min_requests=request.min_requests,
    )


def _refuse_recreate(*, recreate: bool) -> None:
    if recreate:
        raise Invalid("recreate stops the old replicas at once, and a soak compares the new ones with them: choose one")


def _without_trial(before: StoredModel) -> ModelChanged:
    note = "the change means nothing to a replica: it is stored at once, without a soak"
    return ModelChanged(before.id, before.revision, False, f"{before.id} keeps its revision", False, (note,))
