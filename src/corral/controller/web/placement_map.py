"""The machines as boxes with their memory, filled in proportion by the models on them. Pure; `_map.html` writes what is
decided here."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from corral.contract.admin import NodeView
from corral.contract.hardware import Device
from corral.controller.web.words import counted, model_href, node_href, size, used_of
from corral.store.records import DesiredReplica, ReplicaStage

WIDTH = 300.0
MAX_BOXES = 48  # of more machines each is a tile with one bar
MAX_TILES = 240
MODELS_SHOWN = 4
_HUES = 8
_STATES = {
    ReplicaStage.PLACED: ("coming", "on its way"),
    ReplicaStage.ORDERED: ("coming", "starting"),
    ReplicaStage.RUNNING: ("there", "ready"),
    ReplicaStage.LEAVING: ("leaving", "ending"),
}


@dataclass(frozen=True)
class Block:
    """A replica in a bar."""

    key: str
    x: str
    width: str
    css: str
    href: str
    title: str


@dataclass(frozen=True)
class MemoryBar:
    name: str
    title: str
    words: str
    blocks: tuple[Block, ...]
    other_x: str  # memory that is used by something else
    other_width: str


@dataclass(frozen=True)
class ModelMark:
    name: str
    href: str
    css: str
    words: str  # how many, and what they do


@dataclass(frozen=True)
class MachineBox:
    name: str
    href: str
    status: str
    title: str
    bars: tuple[MemoryBar, ...]
    models: tuple[ModelMark, ...]
    models_more: int


@dataclass(frozen=True)
class PlacementMap:
    boxes: tuple[MachineBox, ...]
    tiles: bool
    more: int
    words: str


def hue_of(model: str) -> str:
    """The same colour on every page and after every change."""
    return f"hue-{zlib.crc32(model.encode()) % _HUES}"


def placement_map(nodes: Sequence[NodeView], replicas: Sequence[DesiredReplica]) -> PlacementMap:
    on_node: dict[str, list[DesiredReplica]] = {}
    for row in replicas:
        on_node.setdefault(row.node_id, []).append(row)
    tiles = len(nodes) > MAX_BOXES
    shown = sorted(nodes, key=lambda node: (_rank(node, on_node.get(node.id, ())), node.name))
    shown = sorted(shown[: MAX_TILES if tiles else MAX_BOXES], key=lambda node: node.name)
    draw = _tile if tiles else box_of
    models = counted(len({row.model for row in replicas}), "model", "models")
    return PlacementMap(
        boxes=tuple(draw(node, on_node.get(node.id, ())) for node in shown),
        tiles=tiles,
        more=len(nodes) - len(shown),
        words=f"{models} on {counted(len(on_node), 'machine', 'machines')}" if replicas else "no model is loaded",
    )


def box_of(node: NodeView, replicas: Sequence[DesiredReplica]) -> MachineBox:
    ordered = sorted(replicas, key=lambda row: (row.model, row.replica))
    devices = [device for device in node.devices if device.total_bytes and not device.unified]
    bars = [_device_bar(device, node, ordered, many=len(devices) > 1) for device in devices]
    # What runs on no device of its own lives in the machine's memory.
    of_ram = [(row, row.memory_bytes) for row in ordered if not any(_is_on(row, device) for device in devices)]
    if node.total_ram:
        used = max(0, node.total_ram - node.available_ram)
        bars.append(_bar("RAM", "memory of the machine", node.total_ram, used, of_ram, node))
    marks = _marks(ordered)
    return MachineBox(
        name=node.name,
        href=node_href(node.name),
        status=node.status,
        title=f"{node.name}: {node.status}",
        bars=tuple(bars),
        models=marks[:MODELS_SHOWN],
        models_more=max(0, len(marks) - MODELS_SHOWN),
    )


def _tile(node: NodeView, replicas: Sequence[DesiredReplica]) -> MachineBox:
    """One bar: the devices together, or the memory where there is none."""
    total, free = (node.total_vram, node.available_vram) if node.total_vram else (node.total_ram, node.available_ram)
    ordered = sorted(replicas, key=lambda row: (row.model, row.replica))
    bar = _bar("", "", total, max(0, total - free), [(row, row.memory_bytes) for row in ordered], node)
    names = ", ".join(mark.name for mark in _marks(ordered)[:MODELS_SHOWN])
    title = f"{node.name}: {node.status}, {bar.words}{f', {names}' if names else ''}"
    return MachineBox(node.name, node_href(node.name), node.status, title, (bar,), (), 0)


def _rank(node: NodeView, replicas: Sequence[DesiredReplica]) -> int:
    """What a person looks for first, where not all machines have room."""
    if any(row.stage is not ReplicaStage.RUNNING for row in replicas):
        return 0
    if node.status not in ("healthy", "offline"):
        return 1
    return 2 if replicas else 3


def _is_on(row: DesiredReplica, device: Device) -> bool:
    return any(
        (each.uuid == device.uuid) if each.uuid else (each.vendor, each.index) == (device.vendor, device.index)
        for each in row.devices
    )


def _device_bar(device: Device, node: NodeView, replicas: Sequence[DesiredReplica], *, many: bool) -> MemoryBar:
    held = [(row, row.memory_bytes // max(1, len(row.devices))) for row in replicas if _is_on(row, device)]
    if device.free_bytes is not None:
        used = device.total_bytes - device.free_bytes
    else:
        used = sum(amount for _, amount in held) if many else max(0, node.total_vram - node.available_vram)
    name = device.name or device.vendor
    return _bar(f"{device.index}: {name}" if many else name, name, device.total_bytes, used, held, node)


def _bar(
    name: str, title: str, total: int, used: int, held: Sequence[tuple[DesiredReplica, int]], node: NodeView
) -> MemoryBar:
    """Reserved memory may be more than what is used yet, and both together never more than the bar."""
    reserved = sum(amount for _, amount in held)
    scale = WIDTH / max(1, total, reserved)
    blocks, x = [], 0.0
    for row, amount in held:
        blocks.append(_block(row, amount, x, amount * scale, node))
        x += amount * scale
    other = max(0.0, min(WIDTH, used * scale) - x)
    words = used_of(max(used, min(reserved, total)), total) if total else ""
    return MemoryBar(name, title, words, tuple(blocks), f"{x:.1f}", f"{other:.1f}" if other >= 0.5 else "")


def _block(row: DesiredReplica, amount: int, x: float, width: float, node: NodeView) -> Block:
    css, words = _STATES[row.stage]
    if row.error and row.stage is not ReplicaStage.RUNNING:
        css, words = "failing", f"failing: {row.error[:120]}"
    title = f"{row.model} on {node.name}: {words}, {size(amount)}" if amount else f"{row.model} on {node.name}: {words}"
    href = f"{model_href(row.model)}#replica-{row.op_id}"
    key = f"{row.model} {row.replica}"
    return Block(key, f"{x:.1f}", f"{max(2.0, width - 1):.1f}", f"{hue_of(row.model)} {css}", href, title)


def _marks(replicas: Sequence[DesiredReplica]) -> tuple[ModelMark, ...]:
    by_model: dict[str, list[DesiredReplica]] = {}
    for row in replicas:
        by_model.setdefault(row.model, []).append(row)
    return tuple(
        ModelMark(model, model_href(model), hue_of(model), _mark_words(rows)) for model, rows in by_model.items()
    )


def _mark_words(rows: Sequence[DesiredReplica]) -> str:
    counts = Counter(_STATES[row.stage][1] for row in rows)
    moving = [word if count == 1 else f"{count} {word}" for word, count in counts.items() if word != "ready"]
    return ", ".join([*([f"×{len(rows)}"] if len(rows) > 1 else []), *moving])
