"""Why models are, or are not, where they are."""

from __future__ import annotations

from corral.client.caller import Caller, segment
from corral.contract.why import WhyModel, WhyNode


class Why:
    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def model(self, name: str) -> WhyModel:
        return await self._caller.call("GET", f"/api/why/models/{segment(name)}", WhyModel)

    async def node(self, id_or_name: str) -> WhyNode:
        return await self._caller.call("GET", f"/api/why/nodes/{segment(id_or_name)}", WhyNode)
