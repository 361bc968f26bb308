"""Batches of heartbeats: an outage costs time only, nonsense costs its sender only."""

from __future__ import annotations

from pathlib import Path

import pytest

from corral.bus.local import LocalHub
from corral.contract.hardware import Device
from corral.contract.messages.nodes import NODE_HEARTBEAT, BusHeartbeat, HttpHeartbeat
from corral.kit.clock import SystemClock
from corral.kit.errors import Invalid, Unavailable
from corral.store.engine.transactions import Transaction
from corral.store.tables import nodes
from corral.store.tables.nodes import Node
from tests.support.registry import Registry, open_registry
from tests.support.sqlite import sqlite_url
from tests.support.waiting import until


async def stored(registry: Registry, node_id: str) -> Node:
    async with registry.store.read() as tx:
        return await nodes.get(tx, node_id)


async def test_who_cannot_write_leaves_the_hearing_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a node's beats would go to a controller that cannot record them, and now and then all of them."""
    hub = LocalHub(SystemClock())
    async with open_registry(sqlite_url(tmp_path), hub=hub) as registry, hub.join("node") as node:
        record = nodes.record_heartbeats
        cut_off = False

        async def record_if_possible(tx: Transaction, beats: list[nodes.Heartbeat]) -> int:
            if cut_off:
                raise Unavailable("the database is away")
            return await record(tx, beats)

        monkeypatch.setattr(nodes, "record_heartbeats", record_if_possible)
        heartbeats = registry.heartbeats
        heartbeats.receive_http("x", HttpHeartbeat())
        await heartbeats.flush()
        heard = heartbeats.received

        cut_off = True
        heartbeats.receive_http("x", HttpHeartbeat())
        with pytest.raises(Unavailable):
            await heartbeats.flush()
        assert registry.recordings[-1] == "not recorded"
        await node.publish(NODE_HEARTBEAT, BusHeartbeat(), node="x")

        cut_off = False
        await heartbeats.flush()
        assert registry.recordings[-1] == "recorded"
        await node.publish(NODE_HEARTBEAT, BusHeartbeat(), node="x")
        await until(lambda: heartbeats.received == heard + 2, "beat heard again")


async def test_what_can_never_be_stored_is_not_tried_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_registry(sqlite_url(tmp_path)) as registry:
        one = await registry.join("one", pre_approved=True)
        record = nodes.record_heartbeats

        async def record_plain(tx: Transaction, beats: list[nodes.Heartbeat]) -> int:
            if any(beat.gpu_vendor for beat in beats):
                raise Invalid("this cannot be stored")
            return await record(tx, beats)

        monkeypatch.setattr(nodes, "record_heartbeats", record_plain)
        before = (await stored(registry, one.id)).last_heartbeat
        assert before is not None
        registry.heartbeats.receive_http(one.id, HttpHeartbeat(gpu_vendor="poison"))
        with pytest.raises(Invalid):
            await registry.heartbeats.flush()
        await registry.heartbeats.flush()
        after = (await stored(registry, one.id)).last_heartbeat
        assert after is not None
        assert after > before, "the pulse counts, the numbers do not"


async def test_a_mistake_of_ours_is_no_silence_of_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_registry(sqlite_url(tmp_path)) as registry:

        async def break_down(tx: Transaction, beats: list[nodes.Heartbeat]) -> int:
            raise ZeroDivisionError

        monkeypatch.setattr(nodes, "record_heartbeats", break_down)
        registry.heartbeats.receive_http("x", HttpHeartbeat())
        with pytest.raises(ZeroDivisionError):
            await registry.heartbeats.flush()
        assert registry.recordings == ["not recorded"]


async def test_a_nodes_nonsense_is_cut_to_size(tmp_path: Path) -> None:
    async with open_registry(sqlite_url(tmp_path)) as registry:
        told = await registry.join("barn", pre_approved=True)
        devices = tuple(Device(index=10**40, vendor="\x1b[2J", name="n" * 10_000) for _ in range(5000))
        beat = BusHeartbeat(devices=devices, gpu_vendor="v" * 100_000, available_ram=-5, boot_id="\n")
        await registry.heartbeats._on_bus_heartbeat(beat, {"node": told.id})
        await registry.heartbeats.flush()
        node = await stored(registry, told.id)
        assert len(node.devices) == 128
        assert node.devices[0] == Device(index=0, vendor="?[2J", name="n" * 128)
        assert node.gpu_vendor == "v" * 128
        assert node.available_ram == 0
        assert node.boot_id == "?"


async def test_what_could_not_be_written_comes_with_the_next_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_registry(sqlite_url(tmp_path)) as registry:
        one = await registry.join("one", pre_approved=True)
        other = await registry.join("other", pre_approved=True)
        before = {node.id: (await stored(registry, node.id)).last_heartbeat for node in (one, other)}
        record = nodes.record_heartbeats

        async def away(_tx: Transaction, _beats: list[nodes.Heartbeat]) -> int:
            raise Unavailable("the database is away")

        monkeypatch.setattr(nodes, "record_heartbeats", away)
        registry.heartbeats.receive_http(one.id, HttpHeartbeat(available_ram=1, boot_id="old"))
        registry.heartbeats.receive_http(other.id, HttpHeartbeat(available_ram=2))
        with pytest.raises(Unavailable):
            await registry.heartbeats.flush()
        registry.heartbeats.receive_http(one.id, HttpHeartbeat(available_ram=3))
        monkeypatch.setattr(nodes, "record_heartbeats", record)
        await registry.heartbeats.flush()
        found = [await stored(registry, node.id) for node in (one, other)]
        assert [node.available_ram for node in found] == [3, 2], "of two beats of one node the later counts"
        assert found[1].last_heartbeat != before[other.id]


@pytest.mark.parametrize(("bus", "down"), [("down", True), ("up", False)])
async def test_a_node_tells_by_http_whether_its_bus_is_down(tmp_path: Path, bus: str, down: bool) -> None:
    async with open_registry(sqlite_url(tmp_path)) as registry:
        one = await registry.join("one", pre_approved=True)
        registry.heartbeats.receive_http(one.id, HttpHeartbeat(bus=bus))
        await registry.heartbeats.flush()
        assert (await stored(registry, one.id)).bus_down is down
        registry.heartbeats.receive_http(one.id, HttpHeartbeat())
        await registry.heartbeats.flush()
        assert (await stored(registry, one.id)).bus_down is down, "a beat that does not say keeps what is known"
