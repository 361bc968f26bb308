"""How much memory a node has left, per device and in RAM. Pure.

Two numbers bound what may be handed out, and the smaller one counts. What the machine measured knows about programs
that are not ours, and nothing of a replica that is still starting. What we reserved knows about that one, and about
weights that are mapped and do not look used; but of nobody else. Unified memory and RAM are the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from corral.blobs.progress import human_bytes
from corral.contract.budget import Amount, Share, ceiling_bytes
from corral.contract.hardware import Device
from corral.contract.messages.replicas import ReplicaDevice
from corral.controller.scheduler.world import Node, Policy, Replica, ReplicaState

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
        return f"{self.name}: {human_bytes(self.free_bytes)} free of {human_bytes(self.limit_bytes)}{guessed}"


@dataclass(frozen=True)
class Room:
    ram: Space
    devices: tuple[Space, ...] = ()
    left_of_budget: int | None = None  # over all devices; None: no amount was set
    budget_bytes: int | None = None


def room_of(node: Node, replicas: Sequence[Replica], policy: Policy, gone: Collection[Key] = ()) -> Room:
    """With `gone`, as if these replicas had ended already."""
    devices = devices_of(node)
    staying = [replica for replica in replicas if replica.key not in gone]
    leaving = [replica for replica in replicas if replica.key in gone]
    ram = _left(_ram(node, devices, policy), staying, leaving)
    spaces = (_left(_accelerator(node, device), staying, leaving) for device in devices)
    budget, left = _amount_left(node, devices, staying)
    return Room(ram, tuple(_within(space, ram) if _is_unified(space) else space for space in spaces), left, budget)


def emptied(room: Room) -> Room:
    """As it would be with nothing in it, of ours or of others: what does not fit here never will."""

    def empty(space: Space) -> Space:
        return replace(space, free_bytes=space.limit_bytes, reserved_bytes=0, replicas=0)

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
    return (device.vendor, device.index) == (named.vendor, named.index)


@dataclass(frozen=True)
class _Kind:
    """A space before anybody has taken of it."""

    name: str
    limit_bytes: int | None
    free_bytes: int | None  # as the machine measured it; None: it did not
    taken: Callable[[Replica], int]  # what a replica takes of it
    device: Device | None = None

    def is_home_of(self, replica: Replica) -> bool:
        return _names(replica, self.device) if self.device is not None else not replica.devices


def _accelerator(node: Node, device: Device) -> _Kind:
    total = device.total_bytes
    limit = int(total * node.budget.of_total) if isinstance(node.budget, Share) else total
    name = f"GPU {device.index}" + (f" MIG {device.mig}" if device.mig is not None else "")

    def taken(replica: Replica) -> int:
        return _on_device(replica, device) + (_in_plain_ram(replica) if device.unified else 0)

    return _Kind(name, limit if total else None, device.free_bytes, taken, device)


def _ram(node: Node, devices: Sequence[Device], policy: Policy) -> _Kind:
    unified = [device for device in devices if device.unified]
    spare = min(int(node.total_ram * policy.ram_share), policy.ram_spare_bytes)

    def taken(replica: Replica) -> int:
        return _in_plain_ram(replica) + sum(_on_device(replica, device) for device in unified)

    return _Kind(
        "RAM",
        node.total_ram - spare if node.total_ram else None,
        max(0, node.available_ram - spare) if node.available_ram else None,
        taken,
    )


def _left(kind: _Kind, staying: Sequence[Replica], leaving: Sequence[Replica]) -> Space:
    reserved = sum(map(kind.taken, staying))
    at_home = sum(map(kind.is_home_of, staying))
    if kind.limit_bytes is None:
        return Space(kind.name, None, None, reserved, at_home, False, kind.device)
    left = kind.limit_bytes - reserved
    if kind.free_bytes is not None:
        not_seen_yet = sum(kind.taken(replica) for replica in staying if replica.state is ReplicaState.STARTING)
        coming_back = sum(kind.taken(replica) for replica in leaving if replica.state is not ReplicaState.STARTING)
        left = min(left, kind.free_bytes - not_seen_yet + coming_back)
    measured = kind.free_bytes is not None
    return Space(kind.name, kind.limit_bytes, max(0, left), reserved, at_home, measured, kind.device)


def _is_unified(space: Space) -> bool:
    return space.device is not None and space.device.unified


def _within(space: Space, ram: Space) -> Space:
    """A device cannot have more of the RAM than there is of it."""
    return replace(
        space,
        limit_bytes=_smaller(space.limit_bytes, ram.limit_bytes),
        free_bytes=_smaller(space.free_bytes, ram.free_bytes),
        measured=space.measured or ram.measured,
    )


def _smaller(one: int | None, other: int | None) -> int | None:
    return min((size for size in (one, other) if size is not None), default=None)


def _amount_left(node: Node, devices: Iterable[Device], staying: Sequence[Replica]) -> tuple[int | None, int | None]:
    """An amount is for all devices together: one may have more of it than another."""
    if not isinstance(node.budget, Amount):
        return None, None
    every = list(devices)
    ceiling = ceiling_bytes(node.budget, sum(device.total_bytes for device in every)) or node.budget.size_bytes
    used = sum(_on_device(replica, device) for replica in staying for device in every)
    return ceiling, max(0, ceiling - used)


def _names(replica: Replica, device: Device) -> bool:
    return any(is_same(device, named) for named in replica.devices)


def _on_device(replica: Replica, device: Device) -> int:
    """Its part, on this one."""
    return -(-replica.memory_bytes // len(replica.devices)) if _names(replica, device) else 0


def _in_plain_ram(replica: Replica) -> int:
    return replica.host_bytes + (0 if replica.devices else replica.memory_bytes)
