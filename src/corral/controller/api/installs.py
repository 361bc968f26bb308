"""`/api/model-plans`: what an install from a source would do. `uploads.py` takes the files of a caller's machine."""

from __future__ import annotations

from litestar import Controller, post

from corral.contract.installs import InstallPlan, PlanModel
from corral.controller.api.auth import admins
from corral.controller.install.planner import InstallPlanner


class InstallRoutes(Controller):
    path = "/api/model-plans"
    tags = ("models",)
    # Not for viewers: the controller asks servers that the caller names.
    guards = (admins,)

    @post("/", status_code=200, summary="Plan an install: the definition, the quantisation, and where it fits")
    async def plan(self, planner: InstallPlanner, data: PlanModel) -> InstallPlan:
        return await planner.plan(data)
