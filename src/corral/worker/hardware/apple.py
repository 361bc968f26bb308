"""Apple's GPUs, which work in the machine's RAM. `system_profiler` knows the chip's name."""

from __future__ import annotations

import json

from corral.contract.hardware import APPLE, Device
from corral.worker.hardware.host import Host
from corral.worker.hardware.machine import Space


def devices(host: Host, ram: Space) -> list[Device]:
    """On Apple silicon there is always one, even if nobody tells its name; on Intel Macs nothing we could use."""
    if host.os != "darwin" or host.arch != "arm64":
        return []
    names = gpu_names(host.run("system_profiler", "SPDisplaysDataType", "-json") or "") or ["Apple GPU"]
    return [
        Device(
            index=index,
            vendor=APPLE,
            name=name,
            total_bytes=ram.total_bytes,
            free_bytes=ram.available_bytes,
            unified=True,
        )
        for index, name in enumerate(names)
    ]


def gpu_names(profile: str) -> list[str]:
    """Names of Apple's own GPUs in the profiler's JSON; empty for text it did not write."""
    try:
        rows = json.loads(profile)["SPDisplaysDataType"]
        return [str(row.get("sppci_model") or row.get("_name")) for row in rows if _is_apple_gpu(row)]
    except (ValueError, KeyError, TypeError, AttributeError):
        return []


def _is_apple_gpu(row: dict[str, object]) -> bool:
    kind = row.get("sppci_device_type", "spdisplays_gpu")
    return kind == "spdisplays_gpu" and "apple" in str(row.get("spdisplays_vendor", "")).lower()
