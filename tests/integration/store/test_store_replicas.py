"""Replicas that are wanted, and loads somebody waits for."""

from __future__ import annotations

import msgspec
import pytest

from corral.kit.errors import Conflict
from corral.store import Store
from corral.store.tables import load_jobs, nodes, replicas
from tests.integration.store.rows import a_job, a_node, a_replica


async def test_a_replica_comes_back_whole_and_goes_with_its_node(store: Store) -> None:
    node = a_node()
    async with store.write() as tx:
        await nodes.insert(tx, node)
        first, second = a_replica(node.id), a_replica(node.id, replica=1, files=None, devices=())
        await replicas.put(tx, [first, second])
        await replicas.put(tx, [msgspec.structs.replace(first, stage="leaving")])
    async with store.write() as tx:
        assert await replicas.list_(tx) == [msgspec.structs.replace(first, stage="leaving"), second]
        assert await replicas.list_(tx, model="nobody") == []
        assert len(await replicas.list_(tx, model="smol")) == 2
        assert await replicas.list_(tx, node_ids=["elsewhere"]) == []
        await replicas.delete(tx, [second])
        assert [row.replica for row in await replicas.list_(tx, node_ids=[node.id])] == [0]
        await nodes.delete(tx, node.id)
        assert await replicas.list_(tx) == []


async def test_a_replica_of_a_node_that_is_gone_is_a_conflict(store: Store) -> None:
    with pytest.raises(Conflict):
        async with store.write() as tx:
            await replicas.put(tx, [a_replica("nobody")])


async def test_one_load_per_model(store: Store) -> None:
    async with store.write() as tx:
        assert await load_jobs.claim(tx, a_job("a", state="pending"))
        assert not await load_jobs.claim(tx, a_job("a", state="loading"))
        assert await load_jobs.claim(tx, a_job("b"))
    async with store.write() as tx:
        found = await load_jobs.find(tx, "a")
        assert found == a_job("a", state="pending")
        await load_jobs.put(tx, [a_job("a", version=2)])
        assert [(job.model, job.version) for job in await load_jobs.list_(tx)] == [("a", 2), ("b", 1)]
        await load_jobs.delete(tx, ["a", "nobody"])
        await load_jobs.delete(tx, [])
        assert [job.model for job in await load_jobs.list_(tx)] == ["b"]
