"""Sizes as people read them."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_bytes(count: int) -> str:
    """Binary units with one decimal: `17 B`, `412.0 MiB`. The wire contract uses this form."""
    size, unit = float(count), "B"
    for unit in _UNITS:
        # 1023.96 KiB would be shown as 1024.0 KiB: it belongs to the next unit.
        if round(size, 1) < 1024 or unit == _UNITS[-1]:
            break
        size /= 1024
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
