"""Rows, details and changes of nodes as text. Pure; `commands.py` prints them."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from corral.cli.common import declare
from corral.cli.common.options import unknown_name
from corral.cli.common.output import free_of_total, key_value_lines, printable, relative_time, table
from corral.contract.admin import NodeView, main_problem
from corral.contract.hardware import Device
from corral.kit.humanize import format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

    from corral.client.events import FleetEvent

NO_NODES = "No nodes yet. Print the command with which a machine joins: `corral token create`"
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
        free_of_total(node.available_vram, node.total_vram),
        free_of_total(node.available_ram, node.total_ram),
        free_of_total(node.available_disk, node.total_disk),
        str(node.model_count) if node.model_count else "",
        str(node.in_flight_count) if node.in_flight_count else "",
        relative_time(node.last_heartbeat, now),
        note(node),
    )


def note(node: NodeView) -> str:
    """The most important problem or next step of a node, or nothing."""
    pending = f"needs approval: corral nodes approve {shlex.quote(node.name)}"
    return main_problem(node, pending=pending, bus_down="the worker cannot reach the bus")


def _status(node: NodeView) -> str:
    """The status with its reason. Reasons that an earlier release stored begin with the status."""
    reason = node.status_reason.removeprefix(f"{node.status}: ")
    return f"{node.status}: {reason}" if reason else node.status


def details(node: NodeView, now: datetime | None = None) -> Iterator[str]:
    """Every detail of a node, one per line. Empty details are left out."""
    words = [
        ("name", node.name),
        ("id", node.id),
        ("status", _status(node)),
        ("next step", f"corral nodes approve {shlex.quote(node.name)}" if node.status == "pending" else ""),
        ("heartbeat", relative_time(node.last_heartbeat, now)),
        ("bus", "the worker cannot reach the bus; the node gets no new work until it can" if node.bus_down else ""),
        ("ingress", node.ingress_url),
        ("ingress problem", node.ingress_error),
        ("kind", "LocalAI worker that joined with the shared token" if node.compat else ""),
        ("version", node.version),
        ("platform", node.platform),
        ("backends run as", node.backend_user),
        ("backend problem", node.backend_user_warning),
        ("backend fix", node.backend_user_fix),
        ("capability", node.capability),
        ("VRAM free", free_of_total(node.available_vram, node.total_vram)),
        ("VRAM budget", _budget(node)),
        ("RAM free", free_of_total(node.available_ram, node.total_ram)),
        ("disk free", free_of_total(node.available_disk, node.total_disk)),
        ("replicas", f"{node.model_count}, at most {node.max_replicas_per_model} of one model"),
        ("in flight", _request_count(node)),
        ("labels", ", ".join(f"{key}={node.labels[key]}" for key in sorted(node.labels))),
        ("joined", relative_time(node.created_at, now)),
    ]
    words += [(f"device {device.index}", _device(device)) for device in node.devices]
    yield from key_value_lines(words)


def _device(device: Device) -> str:
    words = [device.vendor, device.name, format_bytes(device.total_bytes) if device.total_bytes else ""]
    words.append("memory shared with the machine" if device.unified else "")
    return " ".join(word for word in words if word)


def _request_count(node: NodeView) -> str:
    return f"unknown: {node.in_flight_unknown}" if node.in_flight_unknown else str(node.in_flight_count)


def busy_reason(node: NodeView) -> str:
    """Why a node is not known to be idle."""
    if node.in_flight_unknown:
        return f"the number of requests on {node.name} is unknown: {node.in_flight_unknown}"
    count = node.in_flight_count
    return f"{node.name} still has {count} request{'s' if count > 1 else ''} in flight"


def _budget(node: NodeView) -> str:
    if not node.vram_budget:
        return ""
    origin = "set with `corral nodes budget`" if node.vram_budget_manually_set else "set by the worker"
    return f"{node.vram_budget} ({origin})"


def unknown_node(name: str, known: Sequence[str]) -> str:
    none = "there are no nodes yet; `corral token create` prints the command with which a machine joins"
    return unknown_name("node", name, known, none=none)


def read_label_changes(changes: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Labels to set (`KEY=VALUE`) and labels to remove (`KEY-`)."""
    added: dict[str, str] = {}
    removed: list[str] = []
    for change in changes:
        key, equals, value = change.partition("=")
        if equals and key.strip():
            added[key.strip()] = value.strip()
        elif not equals and len(change) > 1 and change.endswith("-"):
            removed.append(change[:-1])
        else:
            raise declare.BadParameter(f"{change!r} is not a label change: write KEY=VALUE to set, KEY- to remove")
    if both := added.keys() & set(removed):
        raise declare.BadParameter(f"{sorted(both)[0]!r} is both set and removed")
    return added, removed


@dataclass(frozen=True)
class NodeChange:
    name: str
    before: str | None  # status; None: a new node
    after: str | None  # None: the node was deleted
    why: str
    node: NodeView | None

    def line(self) -> str:
        if self.after is None:
            return printable(f"{self.name}: deleted")
        status = self.after if self.before is None else f"{self.before} → {self.after}"
        return printable(f"{self.name}: {status}" + (f" ({self.why})" if self.why else ""))

    def as_data(self) -> dict[str, object]:
        return {"name": self.name, "before": self.before, "after": self.after, "why": self.why, "node": self.node}


class NodeBoard:
    """The nodes as the event stream reports them. After a reconnect the stream reports every node again; nodes that it
    does not report are deleted."""

    def __init__(self) -> None:
        self._nodes: dict[str, NodeView] = {}
        self._reported: set[str] | None = None

    def nodes(self) -> list[NodeView]:
        return sorted(self._nodes.values(), key=lambda node: node.name)

    def apply(self, event: FleetEvent) -> bool:
        """Apply an event. True if the table must be drawn again; never during a full report, to avoid flicker."""
        changed = list(self.changes(event)) or event.__class__.__name__ in ("NodeSeen", "StateComplete")
        return bool(changed) and self._reported is None

    def changes(self, event: FleetEvent) -> list[NodeChange]:
        """The changes worth showing: a new node, a deleted node, another status or reason."""
        from corral.client.events import NodeRemoved, NodeSeen, Restarted, StateComplete

        match event:
            case Restarted():
                self._reported = set()
            case NodeSeen(node=node):
                if self._reported is not None:
                    self._reported.add(node.id)
                before = self._nodes.get(node.id)
                self._nodes[node.id] = node
                if before is None or (before.status, note(before)) != (node.status, note(node)):
                    return [NodeChange(node.name, before.status if before else None, node.status, note(node), node)]
            case NodeRemoved(id=gone):
                return self._remove([gone])
            case StateComplete():
                left = set(self._nodes) - (self._reported or set()) if self._reported is not None else set()
                self._reported = None
                return self._remove(sorted(left))
        return []

    def _remove(self, ids: Iterable[str]) -> list[NodeChange]:
        gone = [self._nodes.pop(each) for each in ids if each in self._nodes]
        return [NodeChange(node.name, node.status, None, "", None) for node in gone]


def screen(nodes: Sequence[NodeView], status: str | None) -> RenderableType:
    shown = [node for node in nodes if status in (None, node.status)]
    return table(COLUMNS, [row(node) for node in shown]) if shown else f"No {status + ' ' if status else ''}nodes."
