"""Processes on workers that only offer a gRPC address, and the node's list that is made of them."""

from __future__ import annotations

from datetime import timedelta

import msgspec
import pytest

from corral.contract.messages.replicas import ReplicaProcess
from corral.kit.errors import Conflict
from corral.store import Store
from corral.store.tables import node_backends, nodes, peer_processes
from tests.integration.store.rows import NOON, a_node, a_peer_process, an_inventory


async def test_they_are_kept_changed_and_go_with_their_node(store: Store) -> None:
    one, other = a_node(), a_node()
    later = a_peer_process(one.id, "p2", replica=1, started_at=NOON + timedelta(seconds=1))
    async with store.write() as tx:
        for node in (one, other):
            await nodes.insert(tx, node)
        await peer_processes.put(tx, [later, a_peer_process(one.id, "p9"), a_peer_process(other.id, "p3")])
    async with store.write() as tx:
        assert [row.process_id for row in await peer_processes.list_(tx, [one.id])] == ["p9", "p2"]
        changed = msgspec.structs.replace(later, state="failed", error="gone")
        await peer_processes.put(tx, [changed])
        assert await peer_processes.find(tx, "p2") == changed
        await peer_processes.delete(tx, ["p9", "nobody"])
        await nodes.delete(tx, other.id)
        assert await peer_processes.list_(tx) == [changed]
        assert await peer_processes.find(tx, "p3") is None


async def test_of_a_node_that_is_gone_nothing_is_kept(store: Store) -> None:
    with pytest.raises(Conflict):
        async with store.write() as tx:
            await peer_processes.put(tx, [a_peer_process("nobody")])


async def test_what_runs_is_written_without_making_the_rest_look_younger(store: Store) -> None:
    node = a_node()
    ready = (ReplicaProcess("p1", "smol", 0, "llama-cpp", "ready", "grpc"),)
    async with store.write() as tx:
        await nodes.insert(tx, node)
        assert not await node_backends.set_processes(tx, node.id, ready), "nobody knows yet what it has"
        await node_backends.put(tx, an_inventory(node.id, boot_id="", seq=0))
    async with store.write() as tx:
        before = await node_backends.find(tx, node.id)
        assert before is not None
        assert before.reported_at is None
        assert await node_backends.set_processes(tx, node.id, ready)
    async with store.read() as tx:
        after = await node_backends.find(tx, node.id)
    assert after is not None
    assert after.processes == ready
    assert after.reported_at is not None
    assert (after.seen_at, after.backends, after.orders) == (before.seen_at, before.backends, before.orders)
    assert after.fingerprint == node_backends.fingerprint_of(after)
