"""Join tokens: who may bring a machine. Each has a number of uses, an end, and perhaps approval beforehand."""

from __future__ import annotations

import re
import uuid
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta

from corral.contract.admin import CreateJoinToken, JoinTokenCreated, JoinTokenView
from corral.controller.access.gateway_trust import GatewayTrust
from corral.controller.runtime.change_feed import ChangeFeed
from corral.controller.runtime.node_views import rfc3339
from corral.kit.errors import CorralError, Invalid, NotFound, Unauthenticated
from corral.kit.log import get_log
from corral.kit.secrets import JOIN_TOKEN, digest, new_secret
from corral.store.engine.transactions import Store, Transaction
from corral.store.tables import join_tokens, revisions
from corral.store.tables.join_tokens import JoinToken

log = get_log(__name__)

InstallCommand = Callable[[str, str, str], Awaitable[str]]

_URL = re.compile(r"https?://[A-Za-z0-9.:_\[\]-]+/?\Z")  # it becomes a part of a shell command
_LONGEST_S = 10 * 365 * 86400.0


class JoinTokens:
    def __init__(
        self,
        store: Store,
        feed: ChangeFeed,
        *,
        public_url: str,
        trust: GatewayTrust,
        install_command: InstallCommand | None = None,
    ) -> None:
        """`install_command`: the command that installs Corral and joins, for the URL of the fleet, a token
        and a pin."""
        self._store = store
        self._feed = feed
        self._public_url = public_url
        self._trust = trust
        self._install_command = install_command

    async def create(self, request: CreateJoinToken, *, created_by: str) -> JoinTokenCreated:
        _check(request)
        secret = new_secret(JOIN_TOKEN)
        async with self._store.write() as tx:
            now = await tx.now()
            token = JoinToken(
                id=str(uuid.uuid4()),
                name=request.name,
                secret_hash=digest(secret),
                uses_left=request.uses,
                uses=0,
                expires_at=None if request.ttl_s is None else now + timedelta(seconds=request.ttl_s),
                pre_approved=request.pre_approved,
                created_by=created_by,
                created_at=now,
            )
            await join_tokens.insert(tx, token)
            await revisions.bump(tx, "tokens")
        log.info("join token made", token_id=token.id, uses=token.uses_left, pre_approved=token.pre_approved)
        self._feed.notify("tokens", token.id)
        url = self._public_url or request.url.rstrip("/")
        return JoinTokenCreated(
            token=_view(token, now),
            secret=secret,
            join_command=await self._join_command(url, secret),
            install_command=await self._installing(url, secret),
        )

    async def _installing(self, url: str, secret: str) -> str:
        """The command for a machine without Corral; empty when this controller cannot serve Corral."""
        if not url or self._install_command is None:
            return ""
        try:
            # The installer has the fingerprint of the fleet's CA; what depends on the name is in the command.
            pin = await self._trust.pin(url) if self._trust.depends_on_name else ""
            return await self._install_command(url, secret, pin)
        except CorralError as error:  # the token is good all the same
            log.warning("no command that installs Corral", error=str(error))
            return ""

    async def _join_command(self, url: str, secret: str) -> str:
        """The command for the other machine; empty when the URL is not known."""
        if not url:
            return ""
        pin = await self._trust.pin(url)
        return f"corral join {url} --token {secret}{f' --ca {pin}' if pin else ''}"

    async def check(self, secret: str) -> JoinToken:
        """The token, if a machine may use it now; it is not used up. Raises Unauthenticated."""
        async with self._store.read() as tx:
            return await check_join_token(tx, secret)

    async def list_views(self) -> list[JoinTokenView]:
        async with self._store.read() as tx:
            now = await tx.now()
            return [_view(token, now) for token in await join_tokens.list_(tx)]

    async def revoke(self, id_or_name: str) -> None:
        async with self._store.write() as tx:
            found = [token for token in await join_tokens.list_(tx) if id_or_name in (token.id, token.name)]
            if not found:
                raise NotFound(f"there is no join token {id_or_name!r}; `corral token list` shows them")
            for token in found:
                await join_tokens.revoke(tx, token.id)
            await revisions.bump(tx, "tokens")
        log.info("join token revoked", token_ids=[token.id for token in found])
        self._feed.notify("tokens")


async def check_join_token(tx: Transaction, secret: str) -> JoinToken:
    """The token, if it may be used now; else exactly why not. Spends nothing."""
    token = await join_tokens.find_by_hash(tx, digest(secret))
    if token is None:
        raise Unauthenticated("the join token is not known here; `corral token create` makes a new one")
    now = await tx.now()
    if _state(token, now) != "active":
        raise Unauthenticated(f"the join token {_state_sentence(token, now)}; `corral token create` makes a new one")
    return token


async def claim_join_token(tx: Transaction, secret: str) -> JoinToken:
    """Spend one use inside the registering transaction, or say exactly why not."""
    token = await check_join_token(tx, secret)
    if not await join_tokens.claim_use(tx, token.id):  # it ended between the two statements
        raise Unauthenticated("the join token has just ended; `corral token create` makes a new one")
    return token


def _state_sentence(token: JoinToken, now: datetime) -> str:
    return {"revoked": "was revoked", "expired": "has expired"}.get(_state(token, now), "is used up")


def _state(token: JoinToken, now: datetime) -> str:
    if token.revoked_at is not None:
        return "revoked"
    if token.expires_at is not None and token.expires_at <= now:
        return "expired"
    return "used" if token.uses_left == 0 else "active"


def _check(request: CreateJoinToken) -> None:
    if request.uses is not None and not 0 < request.uses <= 1_000_000:
        raise Invalid("uses must be between 1 and 1000000, or null for no limit")
    if request.ttl_s is not None and not 0 < request.ttl_s <= _LONGEST_S:
        raise Invalid("ttl_s must be more than 0 and at most ten years, or null for never")
    if request.url and not _URL.match(request.url):
        raise Invalid("url is http:// or https:// and a host, with a port if it has one")
    if len(request.name) > 255:
        raise Invalid("name is longer than 255 characters")


def _view(token: JoinToken, now: datetime) -> JoinTokenView:
    return JoinTokenView(
        id=token.id,
        name=token.name,
        uses=token.uses,
        uses_left=token.uses_left,
        pre_approved=token.pre_approved,
        state=_state(token, now),
        created_at=rfc3339(token.created_at),
        expires_at=rfc3339(token.expires_at),
        last_used_at=rfc3339(token.last_used_at),
    )
