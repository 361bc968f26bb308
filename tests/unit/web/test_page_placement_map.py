"""The machines and what is on them: widths in proportion, states, colours, and of a large fleet a part."""

from __future__ import annotations

from typing import Any

import msgspec

from corral.contract.admin import NodeView
from corral.contract.hardware import Device
from corral.contract.messages.replicas import ReplicaDevice
from corral.controller.web.placement_map import MAX_BOXES, MAX_TILES, WIDTH, box_of, hue_of, placement_map
from corral.controller.web.words import model_href, node_href
from corral.store.records import DesiredReplica, ReplicaStage
from tests.integration.store.rows import a_replica

GIB = 1024**3


def node(name: str = "barn", **more: Any) -> NodeView:
    known = {field.name: 0 if field.type is int else "" for field in msgspec.structs.fields(NodeView) if field.required}
    return NodeView(**({**known, "id": name, "name": name, "status": "healthy"} | more))


def gpu(index: int = 0, free_gib: int | None = 20) -> Device:
    free = free_gib * GIB if free_gib is not None else None
    return Device(index=index, vendor="nvidia", name="RTX 4090", total_bytes=24 * GIB, free_bytes=free)


def replica(model: str, gib: int, *on: int, **more: Any) -> DesiredReplica:
    devices = tuple(ReplicaDevice("nvidia", index) for index in on)
    known: dict[str, Any] = {"memory_bytes": gib * GIB, "devices": devices, "stage": ReplicaStage.RUNNING}
    return a_replica("barn", model, **(known | more))


def test_blocks_are_as_wide_as_their_share_of_the_device() -> None:
    box = box_of(node(devices=(gpu(free_gib=4),)), [replica("a", 12, 0), replica("b", 6, 0)])
    (bar,) = box.bars
    assert [(block.x, block.width) for block in bar.blocks] == [("0.0", "149.0"), ("150.0", "74.0")]
    assert (bar.other_x, bar.other_width) == ("225.0", "25.0"), "2 GiB are used by something else"
    assert bar.words == "20 / 24 GiB"
    assert [mark.name for mark in box.models] == ["a", "b"]


def test_a_replica_over_two_devices_takes_half_of_it_on_each() -> None:
    box = box_of(node(devices=(gpu(0), gpu(1), gpu(2))), [replica("a", 24, 0, 1)])
    assert [[block.width for block in bar.blocks] for bar in box.bars] == [["149.0"], ["149.0"], []]
    assert [bar.name for bar in box.bars] == ["0: RTX 4090", "1: RTX 4090", "2: RTX 4090"]


def test_what_runs_on_no_device_lives_in_the_memory_of_the_machine() -> None:
    shown = box_of(node(devices=(gpu(),), total_ram=64 * GIB, available_ram=32 * GIB), [replica("a", 16)])
    device, ram = shown.bars
    assert (device.blocks, [block.width for block in ram.blocks]) == ((), ["74.0"])
    assert (ram.other_x, ram.other_width) == ("75.0", "75.0")


def test_more_reserved_than_there_is_never_leaves_the_bar() -> None:
    (bar,) = box_of(node(devices=(gpu(free_gib=24),)), [replica("a", 24, 0), replica("b", 24, 0)]).bars
    last = bar.blocks[-1]
    assert float(last.x) + float(last.width) <= WIDTH
    assert bar.words == "24 / 24 GiB"


def test_what_moves_is_marked_and_failures_say_why() -> None:
    rows = [
        replica("a", 2, 0, stage=ReplicaStage.PLACED),
        replica("b", 2, 0, stage=ReplicaStage.ORDERED),
        replica("c", 2, 0, stage=ReplicaStage.LEAVING),
        replica("d", 2, 0, stage=ReplicaStage.ORDERED, error="out of memory"),
    ]
    box = box_of(node(devices=(gpu(),)), rows)
    assert [block.css.split()[1] for block in box.bars[0].blocks] == ["coming", "coming", "leaving", "failing"]
    assert box.bars[0].blocks[3].title == "d on barn: failing: out of memory, 2 GiB"
    assert [mark.words for mark in box.models] == ["on its way", "starting", "ending", "starting"]


def test_a_device_that_does_not_say_what_is_free_is_known_from_the_node() -> None:
    (bar,) = box_of(node(devices=(gpu(free_gib=None),), total_vram=24 * GIB, available_vram=12 * GIB), []).bars
    assert (bar.words, bar.other_width) == ("12 / 24 GiB", "150.0")


def test_a_colour_stays_with_its_model() -> None:
    assert hue_of("smollm") == hue_of("smollm")
    assert len({hue_of(f"model-{number}") for number in range(100)}) == 8


def test_many_machines_are_tiles_and_those_that_move_are_never_left_out() -> None:
    fleet = [node(f"node-{number:04}", total_vram=24 * GIB, available_vram=6 * GIB) for number in range(1000)]
    moving = msgspec.structs.replace(replica("a", 6, stage=ReplicaStage.ORDERED), node_id="node-0999")
    shown = placement_map(fleet, [moving])
    assert (shown.tiles, len(shown.boxes), shown.more) == (True, MAX_TILES, 1000 - MAX_TILES)
    last = shown.boxes[-1]
    assert last.title == "node-0999: healthy, 18 / 24 GiB, a"
    assert [(block.x, block.width) for block in last.bars[0].blocks] == [("0.0", "74.0")]
    assert not placement_map(fleet[:MAX_BOXES], []).tiles
    assert placement_map(fleet[:3], [moving]).words == "1 model on 1 machine"


def test_links_take_any_name() -> None:
    assert model_href("org/m x?") == "/models/org/m%20x%3F"
    assert node_href("a/b#(c)") == "/nodes/a%2Fb%23(c)"
