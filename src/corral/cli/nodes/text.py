"""Rows and details of nodes as text. Pure; `commands.py` prints them, `board.py` has their changes."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from corral.cli.common.output import free_of_total, key_value_lines, relative_time
from corral.contract.node_problem import main_problem
from corral.kit.humanize import format_bytes

if TYPE_CHECKING:
    from corral.contract.admin import NodeView
    from corral.contract.hardware import Device

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
    from corral.cli.common.options import unknown_name

    none = "there are no nodes yet; `corral token create` prints the command with which a machine joins"
    return unknown_name("node", name, known, none=none)


def read_label_changes(changes: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Labels to set (`KEY=VALUE`) and labels to remove (`KEY-`)."""
    from corral.cli.common import declare  # here: the list of the nodes needs no click

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
