"""How much memory a node has left, per device and in RAM. Pure.

Two numbers limit what can be handed out, and the smaller one counts. The machine's measurement includes other programs
but not a replica that is still starting. Our reservations include that replica, and weights that are mapped and do not
look used, but no other program. Unified memory and RAM are the same bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from corral.contract.budget import Amount, Share, ceiling_bytes
from corral.contract.hardware import Device
from corral.contract.messages.replicas import ReplicaDevice
from corral.controller.scheduler.world import Node, Policy, Replica, ReplicaState
from corral.kit.humanize import format_bytes

Key = tuple[str, str, int]  # of a replica


@dataclass(frozen=True)
class MemoryPool:
    """Memory that replicas are placed in: one device's, or the node's RAM."""

    name: str  # GPU 0, RAM
    limit_bytes: int | None  # the most our replicas may use; None: the node does not report a size
    free_bytes: int | None  # now; None: as above
    reserved_bytes: int  # by our replicas
    replicas: int = 0  # of ours that run here
    measured: bool = True  # False: the node does not report what is in use, so only our reservations count
    device: Device | None = None  # None: RAM

    @property
    def known(self) -> bool:
        return self.free_bytes is not None

    def can_hold(self, need_bytes: int) -> bool:
        """True where the size is unknown: nothing is refused for that."""
        return self.free_bytes is None or self.free_bytes >= need_bytes

    def __str__(self) -> str:
        if self.free_bytes is None or self.limit_bytes is None:
            return f"{self.name}: size not reported"
        guessed = "" if self.measured else ", use not measured"
        return f"{self.name}: {format_bytes(self.free_bytes)} free of {format_bytes(self.limit_bytes)}{guessed}"


@dataclass(frozen=True)
class FreeMemory:
    ram: MemoryPool
    devices: tuple[MemoryPool, ...] = ()
    left_of_budget: int | None = None  # over all devices; None: the budget is no amount
    budget_bytes: int | None = None


def free_memory_of(
    node: Node, replicas: Sequence[Replica], policy: Policy, without: Collection[Key] = ()
) -> FreeMemory:
    """The memory left on the node, as if the replicas in `without` had ended already."""
    devices = devices_of(node)
    in_ram, on_devices = _sum_usage(devices, replicas, without)
    ram = _ram_pool(node, in_ram, policy)
    pools = tuple(_device_pool(node, device, taken, ram) for device, taken in zip(devices, on_devices, strict=True))
    if not isinstance(node.budget, Amount):
        return FreeMemory(ram, pools)
    # An amount is for all devices together: one may have more of it than another.
    total = sum(device.total_bytes for device in devices)
    ceiling = ceiling_bytes(node.budget, total) or node.budget.size_bytes
    used = sum(taken.resident for taken in on_devices)
    return FreeMemory(ram, pools, max(0, ceiling - used), ceiling)


def as_if_empty(free: FreeMemory) -> FreeMemory:
    """The same node without any process, ours or others': a model that does not fit here never will."""

    def empty(pool: MemoryPool) -> MemoryPool:
        limit = pool.limit_bytes
        return MemoryPool(pool.name, limit, limit, 0, 0, pool.measured, pool.device)

    return FreeMemory(empty(free.ram), tuple(map(empty, free.devices)), free.budget_bytes, free.budget_bytes)


def devices_of(node: Node) -> tuple[Device, ...]:
    """The accelerators a replica can use: those of the vendor the node's builds are chosen for. A worker that reports
    only sums is taken to have one device."""
    own = tuple(device for device in node.devices if device.vendor == node.gpu_vendor)
    if node.devices:
        return own or node.devices
    if node.total_vram <= 0:
        return ()
    free = node.available_vram or None
    return (Device(index=0, vendor=node.gpu_vendor, total_bytes=node.total_vram, free_bytes=free),)


def as_replica_device(device: Device) -> ReplicaDevice:
    return ReplicaDevice(vendor=device.vendor, index=device.index, uuid=device.uuid)


