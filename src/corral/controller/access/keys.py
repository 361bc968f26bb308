"""API keys and web sessions: who is calling. Secrets are stored as SHA-256 and shown once."""

from __future__ import annotations

import uuid
from dataclasses import replace
from datetime import datetime, timedelta

from corral.contract.admin import CreateKey, KeyCreated, KeyView
from corral.contract.view import KeyLimits
from corral.controller.access.principal import Principal, Role
from corral.controller.runtime.change_feed import ChangeFeed
from corral.controller.runtime.database import hide_database_errors
from corral.controller.runtime.node_views import rfc3339
from corral.kit.clock import Clock
from corral.kit.errors import Conflict, Invalid, NotFound, Unauthenticated, Unavailable
from corral.kit.log import get_log
from corral.kit.secrets import API_KEY, WEB_SESSION, digest, new_secret
from corral.store.engine.transactions import Store, Transaction
from corral.store.tables import api_keys, revisions, web_sessions
from corral.store.tables.api_keys import ApiKey
from corral.store.tables.web_sessions import WebSession

log = get_log(__name__)

_NOTE_USE_EVERY_S = 60.0
_LONGEST_S = 10 * 365 * 86400.0
MAX_SESSIONS = 50  # of one key; the oldest ends when there are more


class Access:
    def __init__(self, store: Store, feed: ChangeFeed, clock: Clock, *, session_ttl_s: float) -> None:
        self._store = store
        self._feed = feed
        self._clock = clock
        self._session_ttl_s = session_ttl_s
        self._use_noted: dict[str, float] = {}  # bounded by the number of keys

    async def by_key(self, secret: str) -> Principal:
        with hide_database_errors():
            async with self._store.read() as tx:
                key = await api_keys.find_by_hash(tx, digest(secret))
                now = await tx.now()
        if key is None:
            raise Unauthenticated("the API key is not known here")
        _refuse_ended(key, now)
        await self._note_use(key)
        return Principal(key.id, key.name, Role(key.role), models=key.models)

    async def by_session(self, secret: str) -> Principal:
        with hide_database_errors():
            async with self._store.read() as tx:
                session = await web_sessions.find(tx, digest(secret))
                key = await api_keys.find(tx, session.key_id) if session else None
                now = await tx.now()
        if session is None or key is None or session.expires_at <= now:
            raise Unauthenticated("the session has ended; sign in again")
        _refuse_ended(key, now)
        ends_at = session.expires_at
        if (ends_at - now).total_seconds() < self._session_ttl_s / 2:
            ends_at = now + timedelta(seconds=self._session_ttl_s)
            async with self._store.write() as tx:
                await web_sessions.extend(tx, session.id_hash, ends_at)
        return Principal(
            key.id,
            key.name,
            Role(key.role),
            csrf=session.csrf,
            session=session.id_hash,
            session_ends_at=ends_at.timestamp(),
            models=key.models,
        )

    async def is_welcome(self, principal: Principal) -> bool:
        """Whether key and session still count: for streams that outlive the check at their beginning."""
        async with self._store.read() as tx:
            key = await api_keys.find(tx, principal.key_id)
            session = await web_sessions.find(tx, principal.session) if principal.session else None
            now = await tx.now()
        if principal.session and (session is None or session.expires_at <= now):
            return False
        return key is not None and _state(key, now) == "active"

    async def open_session(self, key_secret: str) -> tuple[str, Principal]:
        """Sign in with an API key: the session's secret for the cookie, and who it is."""
        principal = await self.by_key(key_secret)
        if principal.role is Role.GATEWAY:
            raise Unauthenticated("a key with role gateway cannot sign in; use another key")
        secret, csrf = new_secret(WEB_SESSION), uuid.uuid4().hex
        async with self._store.write() as tx:
            now = await tx.now()
            session = WebSession(
                id_hash=digest(secret),
                key_id=principal.key_id,
                csrf=csrf,
                created_at=now,
                expires_at=now + timedelta(seconds=self._session_ttl_s),
                last_seen_at=now,
            )
            await web_sessions.insert(tx, session)
            # Every gateway knows every session: a key that signs in again and again must not fill their memory.
            await web_sessions.delete_oldest(tx, principal.key_id, keep=MAX_SESSIONS)
            await revisions.bump(tx, "keys")
        self._feed.notify("keys", principal.key_id)
        return secret, replace(
            principal, csrf=csrf, session=session.id_hash, session_ends_at=session.expires_at.timestamp()
        )

    async def close_session(self, principal: Principal) -> None:
        async with self._store.write() as tx:
            await web_sessions.delete(tx, principal.session)
            await revisions.bump(tx, "keys")  # gateways refuse its playground tokens from now on
        self._feed.notify("keys", principal.key_id)

    async def create(self, request: CreateKey) -> KeyCreated:
        secret = new_secret(API_KEY)
        key = await self._insert(request, secret)
        log.info("API key made", key=key.name, key_id=key.id, key_role=key.role)
        return KeyCreated(key=_view(key, key.created_at), secret=secret)

    async def ensure(self, secret: str, name: str, role: Role) -> None:
        """Have this very key: for the admin's and the gateway's, which live in files."""
        async with self._store.read() as tx:
            known = await api_keys.find_by_hash(tx, digest(secret))
        if known is None:
            try:
                await self._insert(CreateKey(name=name, role=role.value), secret)
            except Conflict:  # another controller with the same file was quicker
                return

    async def list_views(self) -> list[KeyView]:
        async with self._store.read() as tx:
            now = await tx.now()
            return [_view(key, now) for key in await api_keys.list_(tx)]

    async def revoke(self, id_or_name: str, *, by: str) -> None:
        async with self._store.write() as tx:
            key = await _find_one(tx, id_or_name)
            if key.id == by:
                raise Invalid("this is the key you are using; revoke it with another one")
            now = await tx.now()
            others = [k for k in await api_keys.list_(tx) if k.role == Role.ADMIN and _state(k, now) == "active"]
            if key.role == Role.ADMIN and [k.id for k in others] == [key.id]:
                raise Conflict("this is the last admin key; create another one first")
            await api_keys.revoke(tx, key.id)
            await web_sessions.delete_of_key(tx, key.id)
            await revisions.bump(tx, "keys")
        log.info("API key revoked", key=key.name, key_id=key.id, key_role=key.role)
        self._feed.notify("keys", key.id)

    async def _insert(self, request: CreateKey, secret: str) -> ApiKey:
        _check(request)
        async with self._store.write() as tx:
            now = await tx.now()
            key = ApiKey(
                id=str(uuid.uuid4()),
                name=request.name or f"{request.role} key",
                secret_hash=digest(secret),
                role=request.role,
                models=request.models,
                limits=request.limits,
                created_at=now,
                expires_at=None if request.ttl_s is None else now + timedelta(seconds=request.ttl_s),
            )
            await api_keys.insert(tx, key)
            await revisions.bump(tx, "keys")
        self._feed.notify("keys", key.id)
        return key

    async def _note_use(self, key: ApiKey) -> None:
        now = self._clock.monotonic()
        if now - self._use_noted.get(key.id, -_NOTE_USE_EVERY_S) < _NOTE_USE_EVERY_S:
            return
        self._use_noted[key.id] = now
        try:
            async with self._store.write() as tx:
                await api_keys.note_use(tx, key.id)
        except Unavailable as error:  # when it was last used is no reason to turn a caller away
            log.debug("use of a key not noted", error=error.message)


