"""What needs a person, most urgent first, and the fleet in a few words. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from corral.contract.admin import Cluster, NodeView
from corral.controller.web.rows import STATUSES, NodeRow, row_of
from corral.controller.web.words import ago, counted, listed, node_href, parse_moment

_SHOWN_OF_A_KIND = 5


@dataclass(frozen=True)
class Trouble:
    name: str
    words: str
    href: str = ""


@dataclass(frozen=True)
class Group:
    """Nodes with the same kind of trouble; beyond the first few only their number."""

    title: str
    troubles: tuple[Trouble, ...]
    more: int = 0


@dataclass(frozen=True)
class Pending:
    row: NodeRow
    address: str
    requested_at: str
    requested: str


@dataclass(frozen=True)
class Attention:
    line: str  # read aloud by screen readers when it changes
    pending: tuple[Pending, ...]
    notices: tuple[str, ...]  # about the fleet as a whole
    groups: tuple[Group, ...]

    @property
    def calm(self) -> bool:
        return not (self.pending or self.notices or self.groups)


@dataclass(frozen=True)
class Fact:
    words: str
    title: str = ""
    bad: bool = False


def attention_of(nodes: Sequence[NodeView], notices: Sequence[str], now: datetime) -> Attention:
    pending = tuple(_pending(node, now) for node in nodes if node.status == "pending")
    groups, lines = [], [counted(len(pending), "node waits", "nodes wait") + " for approval"] if pending else []
    for title, one, many, is_it, words in _KINDS:
        found = [node for node in nodes if is_it(node)]
        if found:
            shown = tuple(
                Trouble(node.name, words(node, now), node_href(node.name)) for node in found[:_SHOWN_OF_A_KIND]
            )
            groups.append(Group(title, shown, len(found) - len(shown)))
            lines.append(counted(len(found), one, many))
    if notices:
        lines.append(counted(len(notices), "notice about the fleet", "notices about the fleet"))
    line = listed(lines) + "." if lines else _calm(nodes)
    return Attention(line[0].upper() + line[1:], pending, tuple(notices), tuple(groups))


def facts_of(cluster: Cluster) -> tuple[Fact, ...]:
    """The header's line: version, controllers, bus, store."""
    live = sum(controller.live for controller in cluster.controllers)
    silent = len(cluster.controllers) - live
    hosts = ", ".join(f"{c.host} {c.version}{'' if c.live else ' (silent)'}" for c in cluster.controllers)
    words = counted(live, "controller", "controllers")
    connected = bool(cluster.bus.get("connected"))
    facts = [
        Fact(cluster.version, f"protocol {cluster.protocol}"),
        Fact(f"{words}, {silent} silent" if silent else words, hosts, bad=silent > 0),
        Fact("bus connected" if connected else "bus not reachable", bad=not connected),
        Fact({"sqlite": "SQLite", "postgresql": "PostgreSQL"}.get(cluster.store, cluster.store), "the database"),
    ]
    if cluster.compat_localai:
        facts.append(Fact("LocalAI workers may join", "--compat-localai is on"))
    return tuple(facts)


def _calm(nodes: Sequence[NodeView]) -> str:
    if not nodes:
        return "no machines yet."
    by_status = Counter(node.status for node in nodes)
    if by_status["healthy"] == len(nodes):
        return "the node is healthy." if len(nodes) == 1 else f"all {len(nodes)} nodes are healthy."
    return f"no problems: {listed([f'{by_status[s]} {s}' for s in STATUSES if by_status[s]])}."


def _pending(node: NodeView, now: datetime) -> Pending:
    address = node.ingress_url or node.address
    return Pending(row_of(node, now), address, node.created_at, ago(parse_moment(node.created_at), now))


def _is_cut_off(node: NodeView) -> bool:
    return bool(node.ingress_error) and node.status not in ("pending", "offline")


def _is_off_the_bus(node: NodeView) -> bool:
    return node.bus_down and node.status not in ("pending", "offline")


def _is_silent(node: NodeView) -> bool:
    """Not one that said goodbye, nor one that a person put aside for its successor."""
    return node.status == "offline" and not node.status_reason.startswith(("left", "waits"))


def _reason(node: NodeView, _: datetime) -> str:
    return node.status_reason or node.status


def _last_seen(node: NodeView, now: datetime) -> str:
    return f"{node.status_reason or 'no heartbeat'}, last seen {ago(parse_moment(node.last_heartbeat), now)}"


_Kind = tuple[str, str, str, Callable[[NodeView], bool], Callable[[NodeView, datetime], str]]
_KINDS: tuple[_Kind, ...] = (
    (
        "Cannot be reached",
        "node cannot be reached",
        "nodes cannot be reached",
        _is_cut_off,
        lambda node, _: node.ingress_error,
    ),
    (
        "Cannot reach the bus",
        "node is cut off from the bus",
        "nodes are cut off from the bus",
        _is_off_the_bus,
        lambda node, _: "serves what it has, but gets no new work",
    ),
    ("Unhealthy", "node is unhealthy", "nodes are unhealthy", lambda node: node.status == "unhealthy", _reason),
    ("Silent", "node is silent", "nodes are silent", _is_silent, _last_seen),
)
