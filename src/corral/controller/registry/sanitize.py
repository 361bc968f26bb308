"""What a machine says about itself, cut to what can be stored and shown. Pure.

Drivers have odd names for their devices and a worker may be anybody's program. Refusing either would cost the fleet a
machine; storing a megabyte of it, or showing a terminal its control characters, would cost more.
"""

from __future__ import annotations

from typing import overload

import msgspec

from corral.contract.hardware import Device

MAX_DEVICES = 128  # 16 GPUs in 7 instances each, and some
LONGEST_TEXT = 128
MAX_SENTENCE = 500
_LARGEST = 2**63

_TEXTS = ("vendor", "name", "uuid", "pci", "compute_capability", "driver")
_NUMBERS = ("index", "total_bytes", "free_bytes", "mig", "temperature_c", "power_w")


@overload
def sanitize_text(text: str, longest: int = LONGEST_TEXT) -> str: ...


@overload
def sanitize_text(text: str | None, longest: int = LONGEST_TEXT) -> str | None: ...


def sanitize_text(text: str | None, longest: int = LONGEST_TEXT) -> str | None:
    if text is None or (len(text) <= longest and text.isprintable()):
        return text
    return "".join(letter if letter.isprintable() else "?" for letter in text[:longest])


def sanitize_devices(devices: tuple[Device, ...]) -> tuple[Device, ...]:
    return tuple(_tame(device) for device in devices[:MAX_DEVICES])


def _tame(device: Device) -> Device:
    texts = {name: sanitize_text(getattr(device, name)) for name in _TEXTS}
    wrong = [name for name in _NUMBERS if not -_LARGEST < (getattr(device, name) or 0) < _LARGEST]
    changed = {name: text for name, text in texts.items() if text != getattr(device, name)}
    changed |= {name: 0 if name in ("index", "total_bytes") else None for name in wrong}
    return msgspec.structs.replace(device, **changed) if changed else device
