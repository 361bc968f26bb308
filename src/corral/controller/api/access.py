"""`/api/tokens`, `/api/keys`, `/api/me`: join tokens, API keys, and the key of the caller."""

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

    @get("/", summary="List join tokens, newest first")
    async def list_tokens(self, join_tokens: JoinTokens) -> list[JoinTokenView]:
        return await join_tokens.list_views()

    @post("/", summary="Create a join token; the secret is shown once")
    async def create(self, request: AnyRequest, join_tokens: JoinTokens, data: CreateJoinToken) -> JoinTokenCreated:
        return await join_tokens.create(data, created_by=principal_of(request).key_id)

    @delete("/{token_id:str}", status_code=204, summary="Revoke a join token")
    async def revoke(self, join_tokens: JoinTokens, token_id: str) -> None:
        await join_tokens.revoke(token_id)


class Keys(Controller):
    path = "/api/keys"
    tags = ("API keys",)
    guards = (admins,)

    @get("/", summary="List API keys, newest first")
    async def list_keys(self, access: Access) -> list[KeyView]:
        return await access.list_views()

    @post("/", summary="Create an API key; the secret is shown once")
    async def create(self, access: Access, data: CreateKey) -> KeyCreated:
        return await access.create(data)

    @delete(
        "/{key_id:str}",
        status_code=204,
        summary="Revoke an API key; it is refused within two seconds, running streams finish",
    )
    async def revoke(self, request: AnyRequest, access: Access, key_id: str) -> None:
        await access.revoke(key_id, by=principal_of(request).key_id)


@get("/api/me", guards=[anybody_known], tags=["API keys"], summary="Get the name and role of the caller's key")
async def me(request: AnyRequest) -> dict[str, str]:
    principal = principal_of(request)
    return {"key_id": principal.key_id, "name": principal.name, "role": principal.role.value}


ROUTES: tuple[Any, ...] = (Tokens, Keys, me)
