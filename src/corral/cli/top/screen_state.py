"""What the terminal shows of the fleet, and what each key does. Pure: keys change this state or return a command, which
`app.py` carries out."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from rich.cells import cell_len

from corral.cli.common.output import printable
from corral.cli.operations import text as operation_text
from corral.cli.top.tables import TABLES, LogSource, ModelLine, Row, matching

if TYPE_CHECKING:
    from corral.cli.top.state import FleetState

VIEWS = ("overview", "nodes", "models", "operations", "requests", "logs")
MAX_LOG_LINES = 2000
_MIN_PAGE = 1
_KEY = re.compile(r" *\S+(?: \S+){0,3}  +(?=\S)")
_ACTS_ON = {"d": ("nodes",), "a": ("nodes",), "r": ("operations",), "c": ("operations",)}


@dataclass(frozen=True)
class Act:
    """A change of the fleet. `question` is asked first; empty: it can be undone by the same key, or harms nothing."""

    kind: Literal["drain", "resume", "approve", "retry", "cancel"]
    id: str
    name: str
    question: str = ""


@dataclass(frozen=True)
class Explain:
    kind: Literal["node", "model", "operation", "request"]
    id: str
    name: str


@dataclass(frozen=True)
class FollowLog:
    name: str  # empty: the worker's own
    node: str


@dataclass(frozen=True)
class ListLogs:
    node: str


@dataclass(frozen=True)
class CloseText:
    """The text was closed: what feeds it can stop."""


@dataclass(frozen=True)
class Quit:
    pass


Command = Act | Explain | FollowLog | ListLogs | CloseText | Quit


@dataclass
class TextPanel:
    """Lines over the whole screen: a log, an explanation, the help."""

    title: str
    lines: list[str] = field(default_factory=list)
    top: int = 0
    follows: bool = False  # the last lines are shown, and new ones as they come
    words: str = ""

    def shown(self, width: int) -> list[str]:
        """The lines that contain the words of the filter, wrapped."""
        wanted = self.words.lower().split()
        return [
            part
            for line in self.lines
            if all(word in line.lower() for word in wanted)
            for part in _wrapped(line, width)
        ]

    def append(self, lines: Sequence[str]) -> None:
        self.lines += lines
        if (extra := len(self.lines) - MAX_LOG_LINES) > 0:
            del self.lines[:extra]
            self.top = max(0, self.top - extra)

    def scroll(self, by: int, page: int, width: int) -> None:
        last = max(0, len(self.shown(width)) - page)
        at = last if self.follows else min(self.top, last)
        self.top = min(max(at + by, 0), last)
        self.follows = self.is_log and self.top == last

    @property
    def is_log(self) -> bool:
        return self.title.startswith("log ")

    def page(self, height: int, width: int) -> list[str]:
        shown = self.shown(width)
        last = max(0, len(shown) - height)
        first = last if self.follows else min(self.top, last)
        return shown[first : first + height]


@dataclass
class _Cursor:
    key: str = ""  # the row that was chosen; empty: the first, whichever it is
    at: int = 0


@dataclass
class ScreenState:
    view: str = VIEWS[0]
    words: dict[str, str] = field(default_factory=dict)  # the filter of each view
    is_editing: bool = False  # the filter
    unconfirmed: Act | None = None
    text: TextPanel | None = None
    message: str = ""
    _cursors: dict[str, _Cursor] = field(default_factory=dict)

    def rows(self, fleet: FleetState) -> list[Row]:
        table = TABLES.get(self.view)
        return matching(table.rows(fleet), self.words.get(self.view, "")) if table else []

    def cursor(self, rows: Sequence[Row]) -> int:
        """The index of the chosen row; where the row is gone, of the one in its place."""
        own = self._cursors.setdefault(self.view, _Cursor())
        if own.key:
            found = next((at for at, row in enumerate(rows) if row.key == own.key), None)
            own.at = found if found is not None else min(own.at, max(len(rows) - 1, 0))
        else:
            own.at = 0
        return own.at

    def on_key(self, key: str, character: str, fleet: FleetState, *, page: int, width: int) -> Command | None:
        """`page`: lines of the body of the screen."""
        page = max(page, _MIN_PAGE)
        self.message = ""
        if self.is_editing:
            self._edit(key, character)
            return None
        if self.unconfirmed is not None:
            return self._answer(key)
        if self.text is not None:
            return self._on_text_key(self.text, key, page, width)
        if key in ("q", "ctrl+c"):
            return Quit()
        if (view := _view_of(key, self.view)) is not None:
            self.view = view
            return None
        if key == "slash" and self.view in TABLES:
            self.is_editing = True
        elif key == "escape":
            self.words.pop(self.view, None)
        elif key in ("question_mark", "h", "f1"):
            self.text = TextPanel("help", help_lines())
        else:
            rows = self.rows(fleet)
            if (by := _movement(key, page, len(rows))) is not None:
                self._move(rows, by)
            elif rows:
                return self._on_row_key(key, rows[self.cursor(rows)], fleet)
        return None

    def _edit(self, key: str, character: str) -> None:
        words = self.text.words if self.text is not None else self.words.get(self.view, "")
        if key == "enter":
            self.is_editing = False
            return
        if key == "escape":
            words, self.is_editing = "", False
        elif key in ("backspace", "ctrl+h"):
            words = words[:-1]
        elif key == "ctrl+u":
            words = ""
        elif character.isprintable():
            words += character
        if self.text is not None:
            self.text.words = words
        else:
            self.words[self.view] = words
            self._cursors.pop(self.view, None)

    def _answer(self, key: str) -> Command | None:
        unconfirmed, self.unconfirmed = self.unconfirmed, None
        if key in ("y", "Y", "upper_y"):
            return unconfirmed
        self.message = "Nothing was changed."
        return None

    def _on_text_key(self, text: TextPanel, key: str, page: int, width: int) -> Command | None:
        if key in ("escape", "q", "ctrl+c", "left"):
            self.text = None
            return CloseText()
        if key == "slash":
            self.is_editing = True
        elif (by := _movement(key, page, len(text.shown(width)))) is not None:
            text.scroll(by, page, width)
        return None

    def _move(self, rows: Sequence[Row], by: int) -> None:
        if rows:
            at = min(max(self.cursor(rows) + by, 0), len(rows) - 1)
            # At the top the cursor stays with the newest row instead of following one that moves down.
            self._cursors[self.view] = _Cursor(rows[at].key if at else "", at)

    def _on_row_key(self, key: str, row: Row, fleet: FleetState) -> Command | None:
        if self.view in _ACTS_ON.get(key, ()) and not fleet.may_act:
            self.message = (
                f"The key {fleet.key_name!r} has the role {fleet.role}: only keys of admins change the fleet."
            )
            return None
        match self.view:
            case "nodes":
                return self._on_node_key(key, row)
            case "operations":
                return self._on_operation_key(key, row)
            case "models":
                return self._on_model_key(key, row.item)
            case "requests" if key in ("enter", "w"):
                return Explain("request", row.key, row.key)
            case "logs" if key in ("enter", "l"):
                source: LogSource = row.item
                return FollowLog(source.name, source.node)
        return None

    def _on_node_key(self, key: str, row: Row) -> Command | None:
        node = row.item
        if key in ("enter", "w"):
            return Explain("node", node.id, node.name)
        if key == "l":
            self.view, self.words["logs"] = "logs", node.name
            return ListLogs(node.name)
        if key == "a":
            if node.status == "pending":
                self._ask(Act("approve", node.id, node.name, f"Approve {node.name}: it may run models?"))
            else:
                self.message = f"{node.name} is {node.status}: only pending nodes are approved."
        if key == "d":
            if node.status == "draining":
                return Act("resume", node.id, node.name)
            if node.status in ("healthy", "unhealthy"):
                effect = "no new replicas start there"
                effect += ", its own end after their requests" if node.model_count else ""
                self._ask(Act("drain", node.id, node.name, f"Drain {node.name}: {effect}?"))
            else:
                self.message = f"{node.name} is {node.status}: only healthy and unhealthy nodes are drained."
        return None

    def _on_operation_key(self, key: str, row: Row) -> Command | None:
        view = row.item
        name = f"{view.kind} {view.backend} ({operation_text.short_id(view.job_id)})"
        if key in ("enter", "w"):
            return Explain("operation", view.job_id, name)
        if key in ("r", "c") and view.kind == operation_text.STAGING:
            self.message = "The files are staged for a load of the model: see it under models with w."
        elif key in ("r", "c") and view.finished_at:
            self.message = f"{name} has ended."
        elif key == "r":
            return Act("retry", view.job_id, name)
        elif key == "c":
            self._ask(Act("cancel", view.job_id, name, f"Cancel {name}: running transfers stop?"))
        return None

    def _on_model_key(self, key: str, line: ModelLine) -> Command | None:
        if key in ("enter", "w"):
            return Explain("model", line.model, line.model)
        if key == "l":
            if line.replica is not None:
                return FollowLog(f"{line.model}#{line.replica.get('replica_index', 0)}", line.node)
            self.view, self.words["logs"] = "logs", line.model
        return None

    def _ask(self, act: Act) -> None:
        """Show the question; `_answer` returns the act."""
        self.unconfirmed = act


def log_title(source: FollowLog) -> str:
    return f"log {source.name} on {source.node}" if source.name else f"log of the worker on {source.node}"


def _wrapped(line: str, width: int) -> list[str]:
    """At words. What continues `key  value` stands below the value."""
    text = printable(line.replace("\t", "    ")).rstrip()
    if cell_len(text) <= width:
        return [text]
    key = _KEY.match(text)
    indent = " " * (key.end() if key and key.end() < width // 2 else 0)
    return textwrap.wrap(text, width, subsequent_indent=indent, break_on_hyphens=False, drop_whitespace=True) or [""]


def _view_of(key: str, now: str) -> str | None:
    if key.isdigit() and 1 <= int(key) <= len(VIEWS):
        return VIEWS[int(key) - 1]
    steps = {"tab": 1, "right": 1, "shift+tab": -1, "left": -1}
    return VIEWS[(VIEWS.index(now) + steps[key]) % len(VIEWS)] if key in steps else None


def _movement(key: str, page: int, total: int) -> int | None:
    moves = {
        "up": -1,
        "k": -1,
        "down": 1,
        "j": 1,
        "pageup": -page,
        "ctrl+b": -page,
        "pagedown": page,
        "space": page,
        "ctrl+f": page,
        "home": -total,
        "g": -total,
        "end": total,
        "G": total,
        "upper_g": total,
    }
    return moves.get(key)


KEYS = {
    "overview": (),
    "nodes": (("d", "drain, resume"), ("a", "approve"), ("l", "logs"), ("w", "why")),
    "models": (("l", "logs"), ("w", "why")),
    "operations": (("r", "retry"), ("c", "cancel"), ("w", "why")),
    "requests": (("w", "details"),),
    "logs": (("l", "follow"),),
}
TEXT_KEYS = (("↑↓", "scroll"), ("/", "filter"), ("Esc", "close"))
_ALWAYS = (("?", "help"), ("q", "quit"))


def keys_of(view: str, *, may_act: bool) -> list[tuple[str, str]]:
    """Those that do something in this view with this role."""
    own = [(key, word) for key, word in KEYS[view] if may_act or key not in _ACTS_ON]
    return [*own, *((("/", "filter"),) if view in TABLES else ()), *_ALWAYS]


def help_lines() -> list[str]:
    return """Views
  1 … 6       overview, nodes, models, operations, requests, logs
  Tab, ← →    the next or the previous view

In a table
  ↑ ↓, j k    move; Page Up, Page Down, Home, End too
  /           only rows with these words; Enter keeps the filter, Esc removes it
  Enter, w    why: of a node what fits there; of a model where its next replica
              goes; of an operation its nodes; of a request its receipt
  l           logs: of a replica, of a model, of a node and its worker

Changes (keys with the role admin)
  d           drain a node; again: take it back into service
  a           approve a node that is pending
  r           retry an operation now
  c           cancel an operation
  ?, h        this help; Esc closes it
  q           quit

For scripts: `corral top --once` prints the state once, `--json` as JSON.""".splitlines()
