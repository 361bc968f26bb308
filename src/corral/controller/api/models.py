"""`/api/models/…`: the catalogue of models, and `/api/nodes/scheduling`: how many replicas of each, and where.

A name with a slash in it is one segment of the path when the slash is written %2F (`api/segments.py`).
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from litestar import Controller, Request, delete, get, patch, post, put
from litestar.params import Parameter

from corral.contract.admin import JobAccepted
from corral.contract.catalogue import (
    AvailableModel,
    CollectedView,
    EditModel,
    InstallModel,
    ModelChanged,
    ModelFilesView,
    ModelView,
    ScheduleBody,
    ScheduleView,
    StageBody,
)
from corral.controller.api.auth import admins, principal_of, viewers
from corral.controller.api.path_segments import whole_name
from corral.controller.files.fetches import Fetches
from corral.controller.install.catalogue_fits import CatalogueFits
from corral.controller.install.planner import InstallPlanner
from corral.controller.models.schedules import Schedules
from corral.controller.models.service import Models
from corral.controller.operations.service import Operations
from corral.controller.staging.cleanup import FleetCleanup
from corral.controller.staging.locations import FileLocations
from corral.controller.staging.stages import Stages
from corral.controller.trials.accept import Trials
from corral.kit.errors import Invalid

AnyRequest = Request[Any, Any, Any]
Term = Annotated[
    str, Parameter(max_length=200, description="Only entries with these words in name, description or tags")
]
DryRun = Annotated[bool, Parameter(description="Remove nothing; the response says what would be removed")]
Plan = Annotated[bool, Parameter(description="With a soak: change nothing; the response says what would be done")]
PlanInstall = Annotated[bool, Parameter(description="Change nothing; the response says what would be done")]
Force = Annotated[bool, Parameter(description="Although aliases refer to the model or a file defines it")]


class ModelRoutes(Controller):
    path = "/api/models"
    tags = ("models",)
    guards = (viewers,)

    @get("/", summary="List models by name")
    async def list_models(self, models: Models) -> list[ModelView]:
        return await models.list_views()

    @get("/available", summary="List the models in the galleries")
    async def available(self, models: Models, fits: CatalogueFits, term: Term = "") -> list[AvailableModel]:
        return await fits.add_to(await models.available(term))

    @get("/available/{model:str}", summary="Get a gallery entry with the definition that an install would create")
    async def show_available(self, models: Models, fits: CatalogueFits, model: str) -> AvailableModel:
        return (await fits.add_to([await models.available_one(whole_name(model))]))[0]

    @post(
        "/gc",
        guards=(admins,),
        status_code=200,
        summary="Remove model files that no model needs, on this controller and on all nodes",
    )
    async def collect(self, request: AnyRequest, cleanup: FleetCleanup, dry_run: DryRun = False) -> CollectedView:
        return await cleanup.run(dry_run=dry_run, by=principal_of(request).name)

    @get("/{model:str}/files", summary="List the files of a model, and how much of them each node has")
    async def list_files(self, models: Models, locations: FileLocations, model: str) -> ModelFilesView:
        return await locations.view(await models.meant(whole_name(model)))

    @post(
        "/{model:str}/stage",
        guards=(admins,),
        status_code=202,
        summary="Bring the files of a model to all nodes, some, or one, before a load needs them",
    )
    async def stage(
        self, request: AnyRequest, models: Models, operations: Operations, stages: Stages, model: str, data: StageBody
    ) -> JobAccepted:
        scope = await operations.scope(node=data.node, selector=data.selector)
        name = await models.meant(whole_name(model))
        job_id = await stages.request(name, scope, by=principal_of(request).name)
        return JobAccepted(job_id, f"files of {name} are being staged", status_url=f"/api/operations/{job_id}")

    @get("/{model:str}", summary="Get a model with its definition")
    async def show(self, models: Models, model: str) -> ModelView:
        return await models.view(whole_name(model))

    @post("/", guards=(admins,), summary="Install a model from a gallery, from a source, or by its definition")
    async def install(
        self,
        request: AnyRequest,
        models: Models,
        trials: Trials,
        fetches: Fetches,
        planner: InstallPlanner,
        data: InstallModel,
        plan: PlanInstall = False,
    ) -> ModelChanged:
        by = principal_of(request).name
        if data.source and not data.definition and not data.text:
            data = await planner.resolve(data)
        if data.soak:
            return await trials.install(data, by=by, dry_run=plan)
        _refuse_without_soak(data, plan=False)
        if plan:
            return await models.plan_install(data)
        changed = await models.install(data, by=by)
        if not data.fetch:
            return changed
        return msgspec.structs.replace(changed, job_id=await fetches.request(changed.id, by=by))

    @put("/{model:str}", guards=(admins,), summary="Replace the definition of a model")
    async def replace(
        self, request: AnyRequest, models: Models, trials: Trials, model: str, data: EditModel, plan: Plan = False
    ) -> ModelChanged:
        if data.changes:
            raise Invalid("changes are for PATCH; PUT takes a whole definition")
        return await _edit(request, models, trials, model, data, plan=plan)

    @patch("/{model:str}", guards=(admins,), summary="Change keys of a model's definition; null removes a key")
    async def change(
        self, request: AnyRequest, models: Models, trials: Trials, model: str, data: EditModel, plan: Plan = False
    ) -> ModelChanged:
        if not data.changes:
            raise Invalid('say which keys change: {"changes": {…}}')
        return await _edit(request, models, trials, model, data, plan=plan)

    @delete(
        "/{model:str}",
        guards=(admins,),
        status_code=200,
        summary="Delete a model; its replicas finish their requests first",
    )
    async def remove(self, models: Models, model: str, force: Force = False) -> ModelChanged:
        return await models.delete(whole_name(model), force=force)


async def _edit(
    request: AnyRequest, models: Models, trials: Trials, model: str, data: EditModel, *, plan: bool
) -> ModelChanged:
    if data.soak:
        return await trials.edit(whole_name(model), data, by=principal_of(request).name, dry_run=plan)
    _refuse_without_soak(data, plan=plan)
    return await models.edit(whole_name(model), data)


def _refuse_without_soak(data: EditModel | InstallModel, *, plan: bool) -> None:
    if plan or data.max_errors or data.max_slowdown or data.min_requests:
        raise Invalid("limits and plan are for a soak: say how long it takes, for example soak 5m")


class ScheduleRoutes(Controller):
    path = "/api/nodes/scheduling"
    tags = ("models",)
    guards = (viewers,)

    @get("/", summary="List the schedules of models")
    async def list_schedules(self, schedules: Schedules) -> list[ScheduleView]:
        return await schedules.list_views()

    @get("/{model:str}", summary="Get a model's schedule: the number of replicas and their nodes")
    async def show(self, schedules: Schedules, model: str) -> ScheduleView:
        return await schedules.view(whole_name(model))

    @post("/", guards=(admins,), status_code=200, summary="Set a model's schedule")
    async def put_schedule(self, schedules: Schedules, data: ScheduleBody) -> ScheduleView:
        return await schedules.put(data)

    @delete(
        "/{model:str}",
        guards=(admins,),
        status_code=204,
        summary="Delete a model's schedule: as many replicas as requests need, on any node",
    )
    async def remove(self, schedules: Schedules, model: str) -> None:
        await schedules.delete(whole_name(model))
