"""Rollouts: upgrades that proceed by hardware class, and how to steer them (docs/reference/rollouts.md)."""

from __future__ import annotations

from corral.client.connection import ApiConnection, segment
from corral.contract.admin import Steered
from corral.contract.rollouts import RolloutList, RolloutView


class RolloutsApi:
    def __init__(self, api: ApiConnection) -> None:
        self._api = api

    async def list(self) -> tuple[RolloutView, ...]:
        """Newest first."""
        return (await self._api.call("GET", "/api/rollouts", RolloutList)).rollouts

    async def get(self, operation_id: str) -> RolloutView:
        return await self._api.call("GET", f"/api/rollouts/{segment(operation_id)}", RolloutView)

    async def steer(self, operation_id: str, action: str) -> Steered:
        """`action`: pause, resume, promote, abort."""
        return await self._api.call("POST", f"/api/rollouts/{segment(operation_id)}/{segment(action)}", Steered)
