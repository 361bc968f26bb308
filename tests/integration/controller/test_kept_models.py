"""Nodes hear which models there are: when one went, when somebody else takes over, and now and then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from corral.bus.api import Tokens
from corral.bus.local import LocalHub
from corral.contract.messages.models import KEEP_MODELS, KeepModels
from corral.controller.files.kept_models import KeptModelsPublisher
from corral.controller.runtime.leadership import Leadership
from corral.kit.errors import Unavailable
from corral.store import Store, open_store
from corral.store.tables import models, nodes
from tests.integration.store.rows import a_model, a_node
from tests.support.manual_clock import ManualClock
from tests.support.sqlite import sqlite_url
from tests.support.waiting import until


async def put(store: Store, *names: str) -> None:
    async with store.write() as tx:
        for name in names:
            await models.put(tx, a_model(name))


async def publishes(deleted: KeptModelsPublisher, clock: ManualClock) -> bool:
    """Whether the pass half a minute later publishes the list."""
    published = []

    async def publish(*_words: object, **tokens: object) -> None:
        published.append(tokens)

    clock.advance(30.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deleted._bus, "publish", publish)
        await deleted.run_once()
    return bool(published)


@contextmanager
def no_bus(deleted: KeptModelsPublisher) -> Iterator[None]:
    async def publish(*_words: object, **_tokens: object) -> None:
        raise Unavailable("there is no bus")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deleted._bus, "publish", publish)
        yield


async def test_nodes_hear_of_deleted_models(tmp_path: Path) -> None:
    clock, heard = ManualClock(), list[Any]()
    hub = LocalHub(clock)
    async with (
        open_store(sqlite_url(tmp_path)) as store,
        hub.join("controller") as bus,
        hub.join("node") as there,
    ):
        ours, foreign, pending = (
            a_node(protocol=1, approved=True),
            a_node(protocol=0, approved=True),
            a_node(protocol=1, approved=False),
        )
        async with store.write() as tx:
            for node in (ours, foreign, pending):
                await nodes.insert(tx, node)

        async def hear(told: KeepModels, tokens: Tokens) -> None:
            heard.append((tokens["node"], told.models))

        for node in (ours, foreign, pending):
            await there.subscribe(KEEP_MODELS, hear, node=node.id)
        await put(store, "a", "b")
        deleted = KeptModelsPublisher(store, bus, Leadership(store, "one", ttl_s=15.0), clock, repeat_every_s=100.0)
        await deleted.run_once()
        await until(lambda: heard == [(ours.id, ("a", "b"))])
        await put(store, "c")
        await deleted.run_once()  # nothing went
        async with store.write() as tx:
            await models.delete(tx, "a")
        await deleted.run_once()
        await until(lambda: heard[1:] == [(ours.id, ("b", "c"))])
        async with store.write() as tx:
            await models.delete(tx, "b")
        with no_bus(deleted):
            await deleted.run_once()
        await deleted.run_once()
        await until(lambda: heard[2:] == [(ours.id, ("c",))])
        second = KeptModelsPublisher(store, bus, Leadership(store, "two", ttl_s=15.0), clock)
        await second.run_once()  # the other has the lease
        # Workers keep what was used a moment ago, and what an ending process reads: the list comes again, less and
        # less often.
        published = [at_s for at_s in range(30, 600, 30) if await publishes(deleted, clock)]
        assert published == [30, 90, 210, 330, 450, 570]
