"""The fleet as a whole: `/api/cluster` (overview), `/api/galleries`, `/api/apply` and `/api/export` (the fleet as one
file), `/api/why/…` (why a model is, or is not, where it is)."""

from __future__ import annotations

from typing import Any

from litestar import Controller, Request, get, post

from corral.contract.admin import Cluster, GalleryView
from corral.contract.fleet import ApplyBody, FleetDiff, FleetFile
from corral.contract.why import WhyModel, WhyNode, WhyOperation, WhyRollout
from corral.controller.api.auth import admins, principal_of, viewers
from corral.controller.api.overview import Overview
from corral.controller.api.path_segments import whole_name
from corral.controller.backends.gallery_status import GalleryStatus
from corral.controller.fleetfile.service import FleetFiles
from corral.controller.models.service import Models
from corral.controller.operations.rollouts import Rollouts
from corral.controller.operations.service import Operations
from corral.controller.operations.why import explain, explain_rollout
from corral.controller.registry.nodes import NodeAdmin
from corral.controller.replicas.why import PlacementExplainer


@get("/api/cluster", guards=[viewers], tags=["cluster"], summary="Get an overview of the fleet")
async def cluster(overview: Overview) -> Cluster:
    return await overview.read()


@get("/api/galleries", guards=[viewers], tags=["cluster"], summary="List galleries and which of them cannot be read")
async def galleries(gallery_status: GalleryStatus) -> list[GalleryView]:
    return await gallery_status.read()


@post("/api/apply", guards=[admins], status_code=200, tags=["fleet"], summary="Apply a fleet file")
async def apply_file(request: Request[Any, Any, Any], fleet_files: FleetFiles, data: ApplyBody) -> FleetDiff:
    return await fleet_files.apply(data, by=principal_of(request).name)


@get("/api/export", guards=[viewers], tags=["fleet"], summary="Export the fleet as a file")
async def export_file(fleet_files: FleetFiles) -> FleetFile:
    return await fleet_files.export()


class WhyRoutes(Controller):
    path = "/api/why"
    tags = ("why",)
    guards = (viewers,)

    @get("/models/{model:str}", summary="Explain where the next replica of a model would go, node by node")
    async def model(self, explaining: PlacementExplainer, models: Models, model: str) -> WhyModel:
        return await explaining.model(await models.meant(whole_name(model)))

    @get("/nodes/{node:str}", summary="Explain a node: free memory, replicas, and the models that would fit")
    async def node(self, explaining: PlacementExplainer, nodes: NodeAdmin, node: str) -> WhyNode:
        return await explaining.node((await nodes.view(node)).id)

    @get("/operations/{job_id:str}", summary="Explain an operation: what each node waits for, and how its rollout is")
    async def operation(self, operations: Operations, rollouts: Rollouts, job_id: str) -> WhyOperation:
        return explain(await operations.view(job_id), await rollouts.find_view(job_id))

    @get("/rollouts/{job_id:str}", summary="Explain a rollout: how far it is, and the figures that decide about it")
    async def rollout(self, operations: Operations, rollouts: Rollouts, job_id: str) -> WhyRollout:
        rollout = await rollouts.view(job_id)
        return explain_rollout(rollout, (await operations.view(rollout.operation_id)).nodes)


ROUTES: tuple[Any, ...] = (cluster, galleries, apply_file, export_file, WhyRoutes)
