"""Chooses RAM, one device or several equal devices of one node for a process. Pure.

One device with enough memory is best. A backend that can use several, or a definition with `tensor_parallel`, spreads
the model over equal devices: they work in step, and the smallest would limit all. The devices with the fewest replicas
come first, then those with the most memory left.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from corral.contract.hardware import DEFAULT
from corral.contract.messages.replicas import ReplicaDevice
from corral.controller.scheduler.free_memory import FreeMemory, MemoryPool, as_if_empty, as_replica_device
from corral.controller.scheduler.world import MIB, Build, Model, Node
from corral.kit.humanize import format_bytes

CPU_CAPABILITIES = (DEFAULT, "cpu")  # capabilities whose builds use no accelerator
MAX_DEVICES = 64
EQUAL_WITHIN_BYTES = 256 * MIB  # two cards of one type can differ by what the driver reserves


@dataclass(frozen=True)
class Fit:
    """The memory that one process gets on a node."""

    devices: tuple[ReplicaDevice, ...]  # empty: RAM
    each_bytes: int  # to reserve on each device, or in RAM
    memory_bytes: int  # in total: the order's `memory_bytes`
    host_bytes: int  # in RAM in addition
    free_bytes: int  # on the device with the least before; 0: unknown
    certain: bool  # False: the need or the free memory is not known
    text: str


@dataclass(frozen=True)
class DoesNotFit:
    text: str
    fits_when_empty: bool  # it would fit on the node without any other process


def find_fit(model: Model, node: Node, build: Build, free: FreeMemory) -> Fit | DoesNotFit:
    found = _try(model, node, build, free)
    if found is not None:
        return found
    empty = as_if_empty(free)
    return DoesNotFit(_why_not(model, node, build, free, empty), _try(model, node, build, empty) is not None)


def runs_in_ram(model: Model, node: Node, build: Build, free: FreeMemory) -> bool:
    """Whether the process would use no accelerator on this node."""
    if model.in_ram or build.devices == "none":
        return True
    if build.devices:  # one, many: it cannot run without a device, and `_why_not` says so
        return False
    return not free.devices or node.capability in CPU_CAPABILITIES


def _try(model: Model, node: Node, build: Build, free: FreeMemory) -> Fit | None:
    if runs_in_ram(model, node, build, free):
        return _in_ram(model, free.ram)
    if build.devices == "one" and model.tensor_parallel > 1:
        return None
    for count in _counts(model, build, len(free.devices)):
        group = _group(model, free, count)
        if group:
            return _on_devices(model, group)
    return None


def _why_not(model: Model, node: Node, build: Build, free: FreeMemory, empty: FreeMemory) -> str:
    if runs_in_ram(model, node, build, free):
        return f"needs {format_bytes(model.memory.all_in_ram)} of RAM; {free.ram}"
    if not free.devices:
        return "its backend needs an accelerator, and the node has none"
    if build.devices == "one" and model.tensor_parallel > 1:
        return f"tensor_parallel is {model.tensor_parallel}, but its backend uses only one device"
    count = _counts(model, build, len(free.devices))[-1]
    return _why_no_devices(model, free, count) + _hint(model, empty, count)


def _in_ram(model: Model, ram: MemoryPool) -> Fit | None:
    memory = model.memory
    if memory.known and not ram.can_hold(memory.all_in_ram):
        return None
    host = 0 if memory.ram_bytes else memory.host_bytes
    need = memory.all_in_ram - host if memory.known else 0
    text = f"{_need_text(memory.all_in_ram if memory.known else 0)} of RAM; {ram}"
    return Fit((), need, need, host, ram.free_bytes or 0, model.memory.known and ram.known, text)


def _counts(model: Model, build: Build, devices: int) -> Sequence[int]:
    """How many devices to try, in this order. Engines split attention heads, whose number is mostly a power of two."""
    if model.tensor_parallel > 0:
        return (model.tensor_parallel,)
    if build.devices != "many":
        return (1,)
    return [count for count in (1, 2, 4, 8, 16, 32, MAX_DEVICES) if count <= max(1, devices)]


def _group(model: Model, free: FreeMemory, count: int) -> Sequence[MemoryPool]:
    """The best `count` equal devices with enough memory; empty: there are none."""
    each = model.memory.on_each(count)
    candidates = [pool for pool in free.devices if _can_hold(model, pool, each)]
    best: Sequence[MemoryPool] = ()
    for alike in _equal_devices(candidates) if count > 1 else [candidates]:
        if len(alike) >= count:
            chosen = sorted(alike, key=_preference)[:count]
            if not best or list(map(_preference, chosen)) < list(map(_preference, best)):
                best = chosen
    return best if _within_budget(model, free, best) and _ram_can_hold(model, free, best) else ()


def _preference(pool: MemoryPool) -> tuple[int, int, str, int]:
    device = pool.device
    return (pool.replicas, -(pool.free_bytes or 0), device.key if device else "", device.index if device else 0)


def _can_hold(model: Model, pool: MemoryPool, each: int) -> bool:
    if not pool.known:
        return True
    if model.device_share and pool.device is not None:
        # The engine allocates its share of the device and runs within it: both have to be large enough.
        return each <= _engine_share(model, pool) <= (pool.free_bytes or 0)
    return pool.can_hold(each)


def _engine_share(model: Model, pool: MemoryPool) -> int:
    total = pool.device.total_bytes if pool.device is not None else 0
    return int(total * model.device_share)


def _reserve(model: Model, pool: MemoryPool, each: int) -> int:
    return max(each, _engine_share(model, pool)) if model.device_share else each


def _reserved_on_each(model: Model, chosen: Sequence[MemoryPool]) -> int:
    """On each device: they are equal, and the largest share counts for all."""
    each = model.memory.on_each(max(1, len(chosen)))
    return max((_reserve(model, pool, each) for pool in chosen), default=0)


def _within_budget(model: Model, free: FreeMemory, chosen: Sequence[MemoryPool]) -> bool:
    return free.left_of_budget is None or _reserved_on_each(model, chosen) * len(chosen) <= free.left_of_budget


def _ram_can_hold(model: Model, free: FreeMemory, chosen: Sequence[MemoryPool]) -> bool:
    unified = sum(pool.device is not None and pool.device.unified for pool in chosen)
    return not model.memory.known or free.ram.can_hold(
        model.memory.host_bytes + unified * _reserved_on_each(model, chosen)
    )


def _equal_devices(pools: Iterable[MemoryPool]) -> list[list[MemoryPool]]:
    """Devices by type. A process cannot be spread over MIG instances."""
    kinds: dict[tuple[str, str, int], list[MemoryPool]] = {}
    for pool in pools:
        device = pool.device
        if device is not None and device.mig is None:
            kind = (device.vendor, device.name, round(device.total_bytes / EQUAL_WITHIN_BYTES))
            kinds.setdefault(kind, []).append(pool)
    return list(kinds.values())


def _on_devices(model: Model, chosen: Sequence[MemoryPool]) -> Fit:
    each = _reserved_on_each(model, chosen)
    names = ", ".join(map(str, chosen))
    spread = f"{_need_text(each)} on each of {len(chosen)}" if len(chosen) > 1 else _need_text(each)
    return Fit(
        devices=tuple(as_replica_device(pool.device) for pool in chosen if pool.device is not None),
        each_bytes=each,
        memory_bytes=each * len(chosen),
        host_bytes=model.memory.host_bytes,
        free_bytes=min(pool.free_bytes or 0 for pool in chosen),
        certain=model.memory.known and all(pool.known for pool in chosen),
        text=f"{spread}; {names}",
    )


def _why_no_devices(model: Model, free: FreeMemory, count: int) -> str:
    each = model.memory.on_each(count)
    pools = ", ".join(map(str, free.devices))
    if count > 1:
        need = (
            f"needs {count} equal GPUs with {format_bytes(each)} free on each ({format_bytes(each * count)} in total)"
        )
    else:
        need = f"needs {format_bytes(each)} on one GPU"
    if model.device_share:
        need += f", and its engine takes {model.device_share:.0%} of each GPU it uses"
    if free.left_of_budget is not None:
        left, of = format_bytes(free.left_of_budget), format_bytes(free.budget_bytes or 0)
        pools += f"; the budget leaves {left} of {of}"
    host = model.memory.host_bytes
    if host and not free.ram.can_hold(host):
        pools += f"; also needs {format_bytes(host)} of RAM, {free.ram}"
    return f"{need}; {pools}"


def _hint(model: Model, empty: FreeMemory, tried: int) -> str:
    """The change of the definition that would make it fit."""
    if model.tensor_parallel > 1 or not model.memory.known or _group(model, empty, tried):
        return ""
    for count in range(max(2, tried + 1), min(len(empty.devices), MAX_DEVICES) + 1):
        if _group(model, empty, count):
            each = format_bytes(model.memory.on_each(count))
            return f"; with `tensor_parallel: {count}` in its definition it would need {each} on each of {count} GPUs"
    return ""


def _need_text(size: int) -> str:
    return f"needs {format_bytes(size)}" if size else "needs an unknown amount"
