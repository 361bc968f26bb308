"""API keys: what people and programs show to be let in."""

from __future__ import annotations

from corral.client.caller import Caller, segment
from corral.contract.admin import CreateJoinToken, CreateKey, JoinTokenCreated, JoinTokenView, KeyCreated, KeyView


class Keys:
    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def list(self) -> tuple[KeyView, ...]:
        return await self._caller.call("GET", "/api/keys", tuple[KeyView, ...])

    async def create(self, wanted: CreateKey) -> KeyCreated:
        return await self._caller.call("POST", "/api/keys", KeyCreated, wanted)

    async def revoke(self, key_id: str) -> None:
        await self._caller.call_raw("DELETE", f"/api/keys/{segment(key_id)}")


class Tokens:
    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def list(self) -> tuple[JoinTokenView, ...]:
        return await self._caller.call("GET", "/api/tokens", tuple[JoinTokenView, ...])

    async def create(self, wanted: CreateJoinToken) -> JoinTokenCreated:
        return await self._caller.call("POST", "/api/tokens", JoinTokenCreated, wanted)

    async def revoke(self, token_id: str) -> None:
        await self._caller.call_raw("DELETE", f"/api/tokens/{segment(token_id)}")
