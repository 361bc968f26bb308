"""Keys, sessions and streams at their edges: what is said before a key was shown, and what ends with a key."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from corral.contract.admin import CreateKey
from corral.controller.access.keys import Access
from corral.controller.access.principal import Principal
from corral.controller.api import events
from corral.controller.runtime.database import Readiness
from corral.kit.errors import Unavailable
from corral.store import Store
from tests.support.page import open_page_app, served
from tests.support.processes import free_port
from tests.support.registry import Registry, caller, open_registry
from tests.support.sqlite import sqlite_url
from tests.support.waiting import DEADLINE_S, until

REFUSAL = (
    'the database postgresql://db.internal/corral cannot be used: password authentication failed for user "corral"'
)


def access_of(registry: Registry) -> Access:
    return Access(registry.store, registry.feed, registry.clock, session_ttl_s=600)


async def test_strangers_are_not_told_where_the_database_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_registry(sqlite_url(tmp_path)) as registry:
        access = access_of(registry)

        def away(_: Store) -> Any:
            raise Unavailable(REFUSAL)

        with monkeypatch.context() as patch:
            patch.setattr(Store, "read", away)
            told = await Readiness(registry.store).reasons()
            for ask in (
                access.by_key("ck_x"),
                access.by_session("cs_x"),
                registry.register("barn", "cj_x"),
                registry.node_api.authenticate("id", caller("cn_x")),
            ):
                with pytest.raises(Unavailable) as refused:
                    await ask
                told.append(refused.value.message)
    assert len(told) == 5
    assert not any(word in line for line in told for word in ("internal", "password", "corral"))


class Stream:
    """`/api/events` as one caller sees it, with a check after every event."""

    def __init__(self, registry: Registry, access: Access, principal: Principal) -> None:
        self.frames = events.frames(registry.feed, lambda: access.is_welcome(principal), ping_s=0.02)

    async def until_it_ends(self) -> bytes:
        return b"".join([piece async for piece in self.frames])


@pytest.mark.parametrize("by", ["key", "session"])
async def test_a_stream_of_events_ends_with_the_key_that_opened_it(tmp_path: Path, by: str) -> None:
    async with open_registry(sqlite_url(tmp_path)) as registry:
        access = access_of(registry)
        made = await access.create(CreateKey(name="eyes", role="viewer"))
        principal = await access.by_key(made.secret)
        if by == "session":
            _, principal = await access.open_session(made.secret)
        stream = Stream(registry, access, principal)
        async with aclosing(stream.frames):  # type: ignore[type-var]
            assert await anext(stream.frames) == b"retry: 2000\n\n"
            seen = [await anext(stream.frames) for _ in range(3)]  # pings: it is still welcome
            assert b": still here\n\n" in seen
            await access.revoke("eyes", by="somebody else")
            await stream.until_it_ends()
        assert registry.feed.subscribers == 0


async def test_signing_out_ends_the_pages_stream(tmp_path: Path) -> None:
    async with open_registry(sqlite_url(tmp_path)) as registry:
        access = access_of(registry)
        made = await access.create(CreateKey(name="eyes", role="viewer"))
        _, principal = await access.open_session(made.secret)
        await access.close_session(principal)
        assert not await access.is_welcome(principal)
        assert await access.is_welcome(await access.by_key(made.secret)), "the key itself still counts"


@contextlib.contextmanager
def between_read_and_use(meanwhile: Callable[[], Awaitable[None]]) -> Iterator[None]:
    """Runs `meanwhile` after the next read transaction has ended, before its reader goes on."""
    original = Store.read
    first = True

    class Slow:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        async def __aenter__(self) -> Any:
            return await self.inner.__aenter__()

        async def __aexit__(self, *error: Any) -> Any:
            done = await self.inner.__aexit__(*error)
            await meanwhile()
            return done

    def read(store: Store) -> Any:
        nonlocal first
        if not first:
            return original(store)
        first = False
        return Slow(original(store))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "read", read)
        yield


async def test_of_two_looks_at_once_the_later_one_counts(tmp_path: Path) -> None:
    """A follower's own look may begin before and end after the loop's. What it read is old by then."""
    async with open_registry(sqlite_url(tmp_path)) as registry:
        told = await registry.join("barn", pre_approved=True)

        async def drain_and_look() -> None:
            await registry.admin.drain("barn")
            await registry.feed.run_once()

        async with registry.feed.subscribe():
            with between_read_and_use(drain_and_look):
                await registry.feed.run_once(with_sources=True)
            assert registry.feed._present[told.id].status == "draining"


async def test_a_look_for_nobody_does_not_overtake_what_a_follower_read(tmp_path: Path) -> None:
    """The loop's look, which reads no nodes without followers, begins later and ends earlier than the follower's: the
    follower started without any node, and a page removed every row."""
    async with open_registry(sqlite_url(tmp_path)) as registry:
        await registry.join("barn", pre_approved=True)
        with between_read_and_use(registry.feed.run_once):
            async with registry.feed.subscribe() as subscription:
                told = [await subscription.next() for _ in range(2)]
        assert [change.kind for change in told] == ["node", "ready"]
        assert told[1].data == {"nodes": 1}


async def test_what_changed_while_a_follower_was_taken_in_is_told_by_the_next_look(tmp_path: Path) -> None:
    async with open_registry(sqlite_url(tmp_path)) as registry:
        await registry.join("barn", pre_approved=True)

        async def change_and_look() -> None:
            await registry.admin.drain("barn")
            await registry.feed.run_once()  # for nobody: it notes the counters and reads no node

        with between_read_and_use(change_and_look):
            async with registry.feed.subscribe() as subscription:
                assert [(await subscription.next()).kind for _ in range(2)] == ["node", "ready"]
                await registry.feed.run_once()
                change = await asyncio.wait_for(subscription.next(), DEADLINE_S)
        assert (change.kind, change.data.status) == ("node", "draining")  # type: ignore[attr-defined]


async def test_a_hint_that_cannot_be_sent_is_not_worth_the_controller(tmp_path: Path) -> None:
    async with open_registry(sqlite_url(tmp_path)) as registry:
        sent: list[str] = []

        async def publish(_event: object, hint: Any, **_: object) -> None:
            sent.append(hint.kind)
            if len(sent) == 1:
                raise AssertionError("a mistake in some library")

        registry.bus.publish = publish  # type: ignore[method-assign, assignment]
        sending = asyncio.ensure_future(registry.feed._send_hints())
        registry.feed.notify("nodes")
        registry.feed.notify("keys")
        await until(lambda: len(sent) == 2)
        assert not sending.done()
        sending.cancel()


async def test_whoever_hangs_up_makes_room_for_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_SUBSCRIBERS", 2)
    async with open_page_app(tmp_path) as page:
        key = (await page.access.create(CreateKey(name="eyes", role="viewer"))).secret
        head = f"GET /api/events HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n\r\n".encode()
        port = free_port()

        async def follow() -> tuple[bytes, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head)
            return await reader.readline(), writer

        async with served(page, port), asyncio.timeout(20):
            lines, writers = zip(*[await follow() for _ in range(2)], strict=True)
            assert {line.split()[1] for line in lines} == {b"200"}
            await until(lambda: page.feed.subscribers == 2)  # the head goes out before they have their places
            refused, writer = await follow()
            assert refused.split()[1] == b"503"
            for each in (writer, *writers):
                each.close()
            await until(lambda: page.feed.subscribers == 0)
            line, writer = await follow()
            assert line.split()[1] == b"200"
            writer.close()
