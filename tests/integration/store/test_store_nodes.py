"""Nodes, their labels, their tombstones, their heartbeats."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Any

import msgspec
import pytest

from corral.contract.hardware import Device
from corral.kit.errors import NotFound
from corral.store import Store
from corral.store.tables import node_labels, node_tombstones, nodes
from corral.store.tables.nodes import Heartbeat, Node, NodeHardware
from tests.integration.store.rows import NOON, a_node

GPU = Device(index=0, vendor="nvidia", name="RTX 4090", total_bytes=24 << 30)


async def keep(store: Store, *kept: Node) -> None:
    async with store.write() as tx:
        for node in kept:
            await nodes.insert(tx, node)


async def got(store: Store, node: Node) -> Node:
    async with store.read() as tx:
        return await nodes.get(tx, node.id)


async def beat(store: Store, *beats: Heartbeat) -> int:
    async with store.write() as tx:
        return await nodes.record_heartbeats(tx, beats)


async def test_every_field_comes_back(store: Store) -> None:
    node = Node(
        id="11111111-2222-4333-8444-555555555555",
        name="barn",
        created_at=NOON,
        updated_at=NOON,
        status_changed_at=NOON,
        last_heartbeat=NOON,
        row_version=3,
        node_type="agent",
        status="draining",
        status_reason="somebody asked",
        approved=True,
        drained=True,
        left=True,
        address="10.0.0.7:50051",
        http_address="10.0.0.7:50050",
        ingress_url="https://10.0.0.7:50050",
        ingress_ok=False,
        ingress_error="refused",
        bus_down=True,
        protocol=1,
        auth="shared",
        token_hash="t" * 64,
        enrolment_hash="e" * 64,
        boot_id="b",
        version="0.1.0",
        os="linux",
        arch="arm64",
        gpu_vendor="nvidia",
        gpu_compute_capability="8.9",
        capability="nvidia-cuda-12",
        devices=(GPU,),
        total_vram=2**63 - 1,
        available_vram=2,
        reserved_vram=3,
        total_ram=4,
        available_ram=5,
        total_disk=6,
        available_disk=7,
        max_replicas_per_model=8,
        max_replicas_per_model_manually_set=True,
        vram_budget="80%",
        vram_budget_bytes=9,
        vram_budget_manually_set=True,
    )
    await keep(store, node)
    assert await got(store, node) == node
    async with store.read() as tx:
        assert await nodes.find_by_name(tx, "barn") == node
        assert await nodes.find_by_token_hash(tx, "t" * 64) == node


async def test_what_is_not_there(store: Store) -> None:
    await keep(store, a_node(name="shared-token", token_hash=""))
    async with store.read() as tx:
        assert await nodes.find(tx, "nobody") is None
        assert await nodes.find_by_name(tx, "nobody") is None
        assert await nodes.find_by_token_hash(tx, "f" * 64) is None
        assert await nodes.find_by_token_hash(tx, "") is None, "no token is nobody's token"
        with pytest.raises(NotFound, match="nobody"):
            await nodes.get(tx, "nobody")


async def test_listed_by_name_and_in_pages(store: Store) -> None:
    names = ["Z", "a", "b-1", "b1", "ä", "🐎"]  # by code point, whatever the database's language
    await keep(store, *(a_node(name=name) for name in reversed(names)))
    async with store.read() as tx:
        assert [node.name for node in await nodes.list_(tx)] == names
        assert [node.name for node in await nodes.list_(tx, limit=2)] == ["Z", "a"]
        assert [node.name for node in await nodes.list_(tx, limit=3, after_name="a")] == ["b-1", "b1", "ä"]
        assert [node.name for node in await nodes.list_(tx, after_name="ä")] == ["🐎"]
        assert await nodes.list_(tx, limit=10, after_name="🐎") == []
        assert [pulse.id for pulse in await nodes.list_pulses(tx)] == [node.id for node in await nodes.list_(tx)]


async def test_metrics_read_names_and_hardware_of_the_first_nodes(store: Store) -> None:
    device = Device(index=0, vendor="nvidia", total_bytes=9, power_w=300)
    rows = [a_node(name="byre"), a_node(name="barn", total_ram=64, available_ram=16, devices=(device,))]
    await keep(store, *rows)
    async with store.read() as tx:
        assert await nodes.list_names(tx) == {row.id: row.name for row in rows}
        [first] = await nodes.list_hardware(tx, limit=1)
    assert first == NodeHardware("barn", "healthy", 64, 16, 0, 0, (device,), rows[1].id)


async def test_a_change_raises_the_version_and_keeps_the_rest(store: Store) -> None:
    node = a_node(capability="metal")
    await keep(store, node)
    async with store.write() as tx:
        assert await nodes.update(tx, node.id, {"status": "offline", "devices": (GPU,)}, expected=1)
    after = await got(store, node)
    assert after.updated_at > node.updated_at
    assert msgspec.structs.replace(after, updated_at=NOON) == msgspec.structs.replace(
        node, status="offline", devices=(GPU,), row_version=2
    )


async def test_a_change_without_columns_still_counts(store: Store) -> None:
    node = a_node()
    await keep(store, node)
    async with store.write() as tx:
        assert await nodes.update(tx, node.id, {}, expected=1)
    assert (await got(store, node)).row_version == 2


async def test_a_change_on_an_old_version_loses(store: Store) -> None:
    node = a_node()
    await keep(store, node)
    async with store.write() as tx:
        assert await nodes.update(tx, node.id, {"status": "draining"}, expected=1)
        assert not await nodes.update(tx, node.id, {"status": "healthy"}, expected=1)
        assert not await nodes.update(tx, "nobody", {"status": "healthy"}, expected=1)
    assert (await got(store, node)).status == "draining"


async def test_an_unknown_column_is_a_mistake(store: Store) -> None:
    node = a_node()
    await keep(store, node)
    with pytest.raises(Exception, match="colour"):
        async with store.write() as tx:
            await nodes.update(tx, node.id, {"colour": "red"}, expected=1)


async def test_a_deleted_node_leaves_a_tombstone_and_no_labels(store: Store) -> None:
    node = a_node(name="barn", token_hash="t1", enrolment_hash="e1")
    await keep(store, node)
    async with store.write() as tx:
        await node_labels.merge(tx, node.id, {"tier": "fast"}, origin="admin")
        assert await nodes.delete(tx, node.id)
        assert not await nodes.delete(tx, node.id)
    again = a_node(name="barn", token_hash="t2")
    await keep(store, again)
    async with store.write() as tx:
        assert await nodes.delete(tx, again.id)
    async with store.read() as tx:
        assert await nodes.find(tx, node.id) is None
        assert await node_labels.list_for(tx) == {}
        grave = await node_tombstones.find(tx, node.id)
        assert grave is not None
        assert (grave.name, grave.token_hash, grave.enrolment_hash) == ("barn", "t1", "e1")
        assert await node_tombstones.find_by_token_hash(tx, "t1") == grave
        assert await node_tombstones.find_by_token_hash(tx, "") is None
        assert [found.node_id for found in await node_tombstones.list_by_name(tx, "barn")] == [again.id, node.id]
        assert await node_tombstones.find(tx, "nobody") is None


async def test_tombstones_are_pruned_by_age(store: Store) -> None:
    node = a_node()
    await keep(store, node)
    async with store.write() as tx:
        await nodes.delete(tx, node.id)
        assert await node_tombstones.prune(tx, older_than_s=3600) == 0
        assert await node_tombstones.prune(tx, older_than_s=-1) == 1
        assert await node_tombstones.find(tx, node.id) is None


async def test_labels_are_merged_replaced_and_deleted(store: Store) -> None:
    one, two = a_node(), a_node()
    await keep(store, one, two)
    async with store.write() as tx:
        await node_labels.merge(tx, one.id, {"tier": "slow", "rack": "b2"}, origin="worker")
        await node_labels.merge(tx, one.id, {"tier": "fast"}, origin="admin")
        await node_labels.merge(tx, one.id, {}, origin="admin")
        await node_labels.merge(tx, two.id, {"old": "1"}, origin="worker")
        await node_labels.replace_all(tx, two.id, {"new": "2"}, origin="admin")
    async with store.read() as tx:
        assert await node_labels.get(tx, one.id) == {"tier": "fast", "rack": "b2"}
        assert [(label.key, label.origin) for label in await node_labels.list_(tx, one.id)] == [
            ("rack", "worker"),
            ("tier", "admin"),
        ]
        expected = {one.id: {"rack": "b2", "tier": "fast"}, two.id: {"new": "2"}}
        assert await node_labels.list_for(tx) == expected
        assert await node_labels.list_for(tx, [one.id, two.id, "nobody"]) == expected
        assert await node_labels.list_for(tx, [two.id]) == {two.id: {"new": "2"}}
        assert await node_labels.list_for(tx, []) == {}
        assert await node_labels.get(tx, "nobody") == {}
    async with store.write() as tx:
        assert await node_labels.delete(tx, one.id, "rack")
        assert not await node_labels.delete(tx, one.id, "rack")
        await node_labels.replace_all(tx, two.id, {}, origin="admin")
        assert await node_labels.list_for(tx) == {one.id: {"tier": "fast"}}


FULL: dict[str, Any] = {
    "boot_id": "boot-2",
    "available_vram": 70,
    "total_vram": 100,
    "available_ram": 30,
    "total_ram": 40,
    "available_disk": 0,
    "total_disk": 0,
    "gpu_vendor": "amd",
    "devices": (GPU,),
    "bus_down": True,
}


async def stamped(store: Store, node: Node, since: datetime) -> Node:
    """The node with its old stamp again, once it is seen to have a new one."""
    after = await got(store, node)
    assert after.last_heartbeat is not None
    assert after.last_heartbeat >= since
    return msgspec.structs.replace(after, last_heartbeat=node.last_heartbeat)


async def test_a_heartbeat_writes_what_it_brings(store: Store) -> None:
    node = a_node(available_disk=5, total_disk=9, reserved_vram=11)
    await keep(store, node)
    async with store.read() as tx:
        before = await tx.now()
    assert await beat(store, Heartbeat(node_id=node.id, **FULL)) == 0
    assert await stamped(store, node, before) == msgspec.structs.replace(node, **FULL, reserved_vram=0)


async def test_an_empty_heartbeat_writes_the_time_only(store: Store) -> None:
    node = a_node(
        available_vram=5, reserved_vram=3, gpu_vendor="nvidia", devices=(GPU,), boot_id="boot-1", bus_down=True
    )
    await keep(store, node)
    async with store.read() as tx:
        before = await tx.now()
    await beat(store, Heartbeat(node_id=node.id, boot_id=""))
    assert await stamped(store, node, before) == node


@pytest.mark.parametrize("status", ["pending", "offline"])
async def test_of_a_node_that_takes_no_part_only_the_time_counts(store: Store, status: str) -> None:
    node = a_node(status=status, available_vram=5, reserved_vram=3)
    await keep(store, node)
    async with store.read() as tx:
        before = await tx.now()
    await beat(store, Heartbeat(node_id=node.id, **FULL))
    assert await stamped(store, node, before) == node


@pytest.mark.parametrize(("available", "stored"), [(50, 50), (60, 60), (61, 60), (100, 60)])
async def test_free_vram_is_capped_by_the_budget(store: Store, available: int, stored: int) -> None:
    node = a_node(vram_budget="60%", vram_budget_bytes=60)
    await keep(store, node)
    await beat(store, Heartbeat(node_id=node.id, available_vram=available, total_vram=100))
    after = await got(store, node)
    assert (after.available_vram, after.total_vram) == (stored, 100)


async def test_those_that_were_away_are_counted(store: Store) -> None:
    kept = [a_node(status=status) for status in ("offline", "unhealthy", "healthy", "pending", "draining")]
    await keep(store, *kept)
    assert await beat(store, *(Heartbeat(node_id=node.id) for node in kept), Heartbeat(node_id="nobody")) == 2
    assert await beat(store) == 0


async def test_the_last_beat_of_a_node_counts(store: Store) -> None:
    node = a_node()
    await keep(store, node)
    await beat(store, Heartbeat(node_id=node.id, available_ram=1), Heartbeat(node_id=node.id, available_ram=2))
    assert (await got(store, node)).available_ram == 2


async def test_one_workers_nonsense_does_not_spoil_the_batch(store: Store) -> None:
    good, nul, huge = a_node(), a_node(available_ram=4), a_node(total_ram=6)
    await keep(store, good, nul, huge)
    async with store.read() as tx:
        before = await tx.now()
    await beat(
        store,
        Heartbeat(node_id=nul.id, gpu_vendor="nvi\0dia", available_ram=9),
        Heartbeat(node_id=huge.id, total_ram=2**63, available_ram=7, total_vram=-1),
        Heartbeat(node_id="no\0body", available_ram=1),
        Heartbeat(node_id=good.id, available_ram=8),
    )
    assert (await got(store, good)).available_ram == 8
    assert await stamped(store, nul, before) == nul
    assert await stamped(store, huge, before) == msgspec.structs.replace(huge, available_ram=7)


async def test_a_thousand_beats_at_once_and_twice_at_a_time(store: Store, other: Store) -> None:
    kept = [a_node() for _ in range(1000)]
    await keep(store, *kept)
    there = [Heartbeat(node_id=node.id, available_ram=1) for node in kept]
    back = [Heartbeat(node_id=node.id, available_ram=2) for node in reversed(kept)]
    await asyncio.gather(beat(store, *there), beat(other, *back))
    async with store.read() as tx:
        listed = await nodes.list_(tx)
    assert len({node.available_ram for node in listed}) == 1, "one batch after the other, not mixed"
    assert all(node.last_heartbeat and node.row_version == 1 for node in listed)
