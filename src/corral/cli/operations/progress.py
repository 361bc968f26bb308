"""The progress of operations: a bar per node for a terminal, lines for a file. Pure; `watch.py` shows it.

An operation on many nodes has one bar, and a row for each node that fails or makes progress, as far as they fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from corral.cli.common.output import printable
from corral.cli.operations import text as operation_text
from corral.contract.admin import OperationNodeView, OperationView

if TYPE_CHECKING:
    from rich.console import RenderableType

MAX_BARS = 20  # with more nodes there is one bar for the operation
_BAR_WIDTH = 24
_NODE_STEP = 25  # percent between two lines about one node
_TOTAL_STEP = 10  # percent between two lines about an operation on many nodes
_RANKS = {"error": 0, "running_on_worker": 1, "downloading": 1}
_STYLES = {"error": "red", "success": "green", "queued": "yellow"}


@dataclass(frozen=True)
class Bar:
    """One line of the screen. Without a percentage there is no bar to draw."""

    name: str
    percentage: float | None
    step: str
    amount: str = ""
    rate: str = ""
    note: str = ""
    style: str = ""


def title(view: OperationView) -> str:
    preposition = "to" if view.kind in operation_text.TRANSFERS else "on"
    what = "upgrade Corral" if view.kind == "corral-upgrade" else f"{view.kind} {view.backend}"
    return printable(f"{what} {preposition} {operation_text.where(view)}")


def is_many(views: Sequence[OperationView], max_rows: int) -> bool:
    return sum(len(view.nodes) for view in views) > max_rows


def bars(views: Sequence[OperationView], *, max_rows: int = MAX_BARS, now: datetime | None = None) -> list[Bar]:
    """A bar per node. For more than `max_rows` nodes: a bar per operation, and below it as many nodes as fit."""
    several = len(views) > 1
    if not is_many(views, max_rows):
        return [node_bar(each, _label(view, each, several), now) for view in views for each in view.nodes]
    rows_each = max(1, (max_rows - len(views)) // len(views))
    found = []
    for view in views:
        found.append(Bar(title(view), float(view.progress), "", note=operation_text.tally(view.nodes)))
        shown, left = choose_rows(view.nodes, rows_each)
        found += [node_bar(each, f"  {printable(each.node_name)}", now) for each in shown]
        if left:
            found.append(Bar(f"  and {left} more in progress or failing", None, ""))
    return found


def choose_rows(rows: Sequence[OperationNodeView], max_rows: int) -> tuple[list[OperationNodeView], int]:
    """Failing nodes, then nodes in progress, in the order of their names; and the number of those left out."""
    chosen = sorted((each for each in rows if each.status in _RANKS), key=lambda each: _RANKS[each.status])
    return chosen[:max_rows], max(0, len(chosen) - max_rows)


def node_bar(each: OperationNodeView, name: str, now: datetime | None = None) -> Bar:
    begun = operation_text.is_moving(each) or each.percentage > 0
    return Bar(
        name,
        each.percentage if begun else None,
        operation_text.step(each),
        operation_text.amount(each) if operation_text.is_moving(each) else "",
        operation_text.rate(each),
        printable(operation_text.moving_note(each, now) or (each.version if each.status == "success" else "")),
        _STYLES.get(each.status, ""),
    )


def _label(view: OperationView, each: OperationNodeView, several: bool) -> str:
    return printable(f"{view.backend} {each.node_name}" if several else each.node_name)


def screen(
    views: Sequence[OperationView], *, max_rows: int = MAX_BARS, problem: str = "", now: datetime | None = None
) -> RenderableType:
    """`problem`: why the connection to the fleet is lost at the moment."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2, 0, 0), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(max_width=_BAR_WIDTH)  # a narrow terminal shortens the bar, not names and numbers
    for _ in range(4):
        grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    for bar in bars(views, max_rows=max_rows, now=now):
        drawn: RenderableType = ""
        percent = ""
        if bar.percentage is not None:
            moving = bar.style or "cyan"
            drawn = ProgressBar(100, bar.percentage, style="dim", complete_style=moving, finished_style=moving)
            percent = f"{bar.percentage:.0f}%"
        grid.add_row(
            Text(bar.name), drawn, percent, Text(bar.step, style=bar.style), bar.amount, bar.rate, Text(bar.note)
        )
    parts: list[RenderableType] = []
    if not is_many(views, max_rows):
        parts += [Text(f"{title(view)}: {operation_text.tally(view.nodes)}", style="bold") for view in views]
    parts.append(grid)
    if problem:
        parts.append(Text(printable(f"lost the connection to the fleet ({problem}); retrying"), style="yellow"))
    return Group(*parts)


class ProgressLines:
    """The lines that are new since the last view, for a file or a pipe."""

    def __init__(self, *, several: bool = False) -> None:
        self._several = several
        self._nodes: dict[tuple[str, str], tuple[object, ...]] = {}
        self._totals: dict[str, tuple[object, ...]] = {}
        self._failing: set[tuple[str, str]] = set()

    def new(self, view: OperationView, now: datetime | None = None) -> Iterator[str]:
        prefix = printable(f"{view.backend} ") if self._several else ""
        if view.job_id not in self._totals:
            yield f"{title(view)} ({view.job_id})"
        many = is_many([view], MAX_BARS)
        total = (view.state, view.progress // _TOTAL_STEP if many else 0)
        moved = self._totals.get(view.job_id) != total
        self._totals[view.job_id] = total
        if many:
            yield from self._new_of_many(view, prefix, now)
            if moved:
                yield f"{prefix}{view.progress}%: {operation_text.tally(view.nodes)}"
            return
        for each in view.nodes:
            key = (each.status, each.phase, each.error, each.failures, each.percentage // _NODE_STEP)
            if self._nodes.get((view.job_id, each.node_id)) != key:
                self._nodes[view.job_id, each.node_id] = key
                yield prefix + operation_text.line(each, now)

    def _new_of_many(self, view: OperationView, prefix: str, now: datetime | None) -> Iterator[str]:
        for each in view.nodes:
            key = (view.job_id, each.node_id)
            if each.status == "error" and key not in self._failing and len(self._failing) < MAX_BARS:
                self._failing.add(key)
                yield prefix + operation_text.line(each, now)
