"""A node as one line of the table. Pure; `_row.html` writes what is decided here, `static/nodes.js` draws the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from corral.contract.admin import NodeView
from corral.contract.node_problem import main_problem
from corral.controller.web.words import ago, node_href, parse_moment, used_of

STATUSES = ("healthy", "pending", "unhealthy", "draining", "offline")  # in the order of the filter's buttons
_LABELS_SHOWN = 3
_FULL_PERCENT = 90


@dataclass(frozen=True)
class Bar:
    """Used and whole in bytes. A full disk is trouble; full VRAM is what it was bought for."""

    used: int
    total: int
    full: bool = False

    @property
    def words(self) -> str:
        return used_of(self.used, self.total) if self.total else "–"


@dataclass(frozen=True)
class NodeRow:
    id: str
    name: str
    kind: str
    status: str
    reason: str
    note: str
    platform: str
    gpu: str
    gpu_title: str
    vram: Bar
    ram: Bar
    disk: Bar
    labels: tuple[str, ...]
    labels_more: tuple[str, ...]
    seen_at: str
    seen: str
    version: str
    href: str = ""


def row_of(node: NodeView, now: datetime) -> NodeRow:
    labels = tuple(f"{key}={value}" if value else key for key, value in sorted(node.labels.items()))
    return NodeRow(
        id=node.id,
        name=node.name,
        kind="LocalAI" if node.compat else "",
        status=node.status,
        reason=node.status_reason,
        note=main_problem(node, pending="waits for approval", bus_down="cannot reach the bus: no new work"),
        platform=node.platform or "–",
        gpu=_gpu(node),
        gpu_title=node.capability,
        vram=_vram(node),
        ram=_warned(node.total_ram, node.available_ram),
        disk=_warned(node.total_disk, node.available_disk),
        labels=labels[:_LABELS_SHOWN],
        labels_more=labels[_LABELS_SHOWN:],
        seen_at=node.last_heartbeat,
        seen=ago(parse_moment(node.last_heartbeat), now),
        version=node.version or "–",
        href=node_href(node.name),
    )


def rows_of(nodes: Sequence[NodeView], now: datetime) -> list[NodeRow]:
    return [row_of(node, now) for node in nodes]


def blank_row() -> NodeRow:
    """What the script copies for a node that was not there when the page was made."""
    none = Bar(0, 0)
    return NodeRow("", "", "", "", "", "", "–", "", "", none, none, none, (), (), "", "never", "–")


def _gpu(node: NodeView) -> str:
    names = Counter(device.name or device.vendor for device in node.devices)
    if names:
        return ", ".join(f"{count} × {name}" if count > 1 else name for name, count in names.items())
    return (node.gpu_vendor or "GPU") if node.total_vram else "CPU only"


def _vram(node: NodeView) -> Bar:
    """Of what Corral may use: free VRAM is reported no higher than the budget, so the budget is the whole."""
    whole = min(node.vram_budget_bytes or node.total_vram, node.total_vram)
    return Bar(max(0, whole - node.available_vram), whole)


def _warned(total: int, available: int) -> Bar:
    used = max(0, total - available)
    return Bar(used, total, full=total > 0 and used * 100 >= total * _FULL_PERCENT)
