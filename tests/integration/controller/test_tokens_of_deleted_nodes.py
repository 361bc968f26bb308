"""What a node was given ends with the node: its blob tokens open no controller's listener once it is deleted."""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from corral.blobs.store import BlobStore
from corral.blobs.transfer.partial_file import ExpectedBlob
from corral.bus.local import LocalHub
from corral.contract.access import Scope
from corral.controller.access.active_nodes import ActiveNodes
from corral.controller.files.blob_listener import open_blob_listener
from corral.controller.settings.models import FileSettings
from corral.kit.clock import SystemClock
from corral.kit.errors import Unavailable
from corral.kit.tasks import background
from corral.worker.ingress.tokens import TokenVerifier
from tests.support.registry import Registry, open_registry
from tests.support.sqlite import sqlite_url
from tests.support.waiting import until

CONTENT = os.urandom(64 << 20)  # more than the buffers of a connection hold
DIGEST = "sha256:" + hashlib.sha256(CONTENT).hexdigest()
KNOWN_WITHIN_S = 5.0


@dataclass
class Member:
    """One controller with its blob listener."""

    registry: Registry
    active: ActiveNodes
    url: str
    session: aiohttp.ClientSession

    async def status(self, token: str) -> int:
        headers = {"Authorization": f"Bearer {token}", "Range": "bytes=0-9"}
        async with self.session.get(f"{self.url}/blobs/{DIGEST}", headers=headers) as answer:
            return answer.status


@asynccontextmanager
async def open_member(folder: Path, hub: LocalHub, name: str) -> AsyncIterator[Member]:
    """Several of one folder share its database."""
    blobs = BlobStore(folder / "blobs")
    await blobs.write(DIGEST, lambda: iter([CONTENT]), ExpectedBlob(DIGEST), "weights")
    async with open_registry(sqlite_url(folder), hub=hub, name=name) as registry:
        active = ActiveNodes(registry.store, SystemClock())
        await active.refresh()
        registry.feed.on("nodes", active.wake.set)
        settings, key = FileSettings(blob_port=0), registry.ingress_tokens.public_key
        async with (
            open_blob_listener(settings, blobs, key, SystemClock(), active, is_expected=lambda _: False) as url,
            background(registry.feed.run(), active.run()),
            aiohttp.ClientSession() as session,
        ):
            yield Member(registry, active, url, session)


@pytest.fixture
async def members(tmp_path: Path) -> AsyncIterator[tuple[Member, Member]]:
    hub = LocalHub(SystemClock())
    async with open_member(tmp_path, hub, "a") as first, open_member(tmp_path, hub, "b") as second:
        yield first, second


async def test_a_deleted_nodes_blob_token_opens_no_controllers_listener(members: tuple[Member, Member]) -> None:
    first, _ = members
    node = await first.registry.join("barn", pre_approved=True)
    other = await first.registry.join("byre", pre_approved=True)
    for member in members:  # at once, though the second has not heard of the node yet
        assert await member.status(node.blob_token) == 206
    await first.registry.admin.delete("barn")
    for member in members:

        async def is_refused(member: Member = member) -> bool:
            return await member.status(node.blob_token) == 401

        await until(is_refused, "refusal", KNOWN_WITHIN_S)
        assert await member.status(other.blob_token) == 206


async def test_a_token_made_for_an_order_ends_with_its_node_too(members: tuple[Member, Member]) -> None:
    first, _ = members
    node = await first.registry.join("barn", pre_approved=True)
    await first.active.refresh()
    token = first.registry.ingress_tokens.sign_for_node(node.id, first.active.credential(node.id))
    assert await first.status(token) == 206
    await first.registry.admin.delete("barn")

    async def is_refused() -> bool:
        return await first.status(token) == 401

    await until(is_refused, "refusal", KNOWN_WITHIN_S)


async def test_a_replaced_machines_token_ends_and_its_successors_opens(members: tuple[Member, Member]) -> None:
    first, second = members
    before = await first.registry.join("barn", pre_approved=True)
    assert await second.status(before.blob_token) == 206
    await first.registry.admin.open_for_replacement("barn")
    after = await first.registry.join("barn", pre_approved=True, enrolment="of another machine")
    assert after.id == before.id

    async def is_refused() -> bool:
        return await second.status(before.blob_token) == 401

    await until(is_refused, "refusal", KNOWN_WITHIN_S)
    assert await second.status(after.blob_token) == 206


async def test_what_is_being_sent_to_a_deleted_node_stops(members: tuple[Member, Member]) -> None:
    first, _ = members
    node = await first.registry.join("barn", pre_approved=True)
    headers = {"Authorization": f"Bearer {node.blob_token}"}
    async with first.session.get(f"{first.url}/blobs/{DIGEST}", headers=headers) as answer:
        await answer.content.readexactly(1 << 16)
        await first.registry.admin.delete("barn")
        await until(lambda: not first.active.credential(node.id))
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()


async def test_a_pending_nodes_token_of_earlier_opens_nothing(members: tuple[Member, Member]) -> None:
    first, _ = members
    pending = await first.registry.join("barn")
    assert pending.blob_token == ""
    made = first.registry.ingress_tokens.sign_for_node(pending.id, first.active.credential(pending.id))
    assert await first.status(made) == 401


async def test_while_the_database_is_away_known_nodes_are_served(
    members: tuple[Member, Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = members
    known = await first.registry.join("barn", pre_approved=True)
    assert await first.status(known.blob_token) == 206

    async def fail() -> None:
        raise Unavailable("the database is away")

    monkeypatch.setattr(first.active, "refresh", fail)
    assert await first.status(known.blob_token) == 206
    unknown = first.registry.ingress_tokens.sign_for_node("n-9", "0123456789abcdef")
    assert await first.status(unknown) == 503


async def test_a_nodes_token_opens_no_other_nodes_ingress(members: tuple[Member, Member]) -> None:
    first, _ = members
    node = await first.registry.join("barn", pre_approved=True)
    check = TokenVerifier(lambda: SystemClock().now().timestamp())
    check.trust(first.registry.ingress_tokens.public_key, "another node")
    for scope in (None, *Scope):
        refused = check.check(f"Bearer {node.blob_token}".encode(), scope)
        assert refused is not None
        assert refused.status == 403
