"""`/api/why/…`: why a model is, or is not, where it is."""

from __future__ import annotations

from litestar import Controller, get

from corral.contract.why import WhyModel, WhyNode
from corral.controller.api.auth import viewers
from corral.controller.api.path_segments import whole_name
from corral.controller.models.service import Models
from corral.controller.registry.nodes import NodeAdmin
from corral.controller.replicas.why import PlacementExplainer


class WhyRoutes(Controller):
    path = "/api/why"
    tags = ("why",)
    guards = (viewers,)

    @get("/models/{model:str}", summary="Where a model's next replica would go: every node judged, with the numbers")
    async def model(self, explaining: PlacementExplainer, models: Models, model: str) -> WhyModel:
        return await explaining.model(await models.meant(whole_name(model)))

    @get("/nodes/{node:str}", summary="What a node has left, what runs there, and which models it would take")
    async def node(self, explaining: PlacementExplainer, nodes: NodeAdmin, node: str) -> WhyNode:
        return await explaining.node((await nodes.view(node)).id)
