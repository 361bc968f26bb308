"""`/api/fleet/…`: releases of Corral, the key that signs them, and the upgrade of the fleet to one of them."""

from __future__ import annotations

from typing import Any

from litestar import Controller, Request, get, post, put

from corral.contract.releases import (
    AddRelease,
    ChangeReleaseKey,
    FleetUpgradePlan,
    ReleaseList,
    ReleaseView,
    UpgradeFleet,
)
from corral.controller.api.auth import admins, principal_of
from corral.controller.releases.service import Releases

AnyRequest = Request[Any, Any, Any]


class ReleaseRoutes(Controller):
    path = "/api/fleet"
    tags = ("fleet",)
    guards = (admins,)

    @get("/releases", summary="List releases of Corral, newest first, and the key that signs them")
    async def list_releases(self, releases: Releases) -> ReleaseList:
        return await releases.list_()

    @post("/releases", summary="Make a release of a wheel that was uploaded; the controller signs it if it has the key")
    async def add(self, request: AnyRequest, releases: Releases, data: AddRelease) -> ReleaseView:
        return await releases.add(data, by=principal_of(request).name)

    @put("/release-key", summary="Let another key sign releases; the controllers forget the one that they had")
    async def change_key(self, request: AnyRequest, releases: Releases, data: ChangeReleaseKey) -> ReleaseList:
        return await releases.change_key(data, by=principal_of(request).name)

    @post("/upgrade", status_code=200, summary="Upgrade Corral on the nodes of the fleet, or only plan it")
    async def upgrade(self, request: AnyRequest, releases: Releases, data: UpgradeFleet) -> FleetUpgradePlan:
        return await releases.upgrade(data, by=principal_of(request).name)
