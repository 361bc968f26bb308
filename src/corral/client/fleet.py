"""The fleet as one file."""

from __future__ import annotations

from corral.client.caller import Caller
from corral.contract.fleet import ApplyBody, FleetDiff, FleetFile

_GALLERIES_S = 120.0  # models of galleries are looked up


class FleetFiles:
    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def apply(self, asked: ApplyBody) -> FleetDiff:
        return await self._caller.call("POST", "/api/apply", FleetDiff, asked, timeout_s=_GALLERIES_S)

    async def export(self) -> FleetFile:
        return await self._caller.call("GET", "/api/export", FleetFile)
