"""Which model files are on which nodes: seen again, forgotten, gone with the node."""

from __future__ import annotations

from datetime import timedelta

import pytest

from corral.kit.errors import Conflict
from corral.store import Store
from corral.store.tables import node_files, nodes
from tests.integration.store.rows import a_node


async def test_they_are_seen_forgotten_and_go_with_their_node(store: Store) -> None:
    one, other = a_node(), a_node()
    async with store.write() as tx:
        for node in (one, other):
            await nodes.insert(tx, node)
        await node_files.seen(tx, [(one.id, "sha256:a"), (one.id, "sha256:b"), (other.id, "sha256:a")])
        await node_files.seen(tx, [(one.id, "sha256:a"), (one.id, "sha256:a")])
    async with store.write() as tx:
        assert await node_files.by_node(tx) == {
            one.id: frozenset({"sha256:a", "sha256:b"}),
            other.id: frozenset({"sha256:a"}),
        }
        await nodes.delete(tx, other.id)
        assert set(await node_files.by_node(tx)) == {one.id}
        now = await tx.now()
        await node_files.prune(tx, now - timedelta(hours=1))
        assert len(await node_files.list_(tx)) == 2
        await node_files.prune(tx, now + timedelta(hours=1))
        assert await node_files.list_(tx) == []


async def test_of_a_node_that_is_gone_nothing_is_kept(store: Store) -> None:
    with pytest.raises(Conflict):
        async with store.write() as tx:
            await node_files.seen(tx, [("nobody", "sha256:a")])
