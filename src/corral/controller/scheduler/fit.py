"""Where on one node a process would go: in RAM, on one device, or spread over equal ones. Pure.

One device that holds it is best. A backend that can use several, or a definition with `tensor_parallel`, spreads it
over equal devices: they work in step, and the smallest would decide for all. The devices with the fewest replicas come
first, then those with the most memory left.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from corral.contract.capability import DEFAULT
from corral.contract.messages.replicas import ReplicaDevice
from corral.controller.scheduler.room import Room, Space, as_replica_device, emptied
from corral.controller.scheduler.world import MIB, Build, Model, Node
from corral.kit.humanize import format_bytes

_IN_RAM = (DEFAULT, "cpu")  # capabilities whose builds use no accelerator
_MOST_DEVICES = 64
_ALIKE_BYTES = 256 * MIB  # two cards of one kind may differ by what the driver keeps


@dataclass(frozen=True)
class Fit:
    devices: tuple[ReplicaDevice, ...]  # none: RAM
    each_bytes: int  # to reserve on each of them, or in RAM
    memory_bytes: int  # together: the order's `memory_bytes`
    host_bytes: int  # in RAM besides
    free_bytes: int  # on the tightest of them before; 0: nobody knows
    certain: bool  # False: need or room is not known
    text: str


@dataclass(frozen=True)
class TooLittle:
    text: str
    ever: bool  # with nothing else on the node it would fit


def find_fit(model: Model, node: Node, build: Build, room: Room) -> Fit | TooLittle:
    found = _try(model, node, build, room)
    if found is not None:
        return found
    empty = emptied(room)
    return TooLittle(_why_not(model, node, build, room, empty), _try(model, node, build, empty) is not None)


def lives_in_ram(model: Model, node: Node, build: Build, room: Room) -> bool:
    """Whether the process would use no accelerator there."""
    if model.in_ram or build.devices == "none":
        return True
    if build.devices:  # one, many: without a device it cannot run, and `_try` says so
        return False
    return not room.devices or node.capability in _IN_RAM


def _try(model: Model, node: Node, build: Build, room: Room) -> Fit | None:
    if lives_in_ram(model, node, build, room):
        return _in_ram(model, room.ram)
    if build.devices == "one" and model.tensor_parallel > 1:
        return None
    for count in _counts(model, build, len(room.devices)):
        group = _group(model, room, count)
        if group:
            return _on_devices(model, group)
    return None


def _why_not(model: Model, node: Node, build: Build, room: Room, empty: Room) -> str:
    if lives_in_ram(model, node, build, room):
        return f"needs {format_bytes(model.memory.all_in_ram)} of RAM; {room.ram}"
    if not room.devices:
        return "its backend needs an accelerator, and there is none"
    if build.devices == "one" and model.tensor_parallel > 1:
        return f"tensor_parallel is {model.tensor_parallel}, and its backend uses one device only"
    count = _counts(model, build, len(room.devices))[-1]
    return _why_no_devices(model, room, count) + _hint(model, empty, count)


def _in_ram(model: Model, ram: Space) -> Fit | None:
    memory = model.memory
    if memory.known and not ram.holds(memory.all_in_ram):
        return None
    host = 0 if memory.ram_bytes else memory.host_bytes
    need = memory.all_in_ram - host if memory.known else 0
    text = f"{_amount(memory.all_in_ram if memory.known else 0)} of RAM; {ram}"
    return Fit((), need, need, host, ram.free_bytes or 0, model.memory.known and ram.known, text)


def _counts(model: Model, build: Build, devices: int) -> Sequence[int]:
    """How many devices to try, in this order. Engines split attention heads, whose number is mostly a power of two."""
    if model.tensor_parallel > 0:
        return (model.tensor_parallel,)
    if build.devices != "many":
        return (1,)
    return [count for count in (1, 2, 4, 8, 16, 32, _MOST_DEVICES) if count <= max(1, devices)]


def _group(model: Model, room: Room, count: int) -> Sequence[Space]:
    """The best so many equal devices that hold it; empty: there are none."""
    each = model.memory.on_each(count)
    holding = [space for space in room.devices if _holds(model, space, each)]
    best: Sequence[Space] = ()
    for alike in _alike(holding) if count > 1 else [holding]:
        if len(alike) >= count:
            chosen = sorted(alike, key=_preference)[:count]
            if not best or list(map(_preference, chosen)) < list(map(_preference, best)):
                best = chosen
    return best if _within_budget(model, room, best) and _ram_holds(model, room, best) else ()


def _preference(space: Space) -> tuple[int, int, str, int]:
    device = space.device
    return (space.replicas, -(space.free_bytes or 0), device.key if device else "", device.index if device else 0)


def _holds(model: Model, space: Space, each: int) -> bool:
    if not space.known:
        return True
    if model.device_share and space.device is not None:
        # The engine asks for its share of the device and lives in that: both have to be enough.
        return each <= _share(model, space) <= (space.free_bytes or 0)
    return space.holds(each)


def _share(model: Model, space: Space) -> int:
    total = space.device.total_bytes if space.device is not None else 0
    return int(total * model.device_share)


def _reserve(model: Model, space: Space, each: int) -> int:
    return max(each, _share(model, space)) if model.device_share else each


def _taken(model: Model, chosen: Sequence[Space]) -> int:
    """Of each of them: they are alike, and the largest share counts for all."""
    each = model.memory.on_each(max(1, len(chosen)))
    return max((_reserve(model, space, each) for space in chosen), default=0)


def _within_budget(model: Model, room: Room, chosen: Sequence[Space]) -> bool:
    return room.left_of_budget is None or _taken(model, chosen) * len(chosen) <= room.left_of_budget


def _ram_holds(model: Model, room: Room, chosen: Sequence[Space]) -> bool:
    unified = sum(space.device is not None and space.device.unified for space in chosen)
    return not model.memory.known or room.ram.holds(model.memory.host_bytes + unified * _taken(model, chosen))


def _alike(spaces: Iterable[Space]) -> list[list[Space]]:
    """Devices of one kind. Instances of one card cannot be spread over."""
    kinds: dict[tuple[str, str, int], list[Space]] = {}
    for space in spaces:
        device = space.device
        if device is not None and device.mig is None:
            kind = (device.vendor, device.name, round(device.total_bytes / _ALIKE_BYTES))
            kinds.setdefault(kind, []).append(space)
    return list(kinds.values())


def _on_devices(model: Model, chosen: Sequence[Space]) -> Fit:
    each = _taken(model, chosen)
    names = ", ".join(map(str, chosen))
    spread = f"{_amount(each)} on each of {len(chosen)}" if len(chosen) > 1 else _amount(each)
    return Fit(
        devices=tuple(as_replica_device(space.device) for space in chosen if space.device is not None),
        each_bytes=each,
        memory_bytes=each * len(chosen),
        host_bytes=model.memory.host_bytes,
        free_bytes=min(space.free_bytes or 0 for space in chosen),
        certain=model.memory.known and all(space.known for space in chosen),
        text=f"{spread}; {names}",
    )


def _why_no_devices(model: Model, room: Room, count: int) -> str:
    each = model.memory.on_each(count)
    spaces = ", ".join(map(str, room.devices))
    if count > 1:
        need = f"needs {count} equal GPUs with {format_bytes(each)} free on each ({format_bytes(each * count)} in all)"
    else:
        need = f"needs {format_bytes(each)} on one GPU"
    if model.device_share:
        need += f", and its engine takes {model.device_share:.0%} of each it uses"
    if room.left_of_budget is not None:
        left, of = format_bytes(room.left_of_budget), format_bytes(room.budget_bytes or 0)
        spaces += f"; the budget leaves {left} of {of}"
    host = model.memory.host_bytes
    if host and not room.ram.holds(host):
        spaces += f"; {format_bytes(host)} of RAM besides, {room.ram}"
    return f"{need}; {spaces}"


def _hint(model: Model, empty: Room, tried: int) -> str:
    """What the person who wrote the definition could say to make it fit."""
    if model.tensor_parallel > 1 or not model.memory.known or _group(model, empty, tried):
        return ""
    for count in range(max(2, tried + 1), min(len(empty.devices), _MOST_DEVICES) + 1):
        if _group(model, empty, count):
            each = format_bytes(model.memory.on_each(count))
            return f"; with `tensor_parallel: {count}` in its definition it would take {each} on each of {count}"
    return ""


def _amount(size: int) -> str:
    return f"needs {format_bytes(size)}" if size else "needs an unknown amount"
