"""Loads and replicas by HTTP: `/internal/loads` for gateways, `/api/models/{id}/…` for users."""

from __future__ import annotations

from typing import Annotated, Any

from litestar import Controller, Request, Response, get, post
from litestar.params import Parameter

from corral.contract.codec import Message, encode
from corral.contract.loads import AskForLoad, LoadState, LoadStatus
from corral.controller.api.auth import admins, anybody_known, gateways, principal_of, viewers
from corral.controller.api.path_segments import whole_name
from corral.controller.models.service import Models
from corral.controller.registry.nodes import NodeAdmin
from corral.controller.replicas.listing import ReplicaListing
from corral.controller.replicas.loads import LoadService
from corral.kit.errors import Invalid, NotFound

AnyRequest = Request[Any, Any, Any]
Since = Annotated[int, Parameter(ge=0, description="Answer when the version is higher than this")]
Wait = Annotated[float, Parameter(ge=0, le=60, description="Seconds to wait for a higher version")]
Force = Annotated[bool, Parameter(description="Stop the replica although it serves requests")]


class UnloadBody(Message, frozen=True):
    model_name: str = ""


@post("/internal/loads", guards=[gateways], status_code=202, include_in_schema=False)
async def ask_for_load(request: AnyRequest, loads: LoadService, data: AskForLoad) -> Response[bytes]:
    if not data.model:
        raise Invalid("say which model")
    # A request that waits for a model must not install it again after a user has deleted it.
    return _status(await loads.request(data.model, by=principal_of(request).name, install=False), 202)


@get("/internal/loads/{model:str}", guards=[gateways], include_in_schema=False)
async def load_status(loads: LoadService, model: str, since: Since = 0, wait_s: Wait = 0.0) -> Response[bytes]:
    name = whole_name(model)
    found = await loads.wait(name, since=since, wait_s=wait_s)
    if found is None:
        raise NotFound(f"{name} is not being loaded")
    return _status(found, 200)


class ModelLoads(Controller):
    path = "/api/models/{model:str}"
    tags = ("models",)

    @get(
        "/load-status",
        guards=(anybody_known,),
        summary="Get the progress of a model's load; 404 if the model is not being loaded",
    )
    async def load_status(
        self, request: AnyRequest, loads: LoadService, models: Models, model: str, since: Since = 0, wait_s: Wait = 0.0
    ) -> LoadStatus:
        name = whole_name(model)
        if not principal_of(request).may_use(name):  # as under /v1: whether there is such a model is not its business
            raise NotFound(f"{name} is not being loaded")
        found = await loads.wait(await _meant(models, name), since=since, wait_s=wait_s, current=True)
        if found is None or (found.state == LoadState.LOADED and not since):
            raise NotFound(f"{name} is not being loaded")
        return found

    @post(
        "/load",
        guards=(admins,),
        status_code=202,
        summary="Load a replica of a model; installs the model from a gallery if it is missing",
    )
    async def load(self, request: AnyRequest, loads: LoadService, model: str) -> LoadStatus:
        return await loads.request(whole_name(model), by=principal_of(request).name, current=True)

    @post(
        "/unload", guards=(admins,), status_code=200, summary="Unload a model; its replicas finish their requests first"
    )
    async def unload(
        self, request: AnyRequest, loads: LoadService, models: Models, model: str, force: Force = False
    ) -> dict[str, Any]:
        name = await _meant(models, whole_name(model))
        ended = await loads.unload(name, force=force, by=principal_of(request).name)
        return {"message": f"{ended} replica{'s' if ended != 1 else ''} will end", "replicas": ended}

    @get("/replicas", guards=(viewers,), summary="List the replicas of a model with node, state and activity")
    async def replicas(self, replica_rows: ReplicaListing, models: Models, model: str) -> list[dict[str, Any]]:
        return await replica_rows.list_(model=await _meant(models, whole_name(model)))


class NodeModels(Controller):
    path = "/api/nodes"
    tags = ("replicas",)
    guards = (viewers,)

    @get("/models", summary="List the replicas that can answer now")
    async def all_models(self, replica_rows: ReplicaListing) -> list[dict[str, Any]]:
        return await replica_rows.list_(answering=True)

    @get("/{node:str}/models", summary="List the replicas on a node, in any state")
    async def models(self, nodes: NodeAdmin, replica_rows: ReplicaListing, node: str) -> list[dict[str, Any]]:
        return await replica_rows.list_(node_id=(await nodes.view(node)).id)

    @post("/{node:str}/models/unload", guards=(admins,), status_code=200, summary="Unload a model on a node")
    async def unload(
        self, request: AnyRequest, nodes: NodeAdmin, loads: LoadService, node: str, data: UnloadBody
    ) -> dict[str, str]:
        await self._unload(request, nodes, loads, node, data)
        return {"message": "model unloaded"}

    @post(
        "/{node:str}/models/delete",
        guards=(admins,),
        status_code=200,
        summary="Unload a model on a node; its files stay",
    )
    async def delete(
        self, request: AnyRequest, nodes: NodeAdmin, loads: LoadService, node: str, data: UnloadBody
    ) -> dict[str, str]:
        await self._unload(request, nodes, loads, node, data)
        return {"message": "model deleted from node"}

    async def _unload(
        self, request: AnyRequest, nodes: NodeAdmin, loads: LoadService, node: str, data: UnloadBody
    ) -> None:
        if not data.model_name:
            raise Invalid("say which model: model_name")
        node_id = (await nodes.view(node)).id
        await loads.unload(data.model_name, node_id=node_id, by=principal_of(request).name)


ROUTES = (ask_for_load, load_status, ModelLoads, NodeModels)


async def _meant(models: Models, name: str) -> str:
    """The model that an alias names: only the model itself is loaded and has replicas."""
    definition = await models.definition(name)
    return name if definition is None else definition.alias or name


def _status(status: LoadStatus, code: int) -> Response[bytes]:
    return Response(encode(status), status_code=code, media_type="application/json")
