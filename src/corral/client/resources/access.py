"""API keys of users and programs, and join tokens of new machines."""

from __future__ import annotations

from corral.client.connection import ApiConnection, segment
from corral.contract.admin import CreateJoinToken, CreateKey, JoinTokenCreated, JoinTokenView, KeyCreated, KeyView


class Keys:
    def __init__(self, api: ApiConnection) -> None:
        self._api = api

    async def list(self) -> tuple[KeyView, ...]:
        return await self._api.call("GET", "/api/keys", tuple[KeyView, ...])

    async def create(self, request: CreateKey) -> KeyCreated:
        return await self._api.call("POST", "/api/keys", KeyCreated, request)

    async def revoke(self, key_id: str) -> None:
        await self._api.call_raw("DELETE", f"/api/keys/{segment(key_id)}")


class Tokens:
    def __init__(self, api: ApiConnection) -> None:
        self._api = api

    async def list(self) -> tuple[JoinTokenView, ...]:
        return await self._api.call("GET", "/api/tokens", tuple[JoinTokenView, ...])

    async def create(self, request: CreateJoinToken) -> JoinTokenCreated:
        return await self._api.call("POST", "/api/tokens", JoinTokenCreated, request)

    async def revoke(self, token_id: str) -> None:
        await self._api.call_raw("DELETE", f"/api/tokens/{segment(token_id)}")
