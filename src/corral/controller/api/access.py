"""`/api/tokens`, `/api/keys`, `/api/me`: who may join and who may ask."""

from __future__ import annotations

from typing import Any

from litestar import Controller, Request, delete, get, post

from corral.contract.admin import CreateJoinToken, CreateKey, JoinTokenCreated, JoinTokenView, KeyCreated, KeyView
from corral.controller.access.join_tokens import JoinTokens
from corral.controller.access.keys import Access
from corral.controller.api.auth import admins, anybody_known, principal_of

AnyRequest = Request[Any, Any, Any]


class Tokens(Controller):
    path = "/api/tokens"
    tags = ("join tokens",)
    guards = (admins,)

    @get("/", summary="Join tokens, newest first")
    async def list_tokens(self, join_tokens: JoinTokens) -> list[JoinTokenView]:
        return await join_tokens.list_views()

    @post("/", summary="Make a join token; its secret is shown once")
    async def create(self, request: AnyRequest, join_tokens: JoinTokens, data: CreateJoinToken) -> JoinTokenCreated:
        return await join_tokens.create(data, created_by=principal_of(request).key_id)

    @delete("/{token_id:str}", status_code=204, summary="Nobody may join with this token any more")
    async def revoke(self, join_tokens: JoinTokens, token_id: str) -> None:
        await join_tokens.revoke(token_id)


class Keys(Controller):
    path = "/api/keys"
    tags = ("API keys",)
    guards = (admins,)

    @get("/", summary="API keys, newest first")
    async def list_keys(self, access: Access) -> list[KeyView]:
        return await access.list_views()

    @post("/", summary="Make an API key; its secret is shown once")
    async def create(self, access: Access, data: CreateKey) -> KeyCreated:
        return await access.create(data)

    @delete(
        "/{key_id:str}", status_code=204, summary="Revoke a key: refused within two seconds, running streams finish"
    )
    async def revoke(self, request: AnyRequest, access: Access, key_id: str) -> None:
        await access.revoke(key_id, by=principal_of(request).key_id)


@get("/api/me", guards=[anybody_known], tags=["API keys"], summary="Whose key is this?")
async def me(request: AnyRequest) -> dict[str, str]:
    principal = principal_of(request)
    return {"key_id": principal.key_id, "name": principal.name, "role": principal.role.value}


ROUTES: tuple[Any, ...] = (Tokens, Keys, me)
