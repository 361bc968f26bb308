"""A fleet as one file: what `corral apply` sends and is told, what `corral export` gets."""

from __future__ import annotations

from typing import Any

import msgspec

from corral.contract.codec import Message, always


class ApplyBody(Message, frozen=True):
    """`POST /api/apply`."""

    text: str = always(str)  # YAML, see `docs/how-to/fleet-file.md`
    dry_run: bool = False
    prune: bool = False  # models and schedules the file does not name are deleted


class FleetChange(Message, frozen=True):
    """One thing the file speaks of."""

    kind: str = always(str)  # label, backend, model, schedule
    name: str = always(str)
    action: str = always(str)  # create, change, delete, nothing, skip
    details: tuple[str, ...] = ()  # what differs, a line each: `context_size: 2048 → 4096`
    reason: str = ""  # why it is skipped, what went wrong, or what is missing for it to count
    failed: bool = False
    operation: str = ""  # of a backend: what to watch


class FleetDiff(Message, frozen=True):
    changes: tuple[FleetChange, ...] = always(tuple)
    dry_run: bool = False


class FleetFile(Message, frozen=True):
    """`GET /api/export`: what `corral apply` would bring about again."""

    models: tuple[dict[str, Any], ...] = ()
    backends: tuple[dict[str, Any], ...] = ()
    schedules: tuple[dict[str, Any], ...] = ()
    labels: dict[str, dict[str, str]] = msgspec.field(default_factory=lambda: dict[str, dict[str, str]]())
