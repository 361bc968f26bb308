"""Backends × nodes as the page shows them: a row per backend with its counts over the whole fleet, and of a large fleet
only as many columns as fit, chosen by what is wanted. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from corral.contract.admin import BackendMatrix, MatrixCell, MatrixIntent, MatrixNode, MatrixRow
from corral.controller.web.list_filter import Chip, ListFilter, window
from corral.controller.web.words import counted

COLUMNS = 24
_VERSIONS_SHOWN = 3
_ONLY = (  # what a chip shows; its word; in the order of the chips
    ("", "all nodes"),
    ("outdated", "update available"),
    ("drift", "differ"),
    ("moving", "under way"),
    ("waiting", "waiting"),
    ("failing", "failing"),
)


@dataclass(frozen=True)
class Cell:
    key: str
    version: str
    title: str
    marks: tuple[tuple[str, str], ...]  # kind, words
    todo: str = ""  # moving, waiting, failing
    todo_words: str = ""
    reason: str = ""
    percent: int = 0


@dataclass(frozen=True)
class BackendLine:
    backend: str
    installed: str
    versions: str
    newer: str
    marks: tuple[tuple[str, str], ...]
    cells: tuple[Cell, ...]
    may_upgrade: bool
    may_roll_back: bool
    is_there: bool


@dataclass(frozen=True)
class Matrix:
    updates: int
    updates_words: str
    chips: tuple[Chip, ...]
    columns: tuple[MatrixNode, ...]
    lines: tuple[BackendLine, ...]
    range: str
    previous: str | None  # queries
    next: str | None
    filters: ListFilter
    checked_at: str
    silent: int


def matrix_of(matrix: BackendMatrix, filters: ListFilter) -> Matrix:
    marks = {node.id: _marks_of(matrix.backends, node.id) for node in matrix.nodes}
    chosen_only = filters.only if filters.only in dict(_ONLY) else ""
    term = filters.find.strip().lower()
    fitting = [
        node
        for node in matrix.nodes
        if (not chosen_only or chosen_only in marks[node.id]) and (not term or term in node.name.lower())
    ]
    part = window(
        ListFilter(chosen_only, filters.find, filters.at), len(fitting), len(matrix.nodes), COLUMNS, ("node", "nodes")
    )
    filters = part.filters
    columns = tuple(fitting[filters.at : filters.at + COLUMNS])
    rows = [row for row in matrix.backends if not chosen_only or _has(row, chosen_only)]
    updates = sum(row.upgrade_available for row in matrix.backends)
    return Matrix(
        updates=updates,
        updates_words=counted(updates, "update available", "updates available"),
        chips=tuple(_chip(only, words, marks.values(), filters) for only, words in _ONLY),
        columns=columns,
        lines=tuple(_line(row, columns, len(matrix.nodes)) for row in rows),
        range=part.range,
        previous=part.previous,
        next=part.next,
        filters=filters,
        checked_at=matrix.checked_at,
        silent=sum(not node.told for node in matrix.nodes),
    )


def todo_of(intent: MatrixIntent | None) -> str:
    if intent is None:
        return ""
    if intent.stage == "sent":
        return "moving"
    return "failing" if intent.failures or intent.stage == "parked" else "waiting"


def _has(row: MatrixRow, mark: str) -> bool:
    return any(mark in _cell_marks(cell) for cell in row.nodes.values())


def _cell_marks(cell: MatrixCell) -> set[str]:
    found = {todo_of(cell.intent)} - {""}
    return found | ({"outdated"} if cell.outdated else set()) | ({"drift"} if cell.drift else set())


def _marks_of(rows: Sequence[MatrixRow], node_id: str) -> set[str]:
    return {mark for row in rows if (cell := row.nodes.get(node_id)) for mark in _cell_marks(cell)}


def _chip(only: str, words: str, marks: Iterable[set[str]], filters: ListFilter) -> Chip:
    count = sum(not only or only in each for each in marks)
    return Chip(only, words, count, filters.query(only=only, at=0), only == filters.only)


def _line(row: MatrixRow, columns: Sequence[MatrixNode], total: int) -> BackendLine:
    cells = list(row.nodes.values())
    installed = [cell for cell in cells if cell.installed]
    marks = Counter(mark for cell in cells for mark in _cell_marks(cell))
    versions = Counter(_version(cell) for cell in installed)
    return BackendLine(
        backend=row.backend,
        installed=f"on {len(installed)} of {counted(total, 'node', 'nodes')}",
        versions=_versions(versions),
        newer=_newer(row),
        marks=tuple((mark, f"{marks[mark]} {words}") for mark, words in _ONLY[2:] if marks[mark]),
        cells=tuple(cell_of(row, node) for node in columns),
        may_upgrade=bool(installed),
        may_roll_back=any(cell.can_roll_back for cell in installed),
        is_there=bool(cells),
    )


def _newer(row: MatrixRow) -> str:
    if not any(cell.outdated for cell in row.nodes.values()):
        return ""
    return f"update to {row.available_version}" if row.available_version else "update available"


def _versions(found: Counter[str]) -> str:
    """Which versions there are, the commonest first; one alone needs no number."""
    ranked = sorted(found.items(), key=lambda each: (-each[1], each[0]))
    if len(ranked) == 1:
        return ranked[0][0]
    shown = ", ".join(f"{version} on {count}" for version, count in ranked[:_VERSIONS_SHOWN])
    return f"{shown} …" if len(ranked) > _VERSIONS_SHOWN else shown


def _version(cell: MatrixCell) -> str:
    return cell.version or short_digest(cell.digest) or "installed"


def short_digest(digest: str) -> str:
    return digest.rpartition(":")[2][:12]


def cell_of(row: MatrixRow, node: MatrixNode) -> Cell:
    key = f"{row.backend} {node.id}"
    cell = row.nodes.get(node.id)
    if cell is None:
        return Cell(key, "–" if node.told else "?", "" if node.told else "it has not said yet what it has", ())
    marks = []
    if cell.outdated:
        marks.append(("outdated", "older"))
    if cell.drift:
        marks.append(("drift", "differs"))
    if cell.is_system:
        marks.append(("system", "system"))
    todo = todo_of(cell.intent)
    return Cell(
        key,
        _version(cell) if cell.installed else "" if todo else "–",
        " · ".join(part for part in (cell.variant, cell.digest) if part),
        tuple(marks),
        todo,
        _todo_words(cell.intent, todo),
        cell.intent.reason if cell.intent else "",
        int(cell.intent.percentage) if cell.intent else 0,
    )


def _todo_words(intent: MatrixIntent | None, todo: str) -> str:
    if intent is None:
        return ""
    kind = "roll back" if intent.kind == "rollback" else intent.kind
    if todo == "moving":
        return f"{intent.phase or kind} {int(intent.percentage)}\u00a0%"
    return f"{kind} {'fails' if todo == 'failing' else 'waits'}"
