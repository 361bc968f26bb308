"""Join tokens: what a new machine shows once to become a node."""

from __future__ import annotations

from corral.client.caller import Caller, segment
from corral.contract.admin import CreateJoinToken, JoinTokenCreated, JoinTokenView


class Tokens:
    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def list(self) -> tuple[JoinTokenView, ...]:
        return await self._caller.call("GET", "/api/tokens", tuple[JoinTokenView, ...])

    async def create(self, wanted: CreateJoinToken) -> JoinTokenCreated:
        return await self._caller.call("POST", "/api/tokens", JoinTokenCreated, wanted)

    async def revoke(self, token_id: str) -> None:
        await self._caller.call_raw("DELETE", f"/api/tokens/{segment(token_id)}")
