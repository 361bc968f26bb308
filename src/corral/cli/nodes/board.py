"""The nodes as an event stream reports them, and their changes as text. Pure; `commands.py` prints them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from corral.cli.common.output import printable, table
from corral.cli.nodes.text import COLUMNS, note, row
from corral.contract.admin import NodeView

if TYPE_CHECKING:
    from rich.console import RenderableType

    from corral.client.events import FleetEvent


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