async def _find_one(tx: Transaction, id_or_name: str) -> ApiKey:
    found = [key for key in await api_keys.list_(tx) if id_or_name in (key.id, key.name) and key.revoked_at is None]
    if not found:
        raise NotFound(f"there is no active API key {id_or_name!r}; `corral keys list` shows them")
    if len(found) > 1:
        raise Conflict(f"{len(found)} keys are called {id_or_name!r}; use the id")
    return found[0]


def _refuse_ended(key: ApiKey, now: datetime) -> None:
    if (state := _state(key, now)) != "active":
        raise Unauthenticated(f"the API key {'was revoked' if state == 'revoked' else 'has expired'}")


def _state(key: ApiKey, now: datetime) -> str:
    if key.revoked_at is not None:
        return "revoked"
    return "expired" if key.expires_at is not None and key.expires_at <= now else "active"


def _check(request: CreateKey) -> None:
    if request.role not in list(Role):
        raise Invalid(f"unknown role {request.role!r}: use admin, viewer, inference or gateway")
    if len(request.name) > 255:
        raise Invalid("name is longer than 255 characters")
    if request.ttl_s is not None and not 0 < request.ttl_s <= _LONGEST_S:
        raise Invalid("ttl_s must be more than 0 and at most ten years, or null for never")
    for limit in _limits(request.limits):
        if limit is not None and limit < 1:
            raise Invalid("limits must be at least 1, or null for none")


def _limits(limits: KeyLimits | None) -> tuple[int | None, ...]:
    return (limits.requests_per_min, limits.tokens_per_min, limits.concurrent) if limits else ()


def _view(key: ApiKey, now: datetime) -> KeyView:
    return KeyView(
        id=key.id,
        name=key.name,
        role=key.role,
        state=_state(key, now),
        created_at=rfc3339(key.created_at),
        models=key.models,
        limits=key.limits,
        expires_at=rfc3339(key.expires_at),
        last_used_at=rfc3339(key.last_used_at),
    )