def is_same_device(device: Device, named: ReplicaDevice) -> bool:
    """MIG instances of one card share its index, and only the driver's id tells them apart."""
    if device.uuid and named.uuid:
        return device.uuid == named.uuid
    return device.index == named.index and device.vendor == named.vendor


@dataclass(slots=True)
class _PoolUsage:
    """What replicas take of one pool."""

    reserved: int = 0
    unmeasured: int = 0  # the part of `reserved` that the machine cannot have measured yet
    returning: int = 0  # measured as used, by replicas that are taken to have ended
    resident: int = 0  # the part of `reserved` by replicas on this device: RAM replicas take unified memory, too
    replicas: int = 0

    def add(self, size: int, *, stays: bool, starting: bool) -> None:
        if stays:
            self.reserved += size
            self.unmeasured += size if starting else 0
        elif not starting:
            self.returning += size


def _sum_usage(
    devices: Sequence[Device], replicas: Sequence[Replica], without: Collection[Key]
) -> tuple[_PoolUsage, list[_PoolUsage]]:
    """The usage of RAM and of each device. One pass: every placement calls this for every node."""
    finder, ram, on = _DeviceIndex(devices), _PoolUsage(), [_PoolUsage() for _ in devices]
    unified = [position for position, device in enumerate(devices) if device.unified]
    for replica in replicas:
        stays = replica.key not in without
        starting = replica.state is ReplicaState.STARTING
        there = finder.positions(replica) if replica.devices else ()
        part = -(-replica.memory_bytes // len(replica.devices)) if replica.devices else 0
        plain = replica.host_bytes + (0 if replica.devices else replica.memory_bytes)
        ram.add(plain + part * sum(each in unified for each in there), stays=stays, starting=starting)
        ram.replicas += stays and not replica.devices
        for position in there:
            on[position].add(part, stays=stays, starting=starting)
            on[position].replicas += stays
            on[position].resident += part if stays else 0
        for position in unified:
            on[position].add(plain, stays=stays, starting=starting)
    return ram, on


class _DeviceIndex:
    """Finds the positions of a replica's devices in the node's list of devices."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = devices
        self._by_id = {device.uuid: position for position, device in enumerate(devices) if device.uuid}

    def positions(self, replica: Replica) -> Collection[int]:
        found = [self._by_id.get(named.uuid) for named in replica.devices]
        if None not in found:
            return {position for position in found if position is not None}
        return {
            position
            for position, device in enumerate(self._devices)
            if any(is_same_device(device, named) for named in replica.devices)
        }


def _ram_pool(node: Node, taken: _PoolUsage, policy: Policy) -> MemoryPool:
    spare = min(int(node.total_ram * policy.ram_share), policy.ram_spare_bytes)
    limit = node.total_ram - spare if node.total_ram else None
    free = max(0, node.available_ram - spare) if node.available_ram else None
    return _pool("RAM", limit, free, taken)


def _device_pool(node: Node, device: Device, taken: _PoolUsage, ram: MemoryPool) -> MemoryPool:
    total = device.total_bytes
    limit = int(total * node.budget.of_total) if isinstance(node.budget, Share) else total
    name = f"GPU {device.index}" + (f" MIG {device.mig}" if device.mig is not None else "")
    pool = _pool(name, limit if total else None, device.free_bytes, taken, device)
    if not device.unified:
        return pool
    return replace(  # a device with unified memory cannot have more than the RAM
        pool,
        limit_bytes=_smaller(pool.limit_bytes, ram.limit_bytes),
        free_bytes=_smaller(pool.free_bytes, ram.free_bytes),
        measured=pool.measured or ram.measured,
    )


def _pool(
    name: str, limit: int | None, free: int | None, taken: _PoolUsage, device: Device | None = None
) -> MemoryPool:
    if limit is None:
        return MemoryPool(name, None, None, taken.reserved, taken.replicas, False, device)
    left = limit - taken.reserved
    if free is not None:
        left = min(left, free - taken.unmeasured + taken.returning)
    return MemoryPool(name, limit, max(0, left), taken.reserved, taken.replicas, free is not None, device)


def _smaller(one: int | None, other: int | None) -> int | None:
    return min((size for size in (one, other) if size is not None), default=None)
