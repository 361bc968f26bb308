"""Operations as the page shows them: a line each, and under it one per node where a person opened it. Pure;
`_operation.html` writes what is decided here, and the script fetches the page's part again when something changed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from corral.contract.admin import OperationHistory, OperationNodeView, OperationRecord, OperationView
from corral.controller.operations.views import CORRAL_UPGRADE, UPLOAD
from corral.controller.web.list_filter import Chip, ListFilter, window
from corral.controller.web.words import (
    ago,
    backend_href,
    counted,
    model_href,
    node_href,
    parse_moment,
    size,
    took,
    until,
    used_of,
)

NODES_SHOWN = 100  # of one operation at a time
_FILTERED_FROM = 20  # nodes; fewer are seen at a glance
_WORK_SHOWN = 3
RUNNING_SHOWN = 6  # on the start page
_SOURCES_SHOWN = 3
_WRONG_DATA = "wrong data from "
_BUSY = "The node did not answer in time and most likely still works on it. Its next report decides."
_STATES = {"under_way": "under way", "waiting": "waiting", "failing": "failing"}
_OUTCOMES = {"completed": "done", "cancelled": "cancelled", "failed": "failed", "reverted": "reverted"}
_STATUSES = {
    "success": "done",
    "downloading": "under way",
    "running_on_worker": "worker busy",
    "error": "failing",
    "queued": "waiting",
    "skipped": "skipped",
    "superseded": "superseded",
    "withdrawn": "withdrawn",
    "cancelled": "cancelled",
}
_ENDED = ("success", "skipped", "superseded", "withdrawn", "cancelled")


@dataclass(frozen=True)
class Opened:
    """Which nodes of an operation a person looks at: those with this status, from this one on. In an address it is
    `op-12`, or `op-12~error~200`."""

    id: str
    only: str = ""
    at: int = 0

    def __str__(self) -> str:
        return f"{self.id}~{self.only}~{self.at}" if self.only or self.at else self.id


@dataclass(frozen=True)
class NodeLine:
    """One node in an operation. `at` is what it is doing: phase and file."""

    id: str
    name: str
    href: str
    status: str
    words: str
    title: str
    at: str
    percent: int
    moving: bool  # has a bar
    amount: str
    note: str
    retry_at: str
    retry: str
    may_retry: bool
    may_cancel: bool


@dataclass(frozen=True)
class ShownNodes:
    """`range`, `previous` and `next` are for many nodes: which of them are shown, and what opens the others."""

    lines: tuple[NodeLine, ...]
    chips: tuple[Chip, ...]
    range: str
    previous: Opened | None
    next: Opened | None


@dataclass(frozen=True)
class OperationLine:
    id: str
    what: str
    href: str  # of the model or the backend
    where: str
    where_href: str
    state: str
    words: str
    percent: int
    moving: bool
    message: str
    error: str
    requested_at: str
    requested: str
    by: str
    handle: str
    counts: str
    single: bool  # its only node is always shown
    opened: Opened | None
    shown: ShownNodes | None
    may_retry: bool
    may_cancel: bool
    may_dismiss: bool


@dataclass(frozen=True)
class Past:
    id: str
    what: str
    href: str  # of the model or the backend
    state: str
    words: str
    ended_at: str
    ended: str
    took: str
    by: str
    error: str
    may_repeat: bool


@dataclass(frozen=True)
class Work:
    """What goes on, for the strip that every page has."""

    id: str
    what: str
    state: str
    words: str


def parse_opened(tokens: Sequence[str]) -> dict[str, Opened]:
    """By operation. What nobody wrote as a token opens nothing that exists."""
    found = {}
    for token in tokens:
        id, only, at = (*token.split("~"), "", "")[:3]
        found[id] = Opened(id, only if only in _STATUSES else "", int(at) if at.isascii() and at.isdigit() else 0)
    return found


def line_of(view: OperationView, now: datetime, opened: Opened | None = None) -> OperationLine:
    moving = not view.finished_at
    total = sum(view.counts.values()) or len(view.nodes)
    single = total == 1
    if single:
        opened = Opened(view.job_id)
    return OperationLine(
        id=view.job_id,
        what=_what(view.kind, view.backend),
        href=_href(view),
        where=_where(view),
        where_href=node_href(view.scope_value) if view.scope == "node" else "",
        state=_state(view),
        words=_words(view),
        percent=view.progress,
        moving=moving,
        message="" if view.message == "completed" else view.message,
        error=view.error,
        requested_at=view.created_at,
        requested=ago(parse_moment(view.created_at), now),
        by=view.created_by,
        handle="the controller" if view.scope == "controller" else counted(total, "node", "nodes"),
        counts=counts_of(view.counts),
        single=single,
        opened=opened,
        shown=shown_nodes(view, opened, now) if opened else None,
        may_retry=view.kind != UPLOAD and (view.counts.get("error", 0) > 0 or view.outcome == "cancelled"),
        may_cancel=moving,
        may_dismiss=view.settled or not moving,
    )


def lines_of(views: Sequence[OperationView], now: datetime, opened: Mapping[str, Opened]) -> list[OperationLine]:
    """The newest first."""
    newest = sorted(views, key=lambda view: (view.created_at, view.job_id), reverse=True)
    return [line_of(view, now, opened.get(view.job_id)) for view in newest]


def shown_nodes(view: OperationView, opened: Opened, now: datetime) -> ShownNodes:
    fitting = [node for node in view.nodes if opened.only in ("", node.status)]
    part = window(ListFilter(opened.only, "", opened.at), len(fitting), len(view.nodes), NODES_SHOWN, ("node", "nodes"))
    at = part.filters.at
    return ShownNodes(
        lines=tuple(node_line(node, view.kind, now) for node in fitting[at : at + NODES_SHOWN]),
        chips=_chips(view, opened.only) if len(view.nodes) > _FILTERED_FROM else (),
        range=part.range,
        previous=replace(opened, at=at - NODES_SHOWN) if part.previous is not None else None,
        next=replace(opened, at=at + NODES_SHOWN) if part.next is not None else None,
    )


def _chips(view: OperationView, chosen: str) -> tuple[Chip, ...]:
    counts = {"": len(view.nodes)} | {status: view.counts.get(status, 0) for status in _STATUSES}
    return tuple(
        Chip(only, _STATUSES.get(only, "all"), count, str(Opened(view.job_id, only)), only == chosen)
        for only, count in counts.items()
        if count or only == chosen
    )


def node_line(node: OperationNodeView, kind: str, now: datetime) -> NodeLine:
    ended = node.status in _ENDED
    phase = node.phase if node.status in ("downloading", "running_on_worker") else ""
    doing = [phase, node.file_name, sources_of(node)] if phase else []
    return NodeLine(
        id=node.node_id,
        name=node.node_name,
        href=node_href(node.node_name),
        status=node.status,
        words=_STATUSES.get(node.status, node.status),
        title=_BUSY if node.status == "running_on_worker" else "",
        at=" · ".join(part for part in doing if part) or _version(node, kind),
        percent=int(node.percentage),
        moving=not ended,
        amount="" if ended else amount_of(node),
        note=_note(node),
        retry_at=node.next_retry_at,
        retry=until(parse_moment(node.next_retry_at), now),
        may_retry=node.status == "error" and kind != UPLOAD,  # only the sender can
        may_cancel=not ended,
    )


def sources_of(node: OperationNodeView) -> str:
    """`from barn 75 %, controller 25 %`, the largest first."""
    total = sum(node.sources.values())
    ranked = sorted(node.sources.items(), key=lambda item: (-item[1], item[0]))[:_SOURCES_SHOWN]
    shares = ", ".join(f"{name} {100 * received // total} %" for name, received in ranked if total)
    return f"from {shares}" if shares else ""


def _note(node: OperationNodeView) -> str:
    note = node.error or node.note
    if not node.bad_sources or _WRONG_DATA in note:
        return note
    return "; ".join(part for part in (note, _WRONG_DATA + ", ".join(node.bad_sources)) if part)


def counts_of(counts: Mapping[str, int]) -> str:
    """`2 done · 1 failing`, in one order."""
    return " · ".join(f"{counts[status]} {words}" for status, words in _STATUSES.items() if counts.get(status))


def work_of(running: Sequence[OperationView], total: int) -> tuple[tuple[Work, ...], int]:
    """The first few, and how many more there are. `running`: the newest of `total` operations that have not ended."""
    shown = running[:_WORK_SHOWN]
    return tuple(_work(view) for view in shown), total - len(shown)


def past_of(history: OperationHistory, now: datetime, shown: Collection[str] = ()) -> list[Past]:
    """Without those that still have a line of their own."""
    return [_past(record, now) for record in history.operations if record.job_id not in shown]


def _past(record: OperationRecord, now: datetime) -> Past:
    ended = parse_moment(record.finished_at)
    return Past(
        id=record.job_id,
        what=_what(record.kind, record.id),
        href=backend_href(record.id) if record.is_backend else model_href(record.id),
        state=record.outcome,
        words=_OUTCOMES.get(record.outcome, record.outcome),
        ended_at=record.finished_at,
        ended=ago(ended, now) if ended else "not yet",
        took=took(parse_moment(record.started_at), ended),
        by=record.created_by,
        error=record.error,
        may_repeat=record.outcome == "cancelled" and record.kind != UPLOAD,
    )


def _work(view: OperationView) -> Work:
    words = f"{view.progress} %" if view.state == "under_way" else _words(view)
    return Work(view.job_id, _what(view.kind, view.backend), _state(view), words)


def _state(view: OperationView) -> str:
    return view.outcome if view.finished_at and view.outcome else view.state


def _words(view: OperationView) -> str:
    state = _state(view)
    return _OUTCOMES.get(state) or _STATES.get(state, state)


_VERBS = {"rollback": "roll back", CORRAL_UPGRADE: "upgrade"}


def _what(kind: str, backend: str) -> str:
    return f"{_VERBS.get(kind, kind)} {backend}"


def _href(view: OperationView) -> str:
    """Empty for an upload: what it sends has no page yet."""
    if view.kind == UPLOAD:
        return ""
    if view.kind == CORRAL_UPGRADE:
        return "/nodes"
    return backend_href(view.backend) if view.is_backend else model_href(view.backend)


def _where(view: OperationView) -> str:
    match view.scope:
        case "node":
            return f"on {view.scope_value}"
        case "selector":
            return f"on nodes with {view.scope_value}"
        case "controller":
            return "by share of requests" if view.kind == "rollout" else "to the controller"
        case _:
            return "on every node"


def _version(node: OperationNodeView, kind: str) -> str:
    return node.version if node.status == "success" and kind != "delete" else ""


def amount_of(node: OperationNodeView) -> str:
    if not node.current_bytes and not node.total_bytes:
        return ""
    words = used_of(node.current_bytes, node.total_bytes) if node.total_bytes else size(node.current_bytes)
    return f"{words}, {size(int(node.rate))}/s" if node.rate >= 1 else words
