"""Join tokens, API keys, web sessions, bus credentials."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import msgspec
import pytest

from corral.contract.view import KeyLimits
from corral.kit.errors import Conflict, NotFound
from corral.store import Store
from corral.store.tables import api_keys, bus_credentials, join_tokens, web_sessions
from corral.store.tables.api_keys import ApiKey
from corral.store.tables.join_tokens import JoinToken
from corral.store.tables.web_sessions import WebSession
from tests.integration.store.rows import NOON

HOUR = timedelta(hours=1)


async def keep_token(store: Store, **known: Any) -> JoinToken:
    defaults: dict[str, Any] = {"id": "t", "name": "barn", "secret_hash": "h", "created_at": NOON}
    token = JoinToken(**(defaults | known))
    async with store.write() as tx:
        await join_tokens.insert(tx, token)
    return token


async def spend(store: Store, token_id: str = "t") -> bool:
    async with store.write() as tx:
        return await join_tokens.claim_use(tx, token_id)


async def test_a_token_comes_back_whole(store: Store) -> None:
    full = await keep_token(
        store,
        created_by="k",
        uses_left=None,
        uses=4,
        pre_approved=True,
        expires_at=NOON,
        revoked_at=NOON,
        last_used_at=NOON,
    )
    async with store.read() as tx:
        assert await join_tokens.get(tx, "t") == full
        assert await join_tokens.find_by_hash(tx, "h") == full
        assert await join_tokens.list_(tx) == [full]
        assert await join_tokens.find_by_hash(tx, "x") is None
        with pytest.raises(NotFound):
            await join_tokens.get(tx, "x")


async def test_uses_run_out(store: Store) -> None:
    before = await keep_token(store, uses_left=2)
    assert [await spend(store) for _ in range(3)] == [True, True, False]
    async with store.read() as tx:
        after = await join_tokens.get(tx, "t")
    assert after.last_used_at is not None
    assert after == msgspec.structs.replace(before, uses_left=0, uses=2, last_used_at=after.last_used_at)


async def test_the_last_use_goes_to_one_of_many(store: Store, other: Store) -> None:
    await keep_token(store, uses_left=1)
    won = await asyncio.gather(*(spend(chosen) for chosen in (store, other) for _ in range(10)))
    assert sum(won) == 1


async def test_a_use_is_given_back_when_the_registration_fails(store: Store) -> None:
    await keep_token(store, uses_left=1)

    async def register_badly() -> None:
        async with store.write() as tx:
            assert await join_tokens.claim_use(tx, "t")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await register_badly()
    assert await spend(store)


async def test_unlimited_tokens_stay_unlimited(store: Store) -> None:
    await keep_token(store, uses_left=None)
    assert [await spend(store) for _ in range(3)] == [True, True, True]
    async with store.read() as tx:
        token = await join_tokens.get(tx, "t")
    assert (token.uses, token.uses_left) == (3, None)


async def test_expired_revoked_and_unknown_tokens_are_not_spent(store: Store) -> None:
    async with store.read() as tx:
        now = await tx.now()
    await keep_token(store, id="expired", secret_hash="1", expires_at=now - HOUR)
    await keep_token(store, id="fresh", secret_hash="2", expires_at=now + HOUR)
    await keep_token(store, id="revoked", secret_hash="3")
    async with store.write() as tx:
        assert await join_tokens.revoke(tx, "revoked")
        assert not await join_tokens.revoke(tx, "revoked")
        assert not await join_tokens.revoke(tx, "unknown")
    assert not await spend(store, "expired")
    assert await spend(store, "fresh")
    assert not await spend(store, "revoked")
    assert not await spend(store, "unknown")


async def test_an_api_key_comes_back_whole(store: Store) -> None:
    plain = ApiKey(id="1", name="app", secret_hash="h1", role="inference", created_at=NOON)
    full = ApiKey(
        id="2",
        name="app",
        secret_hash="h2",
        role="inference",
        created_at=NOON + HOUR,
        models=("llama", "🦙"),
        limits=KeyLimits(requests_per_min=60, tokens_per_min=1000, concurrent=4),
        expires_at=NOON,
        revoked_at=NOON,
        last_used_at=NOON,
    )
    none = ApiKey(id="3", name="", secret_hash="h3", role="viewer", created_at=NOON + 2 * HOUR, models=())
    async with store.write() as tx:
        for key in (none, full, plain):
            await api_keys.insert(tx, key)
    async with store.read() as tx:
        assert await api_keys.list_(tx) == [plain, full, none]
        assert await api_keys.find_by_hash(tx, "h2") == full
        assert await api_keys.get(tx, "1") == plain
        assert await api_keys.find(tx, "x") is None
        with pytest.raises(NotFound):
            await api_keys.get(tx, "x")


async def test_a_key_is_used_and_revoked(store: Store) -> None:
    key = ApiKey(id="1", name="app", secret_hash="h1", role="admin", created_at=NOON)
    async with store.write() as tx:
        await api_keys.insert(tx, key)
        await api_keys.note_use(tx, "1")
        assert await api_keys.revoke(tx, "1")
        assert not await api_keys.revoke(tx, "1")
        after = await api_keys.get(tx, "1")
    assert after.last_used_at is not None
    assert after.revoked_at is not None
    assert after.last_used_at <= after.revoked_at


async def test_the_same_secret_twice_is_a_conflict(store: Store) -> None:
    async with store.write() as tx:
        await api_keys.insert(tx, ApiKey(id="1", name="a", secret_hash="h", role="admin", created_at=NOON))
    with pytest.raises(Conflict):
        async with store.write() as tx:
            await api_keys.insert(tx, ApiKey(id="2", name="b", secret_hash="h", role="admin", created_at=NOON))


def a_session(name: str, key: str = "k") -> WebSession:
    return WebSession(id_hash=name, key_id=key, csrf="c", created_at=NOON, expires_at=NOON + HOUR, last_seen_at=NOON)


async def test_a_session_lives_is_extended_and_goes(store: Store) -> None:
    async with store.write() as tx:
        await web_sessions.insert(tx, a_session("s"))
        assert await web_sessions.find(tx, "s") == a_session("s")
        assert await web_sessions.extend(tx, "s", NOON + 2 * HOUR)
        assert not await web_sessions.extend(tx, "x", NOON)
        extended = await web_sessions.find(tx, "s")
        assert extended is not None
        assert extended.expires_at == NOON + 2 * HOUR
        assert extended.last_seen_at > NOON
        assert await web_sessions.delete(tx, "s")
        assert not await web_sessions.delete(tx, "s")
        assert await web_sessions.find(tx, "s") is None


async def test_sessions_go_with_their_key_and_with_time(store: Store) -> None:
    async with store.write() as tx:
        for session in (a_session("1", "gone"), a_session("2", "gone"), a_session("3"), a_session("4")):
            await web_sessions.insert(tx, session)
        await web_sessions.extend(tx, "4", NOON + 2 * HOUR)
        assert await web_sessions.delete_of_key(tx, "gone") == 2
        assert await web_sessions.prune_expired(tx, NOON + HOUR) == 1
        assert await web_sessions.find(tx, "3") is None
        assert await web_sessions.find(tx, "4") is not None


async def test_revoked_credentials_are_told_until_they_expire(store: Store) -> None:
    async with store.write() as tx:
        now = await tx.now()
        await bus_credentials.issued(tx, "UA", "node-a", kind="node", expires_at=now + HOUR)
        await bus_credentials.issued(tx, "UB", "node-b", kind="node", expires_at=now + HOUR)
        await bus_credentials.issued(tx, "UOLD", "node-a", kind="node", expires_at=now - HOUR)
        assert await bus_credentials.list_revoked(tx) == []
        assert await bus_credentials.revoke_node(tx, "node-a") == 1
        await bus_credentials.revoke(tx, "UC", "node-c", expires_at=now + HOUR)  # issued, but never recorded
        await bus_credentials.revoke(tx, "UPAST", "node-d", expires_at=now - HOUR)
    async with store.write() as tx:
        assert [row.user_key for row in await bus_credentials.list_revoked(tx)] == ["UA", "UC"]
        assert await bus_credentials.prune_expired(tx) == 2
        kept = await bus_credentials.find(tx, "UA")
        assert kept is not None
        assert (kept.node_id, kept.kind, kept.expires_at) == ("node-a", "node", now + HOUR)
        assert kept.revoked_at is not None
        assert await bus_credentials.find(tx, "UPAST") is None


async def test_a_renewal_neither_ends_a_revocation_nor_shortens_its_life(store: Store) -> None:
    async with store.write() as tx:
        now = await tx.now()
        await bus_credentials.revoke(tx, "UA", "node-a", expires_at=now + 2 * HOUR)
        await bus_credentials.issued(tx, "UA", "node-a", kind="node", expires_at=now + HOUR)
        row = await bus_credentials.find(tx, "UA")
        assert row is not None
        assert row.expires_at == now + 2 * HOUR
        assert row.revoked_at is not None
        (first,) = await bus_credentials.list_revoked(tx)
        await bus_credentials.revoke(tx, "UA", "node-a", expires_at=now)
        (second,) = await bus_credentials.list_revoked(tx)
        assert second.revoked_at >= first.revoked_at
        assert first.node_id == "node-a"
