"""Releases of Corral, the key that signs them, and the upgrade of the fleet."""

from __future__ import annotations

from corral.client.connection import ApiConnection
from corral.contract.releases import (
    AddRelease,
    ChangeReleaseKey,
    FleetUpgradePlan,
    ReleaseList,
    ReleaseView,
    UpgradeFleet,
)

_ASK_NODES_S = 60.0


class ReleasesApi:
    def __init__(self, api: ApiConnection) -> None:
        self._api = api

    async def list(self) -> ReleaseList:
        """Newest first."""
        return await self._api.call("GET", "/api/fleet/releases", ReleaseList)

    async def add(self, sha256: str, *, signed: str = "") -> ReleaseView:
        """After the wheel was uploaded."""
        return await self._api.call("POST", "/api/fleet/releases", ReleaseView, AddRelease(sha256, signed))

    async def change_key(self, public_key: str, *, proof: str = "", is_lost: bool = False) -> ReleaseList:
        request = ChangeReleaseKey(public_key, proof, is_lost, is_new=not public_key)
        return await self._api.call("PUT", "/api/fleet/release-key", ReleaseList, request)

    async def upgrade(self, request: UpgradeFleet) -> FleetUpgradePlan:
        """The plan; with an operation unless it is a dry run."""
        return await self._api.call("POST", "/api/fleet/upgrade", FleetUpgradePlan, request, timeout_s=_ASK_NODES_S)
