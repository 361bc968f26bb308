"""Backends as text: gallery entries, installed versions, plans. Pure; `commands.py` prints it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from corral.cli.common.output import abbreviate, relative_time
from corral.cli.operations.text import short_digest
from corral.contract.admin import BackendMatrix, BackendVerified, MatrixCell, MatrixNode, MatrixRow
from corral.contract.messages.backends import UpgradeInfo

if TYPE_CHECKING:
    from corral.client.resources.backends import AvailableBackend

AVAILABLE_COLUMNS = ("NAME", "VERSION", "GALLERY", "INSTALLED", "DESCRIPTION")
COLUMNS = ("BACKEND", "VERSION", "NODES", "NEWER", "NOTE")
NODE_COLUMNS = ("BACKEND", "VERSION", "VARIANT", "DIGEST", "INSTALLED", "NEWER", "NOTE")
SHOW_COLUMNS = ("NODE", "STATUS", "VERSION", "VARIANT", "DIGEST", "INSTALLED", "NOTE")
UPGRADE_COLUMNS = ("BACKEND", "INSTALLED", "AVAILABLE", "DIFFERS ON")
VERIFY_COLUMNS = ("NODE", "BACKEND", "STATE", "DAMAGED", "FILES")
MAX_FILES = 3  # damaged files named in a table
MAX_DESCRIPTION = 70  # characters in a table
_IN_PROGRESS = {"install": "installing", "upgrade": "upgrading", "delete": "deleting", "rollback": "rolling back"}


def matching(entries: Sequence[AvailableBackend], term: str, *, builds: bool) -> list[AvailableBackend]:
    """Entries that match. `builds`: include builds for one kind of hardware; users normally choose the common name."""
    chosen_by_others = set() if builds else {each for entry in entries if entry.is_meta for each in _builds_of(entry)}
    word = term.strip().lower()
    return [
        entry
        for entry in entries
        if (entry.name not in chosen_by_others or entry.installed)
        and (builds or not entry.name.endswith("-development"))
        and (not word or any(word in text.lower() for text in (entry.name, entry.description, *entry.tags)))
    ]


def _builds_of(entry: AvailableBackend) -> Iterator[str]:
    for build in entry.capabilities.values():
        if (name := build.rpartition("@")[2]) != entry.name:
            yield name


def available_row(entry: AvailableBackend) -> tuple[str, ...]:
    words = " ".join(entry.description.split())
    shown = words if len(words) <= MAX_DESCRIPTION else words[: MAX_DESCRIPTION - 1] + "…"
    return entry.name, entry.version, entry.gallery.name, "yes" if entry.installed else "", shown


def entry_details(entry: AvailableBackend) -> Iterator[tuple[str, str]]:
    yield "name", entry.name
    yield "gallery", entry.gallery.name
    yield "version", entry.version
    yield "description", " ".join(entry.description.split())
    yield "license", entry.license
    yield "tags", ", ".join(entry.tags)
    yield "more", ", ".join(entry.urls)
    yield "from", entry.uri
    if entry.is_meta:
        yield "builds", ", ".join(f"{kind}: {build}" for kind, build in sorted(entry.capabilities.items()))


def matrix_rows(matrix: BackendMatrix) -> list[tuple[str, ...]]:
    return [matrix_row(row, matrix.nodes) for row in matrix.backends]


def matrix_row(row: MatrixRow, nodes: Sequence[MatrixNode]) -> tuple[str, ...]:
    have = [node for node in nodes if (cell := row.nodes.get(node.id)) is not None and cell.installed]
    versions = Counter(version_of(row.nodes[node.id]) for node in have)
    return (
        row.backend,
        ", ".join(version for version, _ in versions.most_common()),
        f"{len(have)} of {len(nodes)}" + (f": {abbreviate([node.name for node in have])}" if have else ""),
        newer(row),
        "; ".join(_row_notes(row)),
    )


def _row_notes(row: MatrixRow) -> Iterator[str]:
    if row.drift:
        yield "versions differ between nodes"
    doing = Counter(
        "failing" if cell.intent.failures or cell.intent.stage == "parked" else _in_progress(cell)
        for cell in row.nodes.values()
        if cell.intent is not None
    )
    for word, count in sorted(doing.items()):
        yield f"{word} on {count}"
    if broken := sum(bool(cell.problem) for cell in row.nodes.values()):
        yield f"cannot run on {broken} (see `corral doctor`)"


def newer(row: MatrixRow) -> str:
    if not row.upgrade_available:
        return ""
    return row.available_version or short_digest(row.available_digest) or "yes"


def version_of(cell: MatrixCell) -> str:
    """The version of a build, or else the beginning of its digest."""
    return cell.version or short_digest(cell.digest) or "?"


def node_row(row: MatrixRow, cell: MatrixCell, now: datetime | None = None) -> tuple[str, ...]:
    """One backend of one node."""
    name, *_, note = cell_words(cell, now)
    return (
        row.backend,
        name,
        cell.variant,
        short_digest(cell.digest),
        relative_time(cell.installed_at, now) if cell.installed_at else "",
        newer(row) if cell.outdated else "",
        note,
    )


def verified_row(found: BackendVerified) -> tuple[str, ...]:
    """The result of one node, with its first damaged files."""
    files = [*(f"{path} (missing)" for path in found.missing), *found.changed]
    named = ", ".join(files[:MAX_FILES]) + (", …" if found.damaged > MAX_FILES else "")
    return found.node, found.backend, "intact" if found.whole else "damaged", str(found.damaged or ""), named


def show_row(node: MatrixNode, cell: MatrixCell, now: datetime | None = None) -> tuple[str, ...]:
    """One node of one backend."""
    version, installed, note = cell_words(cell, now)
    return node.name, node.status, version, cell.variant, short_digest(cell.digest), installed, note


def cell_words(cell: MatrixCell, now: datetime | None = None) -> tuple[str, str, str]:
    notes = []
    if cell.is_system:
        notes.append("installed by the system")
    if cell.outdated:
        notes.append("a newer version is available")
    if cell.drift:
        notes.append("differs from most nodes")
    if cell.can_roll_back:
        notes.append("can be rolled back")
    if cell.intent is not None:
        notes.append(f"{_in_progress(cell)}: {cell.intent.reason}" if cell.intent.reason else _in_progress(cell))
        if cell.intent.next_retry_at:
            notes.append(f"next attempt {relative_time(cell.intent.next_retry_at, now)}")
    installed = relative_time(cell.installed_at, now) if cell.installed and cell.installed_at else ""
    return cell.version if cell.installed else "", installed, "; ".join(notes)


def _in_progress(cell: MatrixCell) -> str:
    return _IN_PROGRESS.get(cell.intent.kind, cell.intent.kind) if cell.intent is not None else ""


def as_data(row: MatrixRow, nodes: Sequence[MatrixNode]) -> dict[str, object]:
    """For JSON: the nodes as a list, with their names."""
    return {
        "backend": row.backend,
        "upgrade_available": row.upgrade_available,
        "available_version": row.available_version,
        "available_digest": row.available_digest,
        "drift": row.drift,
        "nodes": [
            {"node": node.name, "node_id": node.id, "node_status": node.status} | _fields(row.nodes[node.id])
            for node in nodes
            if node.id in row.nodes
        ],
    }


def _fields(cell: MatrixCell) -> dict[str, object]:
    return {name: getattr(cell, name) for name in cell.__struct_fields__}


def upgrade_rows(upgrades: Mapping[str, UpgradeInfo]) -> list[tuple[str, ...]]:
    return [
        (
            name,
            info.installed_version or short_digest(info.installed_digest),
            info.available_version or short_digest(info.available_digest),
            abbreviate([drift.node_name for drift in info.node_drift]),
        )
        for name, info in sorted(upgrades.items())
    ]
