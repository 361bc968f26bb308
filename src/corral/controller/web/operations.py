"""Operations as the page shows them: a line each, and under it one per node. Pure; `_operation.html` writes what is
decided here, `static/operations.js` draws the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from corral.contract.admin import OperationHistory, OperationNodeView, OperationRecord, OperationView
from corral.controller.web.words import ago, counted, parse_moment, size, took, until, used_of

NODES_SHOWN = 200  # drawn by the server; the script draws all
_WORK_SHOWN = 3
_SOURCES_SHOWN = 3
_WRONG_DATA = "wrong data from "
_BUSY = "The node did not answer in time and most likely still works on it. Its next report decides."
_STATES = {"under_way": "under way", "waiting": "waiting", "failing": "failing"}
_OUTCOMES = {"completed": "done", "cancelled": "cancelled", "failed": "failed"}
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
class NodeLine:
    """One node in an operation. `at` is what it is doing: phase and file."""

    id: str
    name: str
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
class OperationLine:
    id: str
    what: str
    where: str
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
    single: bool
    nodes: tuple[NodeLine, ...]
    more: int
    may_retry: bool
    may_cancel: bool
    may_dismiss: bool


@dataclass(frozen=True)
class Past:
    id: str
    what: str
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


def line_of(view: OperationView, now: datetime) -> OperationLine:
    state = _state(view)
    moving = not view.finished_at
    total = sum(view.counts.values()) or len(view.nodes)
    return OperationLine(
        id=view.job_id,
        what=_what(view.kind, view.backend),
        where=_where(view),
        state=state,
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
        single=total == 1,
        nodes=tuple(node_line(node, view.kind, now) for node in view.nodes[:NODES_SHOWN]),
        more=max(0, len(view.nodes) - NODES_SHOWN),
        may_retry=view.counts.get("error", 0) > 0 or view.outcome == "cancelled",
        may_cancel=moving,
        may_dismiss=view.settled or not moving,
    )


def lines_of(views: Sequence[OperationView], now: datetime) -> list[OperationLine]:
    """The newest first."""
    newest = sorted(views, key=lambda view: (view.created_at, view.job_id), reverse=True)
    return [line_of(view, now) for view in newest]


def blank_line() -> OperationLine:
    """What the script copies for an operation that was not there when the page was made."""
    return OperationLine(
        "", "", "", "", "", 0, True, "", "", "", "never", "", "", "", False, (), 0, False, False, False
    )


def blank_node_line() -> NodeLine:
    return NodeLine("", "", "", "", "", "", 0, True, "", "", "", "now", False, False)


def node_line(node: OperationNodeView, kind: str, now: datetime) -> NodeLine:
    ended = node.status in _ENDED
    phase = node.phase if node.status in ("downloading", "running_on_worker") else ""
    doing = [phase, node.file_name, sources_of(node)] if phase else []
    return NodeLine(
        id=node.node_id,
        name=node.node_name,
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
        may_retry=node.status == "error",
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


def work_of(views: Sequence[OperationView]) -> tuple[tuple[Work, ...], int]:
    """The newest few that have not ended, and how many more there are."""
    newest = sorted(views, key=lambda view: (view.created_at, view.job_id), reverse=True)
    running = [view for view in newest if not view.finished_at]
    shown = running[:_WORK_SHOWN]
    return tuple(_work(view) for view in shown), len(running) - len(shown)


def running_of(views: Sequence[OperationView], now: datetime, most: int) -> tuple[list[OperationLine], int]:
    """The newest that have not ended, and how many more there are."""
    running = [view for view in views if not view.finished_at]
    return lines_of(running, now)[:most], max(0, len(running) - most)


def past_of(history: OperationHistory, now: datetime) -> list[Past]:
    return [_past(record, now) for record in history.operations]


def _past(record: OperationRecord, now: datetime) -> Past:
    ended = parse_moment(record.finished_at)
    return Past(
        id=record.job_id,
        what=_what(record.kind, record.id),
        state=record.outcome,
        words=_OUTCOMES.get(record.outcome, record.outcome),
        ended_at=record.finished_at,
        ended=ago(ended, now) if ended else "not yet",
        took=took(parse_moment(record.started_at), ended),
        by=record.created_by,
        error=record.error,
        may_repeat=record.outcome == "cancelled",
    )


def _work(view: OperationView) -> Work:
    words = f"{view.progress} %" if view.state == "under_way" else _words(view)
    return Work(view.job_id, _what(view.kind, view.backend), _state(view), words)


def _state(view: OperationView) -> str:
    return view.outcome if view.finished_at and view.outcome else view.state


def _words(view: OperationView) -> str:
    state = _state(view)
    return _OUTCOMES.get(state) or _STATES.get(state, state)


def _what(kind: str, backend: str) -> str:
    return f"{'roll back' if kind == 'rollback' else kind} {backend}"


def _where(view: OperationView) -> str:
    match view.scope:
        case "node":
            return f"on {view.scope_value}"
        case "selector":
            return f"on nodes with {view.scope_value}"
        case "controller":
            return "to the controller"
        case _:
            return "on every node"


def _version(node: OperationNodeView, kind: str) -> str:
    return node.version if node.status == "success" and kind != "delete" else ""


def amount_of(node: OperationNodeView) -> str:
    if not node.current_bytes and not node.total_bytes:
        return ""
    words = used_of(node.current_bytes, node.total_bytes) if node.total_bytes else size(node.current_bytes)
    return f"{words}, {size(int(node.rate))}/s" if node.rate >= 1 else words
