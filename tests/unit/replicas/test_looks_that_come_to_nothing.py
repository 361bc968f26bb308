"""A look at the world that could not be written down: what was known only to it is there for the next."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from corral.controller.replicas import reconcile
from corral.controller.replicas.life import Accepted, OrderId
from corral.controller.replicas.reconcile import ReplicaLoop
from corral.controller.replicas.world import Read
from corral.kit.clock import SystemClock
from corral.kit.errors import Unavailable

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


class AwayForWriting:
    @asynccontextmanager
    async def read(self) -> AsyncIterator[None]:
        yield

    def write(self) -> object:
        raise Unavailable("the database is away")


async def test_room_that_came_meanwhile_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    async def read_nothing(_tx: object, **_how: object) -> Read:
        return Read(NOON)

    monkeypatch.setattr(reconcile, "read_all", read_nothing)
    other: Any = SimpleNamespace(
        refused={}, known=dict, find=None, of=None, epoch=lambda _name: 1, is_looking=lambda _backend: False
    )
    store: Any = AwayForWriting()
    loop = ReplicaLoop(
        store,
        other,
        other,
        other,
        other,
        other,
        SystemClock(),
        builds=other,
        bringing=other,
        fetching=other,
        files=other,
        quiet=other,
        memory=other,
    )
    heard = Accepted(OrderId("n", "op", 1))
    loop._hear(heard)
    loop._look_for_room_again()
    with pytest.raises(Unavailable):
        await loop._pass()
    assert (loop._heard, loop._room_may_have_come) == ([heard], True)
