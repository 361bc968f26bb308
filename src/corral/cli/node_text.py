"""Nodes in words: rows, details, changes. Pure; `nodes.py` prints what is made here."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

import typer

from corral.cli import asking
from corral.cli.output import ago, free_of, pairs, plain, size, table
from corral.contract.admin import NodeView
from corral.contract.hardware import Device

if TYPE_CHECKING:
    from rich.console import RenderableType

    from corral.client.events import FleetEvent

COLUMNS = (
    "NAME",
    "STATUS",
    "CAPABILITY",
    "VRAM FREE",
    "RAM FREE",
    "DISK FREE",
    "MODELS",
    "IN FLIGHT",
    "HEARTBEAT",
    "NOTE",
)


def row(node: NodeView, now: datetime | None = None) -> tuple[str, ...]:
    return (
        node.name,
        node.status,
        node.capability,
        free_of(node.available_vram, node.total_vram),
        free_of(node.available_ram, node.total_ram),
        free_of(node.available_disk, node.total_disk),
        str(node.model_count) if node.model_count else "",
        str(node.in_flight_count) if node.in_flight_count else "",
        ago(node.last_heartbeat, now),
        note(node),
    )


def note(node: NodeView) -> str:
    """The one thing a person should know about it, if there is one."""
    if node.status == "pending":
        return f"waits for approval: corral nodes approve {shlex.quote(node.name)}"
    if node.status == "offline":
        return node.status_reason
    if node.ingress_error:
        return node.ingress_error
    if node.bus_down:
        return "cannot reach the bus"
    return "" if node.status == "healthy" else node.status_reason


def _status(node: NodeView) -> str:
    """With its reason. Those that an earlier release stored begin with the status."""
    reason = node.status_reason.removeprefix(f"{node.status}: ")
    return f"{node.status}: {reason}" if reason else node.status


def details(node: NodeView, now: datetime | None = None) -> Iterator[str]:
    """Every line a person may need; what is empty is left out."""
    words = [
        ("name", node.name),
        ("id", node.id),
        ("status", _status(node)),
        ("to do", f"corral nodes approve {shlex.quote(node.name)}" if node.status == "pending" else ""),
        ("heartbeat", ago(node.last_heartbeat, now)),
        ("bus", "not reached by the worker: no new work until it is" if node.bus_down else ""),
        ("ingress", node.ingress_url),
        ("ingress trouble", node.ingress_error),
        ("kind", "LocalAI worker on the shared token" if node.compat else ""),
        ("version", node.version),
        ("platform", node.platform),
        ("backends run as", node.backend_user),
        ("backends trouble", node.backend_user_warning),
        ("backends to do", node.backend_user_fix),
        ("capability", node.capability),
        ("VRAM free", free_of(node.available_vram, node.total_vram)),
        ("VRAM budget", _budget(node)),
        ("RAM free", free_of(node.available_ram, node.total_ram)),
        ("disk free", free_of(node.available_disk, node.total_disk)),
        ("replicas", f"{node.model_count} held, at most {node.max_replicas_per_model} of one model"),
        ("in flight", _in_flight(node)),
        ("labels", ", ".join(f"{key}={node.labels[key]}" for key in sorted(node.labels))),
        ("joined", ago(node.created_at, now)),
    ]
    words += [(f"device {device.index}", _device(device)) for device in node.devices]
    yield from pairs(words)


def _device(device: Device) -> str:
    words = [device.vendor, device.name, size(device.total_bytes) if device.total_bytes else ""]
    words.append("memory shared with the machine" if device.unified else "")
    return " ".join(word for word in words if word)


def _in_flight(node: NodeView) -> str:
    return f"not known: {node.in_flight_unknown}" if node.in_flight_unknown else str(node.in_flight_count)


def under_way(node: NodeView) -> str:
    """Of a node that is not known to be idle."""
    if node.in_flight_unknown:
        return f"whether {node.name} has requests under way is not known: {node.in_flight_unknown}"
    count = node.in_flight_count
    return f"{node.name} still has {count} request{'s' if count > 1 else ''} under way"


def _budget(node: NodeView) -> str:
    if not node.vram_budget:
        return ""
    return f"{node.vram_budget} ({'set here' if node.vram_budget_manually_set else 'from the worker'})"


def unknown(name: str, known: Sequence[str]) -> str:
    none = "there are none yet; `corral token create` prints the line that adds one"
    return asking.unknown("node", name, known, none=none)


def read_label_changes(changes: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """`KEY=VALUE` sets, `KEY-` removes."""
    wanted: dict[str, str] = {}
    unwanted: list[str] = []
    for change in changes:
        key, equals, value = change.partition("=")
        if equals and key.strip():
            wanted[key.strip()] = value.strip()
        elif not equals and len(change) > 1 and change.endswith("-"):
            unwanted.append(change[:-1])
        else:
            raise typer.BadParameter(f"{change!r} is neither KEY=VALUE nor KEY-")
    if twice := wanted.keys() & set(unwanted):
        raise typer.BadParameter(f"{sorted(twice)[0]!r} is both set and removed")
    return wanted, unwanted


@dataclass(frozen=True)
class Change:
    name: str
    before: str | None  # status; None = was not there
    after: str | None  # None = is gone
    why: str
    node: NodeView | None

    def line(self) -> str:
        if self.after is None:
            return plain(f"{self.name}: deleted")
        came = self.after if self.before is None else f"{self.before} → {self.after}"
        return plain(f"{self.name}: {came}" + (f" ({self.why})" if self.why else ""))

    def as_data(self) -> dict[str, object]:
        return {"name": self.name, "before": self.before, "after": self.after, "why": self.why, "node": self.node}


class Board:
    """The nodes as the events tell them. After a broken stream everything is told anew; who is not told is gone."""

    def __init__(self) -> None:
        self._nodes: dict[str, NodeView] = {}
        self._told: set[str] | None = None

    def nodes(self) -> list[NodeView]:
        return sorted(self._nodes.values(), key=lambda node: node.name)

    def take(self, event: FleetEvent) -> bool:
        """Whether there is something to draw. Not while everything is being told: half a table would flicker by."""
        moved = list(self.changes(event)) or event.__class__.__name__ in ("NodeSeen", "Ready")
        return bool(moved) and self._told is None

    def changes(self, event: FleetEvent) -> list[Change]:
        """What a person would call a change: somebody came, went or has another status or reason."""
        from corral.client.events import NodeRemoved, NodeSeen, Ready, Restarted

        match event:
            case Restarted():
                self._told = set()
            case NodeSeen(node=node):
                if self._told is not None:
                    self._told.add(node.id)
                before = self._nodes.get(node.id)
                self._nodes[node.id] = node
                if before is None or (before.status, note(before)) != (node.status, note(node)):
                    return [Change(node.name, before.status if before else None, node.status, note(node), node)]
            case NodeRemoved(id=gone):
                return self._remove([gone])
            case Ready():
                left = set(self._nodes) - (self._told or set()) if self._told is not None else set()
                self._told = None
                return self._remove(sorted(left))
        return []

    def _remove(self, ids: Iterable[str]) -> list[Change]:
        gone = [self._nodes.pop(each) for each in ids if each in self._nodes]
        return [Change(node.name, node.status, None, "", None) for node in gone]


def screen(nodes: Sequence[NodeView], status: str | None) -> RenderableType:
    shown = [node for node in nodes if status in (None, node.status)]
    return table(COLUMNS, [row(node) for node in shown]) if shown else f"no {status + ' ' if status else ''}nodes"
