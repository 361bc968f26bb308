"""The change feed of nodes: read for those who follow, and for nobody else."""

from __future__ import annotations

from pathlib import Path

from tests.support.registry import open_registry
from tests.support.sqlite import sqlite_url


async def test_nodes_are_read_only_while_somebody_follows_them(tmp_path: Path) -> None:
    """A fleet of a thousand nodes that change costs nothing here when no page and no command watches them."""
    async with open_registry(sqlite_url(tmp_path)) as registry:
        read: list[str] = []

        def in_flight_of(node_id: str) -> tuple[int, bool]:
            read.append(node_id)
            return 0, True

        registry.feed.in_flight_of = in_flight_of
        await registry.join("barn", pre_approved=True)
        await registry.feed.run_once()
        assert read == []
        async with registry.feed.subscribe() as subscription:
            assert [(await subscription.next()).kind for _ in range(2)] == ["node", "ready"]
            await registry.join("shed", pre_approved=True)
            await registry.feed.run_once()
            change = await subscription.next()
            assert (change.kind, change.data.name) == ("node", "shed")  # type: ignore[attr-defined]
        read.clear()
        await registry.join("attic", pre_approved=True)
        await registry.feed.run_once()
        assert read == []
        async with registry.feed.subscribe() as subscription:
            names = {(await subscription.next()).data.name for _ in range(3)}  # type: ignore[attr-defined]
        assert names == {"barn", "shed", "attic"}
