"""How much of each accelerator each process holds.

NVIDIA's driver tells it of every process (`nvidia.py`); for AMD and Intel it stands in the process's own open files, as
all of the kernel's graphics drivers write it there (Documentation/gpu/drm-usage-stats). What nobody measures is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from corral.contract.hardware import AMD, INTEL, Device
from corral.contract.messages.replicas import ReplicaDevice
from corral.worker.hardware.host import Host

# A card's own memory, by the names its drivers give it; what is resident is there, the older name is of amdgpu alone.
_RESIDENT = ("drm-resident-vram", "drm-resident-local")
_OLDER = "drm-memory-vram"
_UNITS = {"": 1, "kib": 1 << 10, "mib": 1 << 20}


@dataclass(frozen=True, slots=True)
class Held:
    """By one process on one device. Inside a container the driver may count processes as its host does."""

    vendor: str
    index: int
    uuid: str
    pid: int
    size_bytes: int

    def is_on(self, device: ReplicaDevice) -> bool:
        if device.uuid and self.uuid:
            return self.uuid == device.uuid
        return (self.vendor, self.index) == (device.vendor, device.index)


class DeviceGauge:
    def __init__(
        self, host: Host, reported: Callable[[], Sequence[Held]], devices: Callable[[], Sequence[Device]]
    ) -> None:
        """`reported`: what the drivers say of all processes; `devices`: those of this machine."""
        self._host = host
        self._reported = reported
        self._devices = devices

    def held(
        self, pids: Collection[int], devices: Sequence[ReplicaDevice], alone: Collection[ReplicaDevice] = ()
    ) -> tuple[int, ...]:
        """By these processes together, on each of these devices. `alone`: those on which no other of ours is."""
        reported = [*self._reported(), *(held for pid in sorted(pids) for held in self._written_by(pid))]
        return tuple(self._on(device, reported, pids, alone=device in alone) for device in devices)

    def _on(self, device: ReplicaDevice, reported: Sequence[Held], pids: Collection[int], *, alone: bool) -> int:
        there = [held for held in reported if held.is_on(device)]
        own = sum(held.size_bytes for held in there if held.pid in pids)
        if own or not alone or len(there) != 1:
            return own
        # One of ours is on it, and one process that has no such number here: the driver counts as the host does.
        return 0 if (self._host.root / "proc" / str(there[0].pid)).exists() else there[0].size_bytes

    def _written_by(self, pid: int) -> list[Held]:
        cards = {device.pci: device for device in self._devices() if device.vendor in (AMD, INTEL) and device.pci}
        if not cards:
            return []
        # A file may be open several times: as one client it counts once.
        clients: dict[tuple[str, str], int] = {}
        for path in self._host.listing(f"proc/{pid}/fdinfo", "*"):
            fields = _fields(self._host.text(path) or "")
            card, client = fields.get("drm-pdev", ""), fields.get("drm-client-id", path.name)
            if card in cards:
                clients[(card, client)] = max(clients.get((card, client), 0), _own_memory(fields))
        return [
            Held(cards[card].vendor, cards[card].index, cards[card].uuid, pid, size)
            for (card, _), size in sorted(clients.items())
            if size
        ]


def _fields(text: str) -> dict[str, str]:
    lines = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, colon, value in lines if colon}


def _own_memory(fields: dict[str, str]) -> int:
    resident = sum(_bytes(value) for name, value in fields.items() if name.startswith(_RESIDENT))
    return resident or _bytes(fields.get(_OLDER, ""))


def _bytes(value: str) -> int:
    number, _, unit = value.partition(" ")
    return int(number) * _UNITS.get(unit.strip().lower(), 0) if number.isdigit() else 0
