"""The bus is told whose credentials have ended, whoever ended them and whatever happens to the teller."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from corral.bus.jwt import decode_claims
from corral.bus.local import LocalHub
from corral.controller.access import revocations
from corral.controller.access.revocations import Revocations
from corral.kit.clock import SystemClock
from tests.support.registry import Registry, open_registry
from tests.support.sqlite import sqlite_url


class Server:
    """What a nats-server would know."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pushes: list[set[str]] = []
        self.before: Callable[[], Awaitable[None]] | None = None
        monkeypatch.setattr(revocations, "push_account", self.push)

    async def push(self, _urls: object, _system: object, token: str, **_: Any) -> None:
        if self.before is not None:
            before, self.before = self.before, None
            await before()
        self.pushes.append(set(decode_claims(token)["nats"].get("revocations", {})))

    @property
    def knows(self) -> set[str]:
        return self.pushes[-1]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    return Server(monkeypatch)


def another_controller(registry: Registry) -> Revocations:
    ours = registry.revocations
    return Revocations(
        registry.store, registry.bus, registry.clock, keys=ours._keys, urls=("nats://bus:4222",), tls=None, ttl_s=3600
    )


async def delete_node(registry: Registry, name: str) -> str:
    told = await registry.join(name, pre_approved=True)
    await registry.admin.delete(name)
    return str(decode_claims(told.nats_jwt)["sub"])


async def test_another_controller_tells_what_the_dead_one_could_not(tmp_path: Path, server: Server) -> None:
    async with open_registry(sqlite_url(tmp_path)) as registry:
        other = another_controller(registry)
        await other.run_once()
        assert server.knows == set()
        gone = await delete_node(registry, "barn")  # and the controller that did it dies here
        await other.run_once()
        assert server.knows == {gone}


async def test_nothing_is_pushed_while_nothing_changes(tmp_path: Path, server: Server) -> None:
    async with open_registry(sqlite_url(tmp_path)) as registry:
        await delete_node(registry, "barn")
        for _ in range(5):
            await registry.revocations.run_once()
        assert len(server.pushes) == 1


async def test_an_older_list_that_arrives_last_is_mended_by_its_sender(tmp_path: Path, server: Server) -> None:
    async with open_registry(sqlite_url(tmp_path)) as registry:
        slow = another_controller(registry)
        gone = ""

        async def meanwhile() -> None:
            nonlocal gone
            gone = await delete_node(registry, "barn")
            await registry.revocations.run_once()
            assert server.knows == {gone}

        server.before = meanwhile
        await slow.run_once()
        assert server.knows == set(), "the older list came last"
        assert await slow._wake.wait(0.01), "it has noticed"
        await slow.run_once()
        assert server.knows == {gone}


async def test_a_bus_that_was_away_is_told_when_it_is_back(tmp_path: Path, server: Server) -> None:
    hub = LocalHub(SystemClock())
    async with open_registry(sqlite_url(tmp_path), hub=hub) as registry:
        registry.bus.on_change(registry.revocations._connection_changed)
        await registry.revocations.run_once()
        hub.cut("controller")
        await delete_node(registry, "barn")
        await registry.revocations.run_once()
        assert len(server.pushes) == 1
        hub.heal("controller")
        await registry.revocations.run_once()
        assert len(server.knows) == 1
