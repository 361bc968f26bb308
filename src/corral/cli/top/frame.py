"""Draws one screen of `corral top` as lines of styled text. Pure.

Nothing is told by colour alone: the chosen row is reversed, states are words, problems begin with `!`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from rich.cells import cell_len

from corral.cli.common.output import STATUS_STYLES, printable
from corral.cli.top.overview import overview_lines
from corral.cli.top.screen_state import TEXT_KEYS, VIEWS, ScreenState, TextPanel, keys_of
from corral.cli.top.tables import TABLES, Row, cut, fit

if TYPE_CHECKING:
    from corral.cli.top.state import FleetState

MIN_WIDTH, MIN_HEIGHT = 40, 10
_AROUND = 4  # lines of the screen that are not its body: title, views, message, keys


@dataclass(frozen=True)
class Span:
    text: str
    style: str = ""  # of rich


Line = tuple[Span, ...]


def body_height(height: int) -> int:
    return max(height - _AROUND, 1)


def page_height(view: str, height: int) -> int:
    """Rows that a page of a table has: its header is not one."""
    return max(body_height(height) - (1 if view in TABLES else 0), 1)


def draw(fleet: FleetState, screen: ScreenState, width: int, height: int, now: datetime) -> list[Line]:
    """Exactly `height` lines of exactly `width` cells."""
    if width < MIN_WIDTH or height < MIN_HEIGHT:
        lines = [_plain(f"The terminal is too small: {MIN_WIDTH}×{MIN_HEIGHT} at least.", width)]
    else:
        body = list(_body(fleet, screen, width, body_height(height), now))
        lines = [
            _title(fleet, width),
            _views(fleet, screen, width),
            *_filled(body, width, body_height(height)),
            _message(fleet, screen, width),
            _keys(fleet, screen, width),
        ]
    return _filled(lines, width, height)


def _body(fleet: FleetState, screen: ScreenState, width: int, height: int, now: datetime) -> Iterator[Line]:
    if screen.text is not None:
        yield from _text(screen.text, width, height)
    elif screen.view in TABLES:
        yield from _table(fleet, screen, width, height, now)
    else:
        for line in overview_lines(fleet, now, height):
            style = "bold" if line and not line.startswith(" ") and ":" not in line and "  " not in line else ""
            yield _plain(line, width, "yellow" if line.startswith("  ! ") else style)


def _table(fleet: FleetState, screen: ScreenState, width: int, height: int, now: datetime) -> Iterator[Line]:
    table = TABLES[screen.view]
    rows = screen.rows(fleet)
    at = screen.cursor(rows)
    page = max(height - 1, 1)
    top = min(max(at - page // 2, 0), max(len(rows) - page, 0))
    shown = rows[top : top + page]
    fitted = fit(table, [table.cells(row.item, now) for row in shown], width)
    yield _plain(fitted.header, width, "bold")
    for index, (row, line) in enumerate(zip(shown, fitted.lines, strict=True), top):
        yield (Span(line, "reverse" if index == at else _style(row)),)
    if not rows:
        words = screen.words.get(screen.view)
        yield _plain(f"No row contains {words!r}." if words else table.empty, width)


def _style(row: Row) -> str:
    item = row.item
    status = getattr(item, "status", "") or getattr(item, "state", "")
    if isinstance(status, int):
        return "red" if status >= 400 else ""
    style = STATUS_STYLES.get(str(status), "")
    return "" if style == "green" else style  # what is well does not need a colour


def _text(text: TextPanel, width: int, height: int) -> Iterator[Line]:
    shown = text.page(height, width)
    yield from (_plain(line, width) for line in shown)
    if not shown:
        yield _plain(f"No line contains {text.words!r}." if text.words else "Nothing yet.", width)


def _title(fleet: FleetState, width: int) -> Line:
    where = f"{fleet.context} ({fleet.url})" if fleet.context else fleet.url
    left = printable(f"corral top  {where}")
    right = printable(f"{fleet.key_name} ({fleet.role})  {'live' if fleet.live else 'every 2 s'}")
    left_width = width - cell_len(right) - 2
    return (
        Span(
            cut(left, max(left_width, 0)) + "  " + cut(right, min(width - max(left_width, 0) - 2, cell_len(right))),
            "bold",
        ),
    )


def _views(fleet: FleetState, screen: ScreenState, width: int) -> Line:
    counts = {
        "nodes": len(fleet.nodes),
        "models": len(fleet.models),
        "operations": sum(not view.finished_at for view in fleet.operations),
    }
    spans: list[Span] = []
    for number, view in enumerate(VIEWS, 1):
        title = f"{number} {view}" + (f" {counts[view]}" if counts.get(view) else "")
        spans += [Span(f" {title} ", "reverse" if view == screen.view else ""), Span(" ")]
    return _cut_spans(spans, width)


def _message(fleet: FleetState, screen: ScreenState, width: int) -> Line:
    words = screen.text.words if screen.text is not None else screen.words.get(screen.view, "")
    if screen.unconfirmed is not None:
        return _plain(f"{screen.unconfirmed.question} [y/N]", width, "bold")
    if screen.is_editing:
        return _plain(f"filter: {words}_", width, "bold")
    if screen.message:
        return _plain(printable(screen.message), width, "bold")
    if fleet.problem:
        return _plain(f"! {printable(fleet.problem)}", width, "yellow")
    if screen.text is not None:
        more = f"   filter: {words}" if words else ""
        return _plain(f"{screen.text.title}{more}", width, "bold")
    return _plain(f"filter: {words}   (Esc removes it)" if words else "", width)


def _keys(fleet: FleetState, screen: ScreenState, width: int) -> Line:
    keys: Sequence[tuple[str, str]] = TEXT_KEYS if screen.text else keys_of(screen.view, may_act=fleet.may_act)
    spans: list[Span] = []
    for key, word in keys:
        spans += [Span(key, "bold"), Span(f" {word}   ")]
    return _cut_spans(spans, width)


def _plain(text: str, width: int, style: str = "") -> Line:
    return (Span(cut(text, width), style),)


def _cut_spans(spans: Sequence[Span], width: int) -> Line:
    kept: list[Span] = []
    left = width
    for span in spans:
        if left <= 0:
            break
        size = cell_len(span.text)
        kept.append(span if size <= left else Span(cut(span.text, left), span.style))
        left -= min(size, left)
    return (*kept, Span(" " * left)) if left else tuple(kept)


def _filled(lines: Sequence[Line], width: int, height: int) -> list[Line]:
    return [*lines[:height], *(_plain("", width) for _ in range(height - len(lines)))]
