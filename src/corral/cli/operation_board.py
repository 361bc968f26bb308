"""Operations while they run: a bar per node for a terminal, lines for a file. Pure; `watching.py` shows it.

A thousand nodes are one bar and the nodes that fail or move; nobody reads a thousand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from corral.cli import operation_text
from corral.cli.output import plain
from corral.contract.admin import OperationNodeView, OperationView

if TYPE_CHECKING:
    from rich.console import RenderableType

MANY = 20  # nodes; with more there is one bar for all
_BAR_WIDTH = 24
_QUARTER = 25  # percent between two lines about a node that moves
_TENTH = 10  # and about all, when they are many
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
    way = "to" if view.kind == "fetch" else "on"
    return plain(f"{view.kind} {view.backend} {way} {operation_text.where(view)}")


def is_many(views: Sequence[OperationView], most: int) -> bool:
    return sum(len(view.nodes) for view in views) > most


def bars(views: Sequence[OperationView], *, most: int = MANY, now: datetime | None = None) -> list[Bar]:
    """A bar per node; for more than `most` a bar per operation, and under it as many nodes as there is room for."""
    several = len(views) > 1
    if not is_many(views, most):
        return [node_bar(each, _label(view, each, several), now) for view in views for each in view.nodes]
    room = max(1, (most - len(views)) // len(views))
    found = []
    for view in views:
        found.append(Bar(title(view), float(view.progress), "", note=operation_text.tally(view.nodes)))
        shown, left = choose_rows(view.nodes, room)
        found += [node_bar(each, f"  {plain(each.node_name)}", now) for each in shown]
        if left:
            found.append(Bar(f"  and {left} more that move or fail", None, ""))
    return found


def choose_rows(rows: Sequence[OperationNodeView], most: int) -> tuple[list[OperationNodeView], int]:
    """Those that fail, then those that move, in the order of their names; and how many of these had no room."""
    telling = sorted((each for each in rows if each.status in _RANKS), key=lambda each: _RANKS[each.status])
    return telling[:most], max(0, len(telling) - most)


def node_bar(each: OperationNodeView, name: str, now: datetime | None = None) -> Bar:
    begun = operation_text.is_moving(each) or each.percentage > 0
    return Bar(
        name,
        each.percentage if begun else None,
        operation_text.step(each),
        operation_text.amount(each) if operation_text.is_moving(each) else "",
        operation_text.rate(each),
        plain(operation_text.note(each, now) or (each.version if each.status == "success" else "")),
        _STYLES.get(each.status, ""),
    )


def _label(view: OperationView, each: OperationNodeView, several: bool) -> str:
    return plain(f"{view.backend} {each.node_name}" if several else each.node_name)


def screen(
    views: Sequence[OperationView], *, most: int = MANY, trouble: str = "", now: datetime | None = None
) -> RenderableType:
    """`trouble`: why nothing new is known at the moment."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2, 0, 0), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(max_width=_BAR_WIDTH)  # where a terminal is narrow the bar gives way, not names and numbers
    for _ in range(4):
        grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    for bar in bars(views, most=most, now=now):
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
    if not is_many(views, most):
        parts += [Text(f"{title(view)}: {operation_text.tally(view.nodes)}", style="bold") for view in views]
    parts.append(grid)
    if trouble:
        parts.append(Text(plain(f"no news ({trouble}); going on as soon as there are"), style="yellow"))
    return Group(*parts)


class Lines:
    """What is new since the last look, for a file or a pipe."""

    def __init__(self, *, several: bool = False) -> None:
        self._several = several
        self._nodes: dict[tuple[str, str], tuple[object, ...]] = {}
        self._whole: dict[str, tuple[object, ...]] = {}
        self._failing: set[tuple[str, str]] = set()

    def new(self, view: OperationView, now: datetime | None = None) -> Iterator[str]:
        prefix = plain(f"{view.backend} ") if self._several else ""
        if view.job_id not in self._whole:
            yield f"{title(view)} ({view.job_id})"
        many = is_many([view], MANY)
        whole = (view.state, view.progress // _TENTH if many else 0)
        moved = self._whole.get(view.job_id) != whole
        self._whole[view.job_id] = whole
        if many:
            yield from self._new_of_many(view, prefix, now)
            if moved:
                yield f"{prefix}{view.progress}%: {operation_text.tally(view.nodes)}"
            return
        for each in view.nodes:
            key = (each.status, each.phase, each.error, each.failures, each.percentage // _QUARTER)
            if self._nodes.get((view.job_id, each.node_id)) != key:
                self._nodes[view.job_id, each.node_id] = key
                yield prefix + operation_text.line(each, now)

    def _new_of_many(self, view: OperationView, prefix: str, now: datetime | None) -> Iterator[str]:
        for each in view.nodes:
            key = (view.job_id, each.node_id)
            if each.status == "error" and key not in self._failing and len(self._failing) < MANY:
                self._failing.add(key)
                yield prefix + operation_text.line(each, now)
