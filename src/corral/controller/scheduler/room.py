"""How much memory a node has left, per device and in RAM. Pure.

Two numbers bound what may be handed out, and the smaller one counts. What the machine measured knows about programs
that are not ours, and nothing of a replica that is still starting. What we reserved knows about that one, and about
weights that are mapped and do not look used; but of nobody else. Unified memory and RAM are the same bytes.
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
class Space:
    """One place that memory is taken from: a device, or RAM."""

    name: str  # GPU 0, RAM
    limit_bytes: int | None  # of ours there may be so much; None: the machine does not say what it has
    free_bytes: int | None  # now; None: as above
    reserved_bytes: int  # by our replicas
    replicas: int = 0  # of ours that live here
    measured: bool = True  # False: the machine does not say what is in use, so only what we reserved counts
    device: Device | None = None  # None: RAM

    @property
    def known(self) -> bool:
        return self.free_bytes is not None

    def holds(self, need_bytes: int) -> bool:
        """Where nobody knows how much there is, nothing is refused for it."""
        return self.free_bytes is None or self.free_bytes >= need_bytes

    def __str__(self) -> str:
        if self.free_bytes is None or self.limit_bytes is None:
            return f"{self.name}: does not say what it has"
        guessed = "" if self.measured else ", use not measured"
        return f"{self.name}: {format_bytes(self.free_bytes)} free of {format_bytes(self.limit_bytes)}{guessed}"


@dataclass(frozen=True)
class Room:
    ram: Space
    devices: tuple[Space, ...] = ()
    left_of_budget: int | None = None  # over all devices; None: no amount was set
    budget_bytes: int | None = None


def room_of(node: Node, replicas: Sequence[Replica], policy: Policy, gone: Collection[Key] = ()) -> Room:
    """With `gone`, as if these replicas had ended already."""
    devices = devices_of(node)
    in_ram, on_devices = _tally(devices, replicas, gone)
    ram = _ram_space(node, in_ram, policy)
    spaces = tuple(_device_space(node, device, taken, ram) for device, taken in zip(devices, on_devices, strict=True))
    if not isinstance(node.budget, Amount):
        return Room(ram, spaces)
    # An amount is for all devices together: one may have more of it than another.
    total = sum(device.total_bytes for device in devices)
    ceiling = ceiling_bytes(node.budget, total) or node.budget.size_bytes
    used = sum(taken.on_it for taken in on_devices)
    return Room(ram, spaces, max(0, ceiling - used), ceiling)


def emptied(room: Room) -> Room:
    """As it would be with nothing in it, of ours or of others: what does not fit here never will."""

    def empty(space: Space) -> Space:
        limit = space.limit_bytes
        return Space(space.name, limit, limit, 0, 0, space.measured, space.device)

    return Room(empty(room.ram), tuple(map(empty, room.devices)), room.budget_bytes, room.budget_bytes)


def devices_of(node: Node) -> tuple[Device, ...]:
    """The accelerators a replica may be given: those of the vendor its builds are chosen for. A worker that only tells
    sums is taken to have one device."""
    own = tuple(device for device in node.devices if device.vendor == node.gpu_vendor)
    if node.devices:
        return own or node.devices
    if node.total_vram <= 0:
        return ()
    free = node.available_vram or None
    return (Device(index=0, vendor=node.gpu_vendor, total_bytes=node.total_vram, free_bytes=free),)


def as_replica_device(device: Device) -> ReplicaDevice:
    return ReplicaDevice(vendor=device.vendor, index=device.index, uuid=device.uuid)


def is_same(device: Device, named: ReplicaDevice) -> bool:
    """MIG instances of one card share its index, and only the driver's id tells them apart."""
    if device.uuid and named.uuid:
        return device.uuid == named.uuid
    return device.index == named.index and device.vendor == named.vendor


@dataclass(slots=True)
class _Taken:
    """What replicas take of one space."""

    reserved: int = 0
    not_seen_yet: int = 0  # of these, what the machine cannot have measured
    coming_back: int = 0  # what was measured as used, and will not be
    on_it: int = 0  # of these, by replicas that live here: on unified memory others take of it too
    replicas: int = 0

    def add(self, size: int, *, stays: bool, starting: bool) -> None:
        if stays:
            self.reserved += size
            self.not_seen_yet += size if starting else 0
        elif not starting:
            self.coming_back += size


def _tally(
    devices: Sequence[Device], replicas: Sequence[Replica], gone: Collection[Key]
) -> tuple[_Taken, list[_Taken]]:
    """In RAM, and on each device. One pass: this is asked of every node for every placement."""
    finder, ram, on = _Finder(devices), _Taken(), [_Taken() for _ in devices]
    unified = [position for position, device in enumerate(devices) if device.unified]
    for replica in replicas:
        stays = replica.key not in gone
        starting = replica.state is ReplicaState.STARTING
        there = finder.positions(replica) if replica.devices else ()
        part = -(-replica.memory_bytes // len(replica.devices)) if replica.devices else 0
        plain = replica.host_bytes + (0 if replica.devices else replica.memory_bytes)
        ram.add(plain + part * sum(each in unified for each in there), stays=stays, starting=starting)
        ram.replicas += stays and not replica.devices
        for position in there:
            on[position].add(part, stays=stays, starting=starting)
            on[position].replicas += stays
            on[position].on_it += part if stays else 0
        for position in unified:
            on[position].add(plain, stays=stays, starting=starting)
    return ram, on


class _Finder:
    """Where in the list of devices those are that a replica names."""

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
            if any(is_same(device, named) for named in replica.devices)
        }


def _ram_space(node: Node, taken: _Taken, policy: Policy) -> Space:
    spare = min(int(node.total_ram * policy.ram_share), policy.ram_spare_bytes)
    limit = node.total_ram - spare if node.total_ram else None
    free = max(0, node.available_ram - spare) if node.available_ram else None
    return _space("RAM", limit, free, taken)


def _device_space(node: Node, device: Device, taken: _Taken, ram: Space) -> Space:
    total = device.total_bytes
    limit = int(total * node.budget.of_total) if isinstance(node.budget, Share) else total
    name = f"GPU {device.index}" + (f" MIG {device.mig}" if device.mig is not None else "")
    space = _space(name, limit if total else None, device.free_bytes, taken, device)
    if not device.unified:
        return space
    return replace(  # a device cannot have more of the RAM than there is of it
        space,
        limit_bytes=_smaller(space.limit_bytes, ram.limit_bytes),
        free_bytes=_smaller(space.free_bytes, ram.free_bytes),
        measured=space.measured or ram.measured,
    )


def _space(name: str, limit: int | None, free: int | None, taken: _Taken, device: Device | None = None) -> Space:
    if limit is None:
        return Space(name, None, None, taken.reserved, taken.replicas, False, device)
    left = limit - taken.reserved
    if free is not None:
        left = min(left, free - taken.not_seen_yet + taken.coming_back)
    return Space(name, limit, max(0, left), taken.reserved, taken.replicas, free is not None, device)


def _smaller(one: int | None, other: int | None) -> int | None:
    return min((size for size in (one, other) if size is not None), default=None)
