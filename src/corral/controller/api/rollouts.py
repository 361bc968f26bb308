"""`/api/rollouts/…`: upgrades that proceed by hardware class: their state and figures, and how people steer them
(docs/reference/rollouts.md)."""

from __future__ import annotations

from typing import Annotated, Any

from litestar import Controller, Request, get, post
from litestar.params import Parameter

from corral.contract.admin import Steered
from corral.contract.rollouts import RolloutList, RolloutView
from corral.controller.api.auth import admins, principal_of, viewers
from corral.controller.operations.rollouts import Rollouts

AnyRequest = Request[Any, Any, Any]
Id = Annotated[str, Parameter(max_length=100, description="Id of the operation")]
Limit = Annotated[int, Parameter(ge=1, le=1000, description="Maximum number of entries")]


class RolloutRoutes(Controller):
    path = "/api/rollouts"
    tags = ("operations",)
    guards = (viewers,)

    @get("/", summary="List rollouts, newest first, without the figures over time")
    async def list_rollouts(self, rollouts: Rollouts, limit: Limit = 50) -> RolloutList:
        return RolloutList(tuple(await rollouts.list_views(limit=limit)))

    @get("/{operation_id:str}", summary="Get a rollout: hardware classes, canaries, figures of both builds, verdict")
    async def show(self, rollouts: Rollouts, operation_id: Id) -> RolloutView:
        return await rollouts.view(operation_id)

    @post(
        "/{operation_id:str}/pause",
        guards=(admins,),
        status_code=200,
        summary="Pause a rollout: no further node switches, and soaks make no progress",
    )
    async def pause(self, request: AnyRequest, rollouts: Rollouts, operation_id: Id) -> Steered:
        return Steered(True, await rollouts.pause(operation_id, by=principal_of(request).name), operation_id)

    @post("/{operation_id:str}/resume", guards=(admins,), status_code=200, summary="Resume a paused rollout")
    async def resume(self, rollouts: Rollouts, operation_id: Id) -> Steered:
        return Steered(True, await rollouts.resume(operation_id), operation_id)

    @post(
        "/{operation_id:str}/promote",
        guards=(admins,),
        status_code=200,
        summary="Promote a rollout: end its soaks now and let the other nodes follow",
    )
    async def promote(self, request: AnyRequest, rollouts: Rollouts, operation_id: Id) -> Steered:
        return Steered(True, await rollouts.promote(operation_id, by=principal_of(request).name), operation_id)

    @post(
        "/{operation_id:str}/abort",
        guards=(admins,),
        status_code=200,
        summary="Abort a rollout: nodes that have switched return to their previous version",
    )
    async def abort(self, request: AnyRequest, rollouts: Rollouts, operation_id: Id) -> Steered:
        return Steered(True, await rollouts.abort(operation_id, by=principal_of(request).name), operation_id)
