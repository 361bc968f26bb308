"""The tables of `corral top`: which rows each view has, in which order, and which columns fit on the screen. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len, set_cell_size

from corral.cli.common.output import printable
from corral.cli.fleet import request_text
from corral.cli.models import text as model_text
from corral.cli.nodes import text as node_text
from corral.cli.operations import text as operation_text

if TYPE_CHECKING:
    from corral.cli.top.state import FleetState
    from corral.contract.admin import NodeView, OperationView
    from corral.contract.catalogue import ModelView
    from corral.contract.receipts import RequestView, RunningView

_GAP = 2  # blanks between columns
_MIN_LAST = 32  # of the last column, which takes what the others leave
_MAX_CELL = 32  # of every other column
_NODE_ORDER = ("pending", "unhealthy", "offline", "draining")  # those that need a person first
_STATE_ORDER = ("failing", "waiting", "under_way")


@dataclass(frozen=True)
class Row:
    """One line of a table. `key` names it across refreshes, `search` is what a filter looks at."""

    key: str
    search: str
    item: Any


@dataclass(frozen=True)
class ModelLine:
    """A model, or one of its replicas below it."""

    model: str
    title: str
    view: ModelView | None
    replica: Mapping[str, Any] | None = None

    @property
    def node(self) -> str:
        return str((self.replica or {}).get("node_name", ""))


@dataclass(frozen=True)
class LogSource:
    name: str  # a model, a replica (`name#0`) or a backend; empty: the worker's own log
    node: str
    state: str = ""


@dataclass(frozen=True)
class Table:
    """`dropped`: columns that go first on a narrow screen, in this order."""

    columns: tuple[str, ...]
    cells: Callable[[Any, datetime], tuple[str, ...]]
    rows: Callable[[FleetState], list[Row]]
    dropped: tuple[str, ...]
    empty: str


def node_rows(state: FleetState) -> list[Row]:
    def rank(node: NodeView) -> tuple[int, str]:
        order = _NODE_ORDER.index(node.status) if node.status in _NODE_ORDER else len(_NODE_ORDER)
        return order, node.name

    return [
        Row(node.id, f"{node.name} {node.status} {node.capability} {node.platform} {_labels(node)}", node)
        for node in sorted(state.nodes, key=rank)
    ]


def _labels(node: NodeView) -> str:
    return " ".join(f"{key}={value}" for key, value in node.labels.items())


def model_rows(state: FleetState) -> list[Row]:
    rows = []
    replicas: dict[str, list[Mapping[str, Any]]] = {}
    for each in state.replicas:
        replicas.setdefault(str(each.get("model_name", "")), []).append(each)
    for model in sorted(state.models, key=lambda model: (not model.ready, model.id)):
        own = sorted(replicas.pop(model.id, ()), key=_place)
        # A filter for a node keeps the model's own line above its replicas.
        search = " ".join([model.id, model.backend, *(str(each.get("node_name", "")) for each in own)])
        rows.append(Row(model.id, search, ModelLine(model.id, model.id, model)))
        rows += [_replica_line(model.id, each, is_below=True) for each in own]
    for name in sorted(replicas):  # of models that are not in the catalogue
        rows += [_replica_line(name, each, is_below=False) for each in sorted(replicas[name], key=_place)]
    return rows


def _place(replica: Mapping[str, Any]) -> tuple[str, int]:
    return str(replica.get("node_name", "")), int(replica.get("replica_index") or 0)


def _replica_line(model: str, replica: Mapping[str, Any], *, is_below: bool) -> Row:
    node, index = _place(replica)
    title = f"  #{index}" if is_below else f"{model}#{index}"
    search = f"{model} {node} {replica.get('state', '')}"
    return Row(f"{model}#{index}@{replica.get('node_id', node)}", search, ModelLine(model, title, None, replica))


def operation_rows(state: FleetState) -> list[Row]:
    def rank(view: OperationView) -> tuple[bool, int, str]:
        order = _STATE_ORDER.index(view.state) if view.state in _STATE_ORDER else len(_STATE_ORDER)
        return bool(view.finished_at), order, view.job_id

    newest_first = sorted(state.operations, key=lambda view: view.created_at, reverse=True)
    return [
        Row(view.job_id, f"{view.job_id} {view.kind} {view.backend} {view.scope_value} {view.state}", view)
        for view in sorted(newest_first, key=lambda view: rank(view)[:2])
    ]


def request_rows(state: FleetState) -> list[Row]:
    """Those under way first. Lists are read one after the other, so one that has just ended may be in both."""
    ended = {each.id for each in state.requests}
    running = [
        Row(each.id, f"{each.model} {each.served_by} {each.key} {each.node} {each.state} {each.id}", each)
        for each in state.running
        if each.id not in ended
    ]
    return running + [
        Row(each.id, f"{each.model} {each.served_by} {each.key} {each.node} {each.status} {each.id}", each)
        for each in state.requests
    ]


def _request_cells(view: RequestView | RunningView, now: datetime) -> tuple[str, ...]:
    from corral.contract.receipts import RunningView  # as late as the rest of the contract here

    return request_text.running_as_row(view, now) if isinstance(view, RunningView) else request_text.row(view, now)


def log_rows(state: FleetState) -> list[Row]:
    """Every replica has a log on its node, and every worker its own, below them. Other logs of a node are known once
    somebody asked for that node's."""
    found: dict[tuple[str, str], LogSource] = {}
    for replica in state.replicas:
        node, index = _place(replica)
        name = f"{replica.get('model_name', '')}#{index}"
        found[name, node] = LogSource(name, node, str(replica.get("state", "")))
    for node, names in state.node_logs.items():
        for name in names:
            if not any(at == node and known.partition("#")[0] == name for known, at in found):
                found.setdefault((name, node), LogSource(name, node))
    logs = [source for _, source in sorted(found.items())]
    logs += [LogSource("", node.name, node.status) for node in _in_name_order(state.nodes) if _has_own_log(node)]
    return [
        Row(f"{source.name}@{source.node}", f"{_title(source)} {source.node} {source.state}", source) for source in logs
    ]


def _in_name_order(nodes: Iterable[NodeView]) -> list[NodeView]:
    return sorted(nodes, key=lambda node: node.name)


def _has_own_log(node: NodeView) -> bool:
    """LocalAI workers have none, and what waits for approval is not asked."""
    return not node.compat and node.status != "pending"


def _title(source: LogSource) -> str:
    return source.name or "worker's own log"


def _node_cells(node: NodeView, now: datetime) -> tuple[str, ...]:
    return node_text.row(node, now)


def _model_cells(line: ModelLine, now: datetime) -> tuple[str, ...]:
    if line.replica is not None:
        _, node, _, state, in_flight, memory, devices, used, note = model_text.replica_row(line.replica, now)
        return line.title, node, state, in_flight, memory, devices, used, note
    assert line.view is not None
    ready = "alias" if line.view.alias else f"{line.view.ready} ready" if line.view.ready else "not loaded"
    wanted = model_text.wanted(line.view.schedule)
    note = ", ".join(part for part in (model_text.note(line.view), f"wanted: {wanted}" if wanted else "") if part)
    return line.title, "", ready, "", "", "", "", note


def _log_cells(source: LogSource, now: datetime) -> tuple[str, ...]:
    return _title(source), source.node, source.state


TABLES: Mapping[str, Table] = {
    "nodes": Table(
        columns=node_text.COLUMNS,
        cells=_node_cells,
        rows=node_rows,
        dropped=("DISK FREE", "CAPABILITY", "RAM FREE", "HEARTBEAT", "MODELS", "VRAM FREE", "IN FLIGHT"),
        empty=node_text.NO_NODES,
    ),
    "models": Table(
        columns=("MODEL", "NODE", "STATE", "IN FLIGHT", "MEMORY", "DEVICES", "USED", "NOTE"),
        cells=_model_cells,
        rows=model_rows,
        dropped=("DEVICES", "USED", "MEMORY", "IN FLIGHT"),
        empty='No models yet. Install one and ask it: `corral chat smollm2-135m "Hello"`',
    ),
    "operations": Table(
        columns=operation_text.COLUMNS,
        cells=operation_text.row,
        rows=operation_rows,
        dropped=("ID", "STARTED", "WHERE", "NODES"),
        empty="No operation is running.",
    ),
    "requests": Table(
        columns=request_text.COLUMNS,
        cells=_request_cells,
        rows=request_rows,
        dropped=("LOADED", "IN", "QUEUED", "OUT", "KEY", "FIRST", "NODE"),
        empty="No requests yet.",
    ),
    "logs": Table(
        columns=("LOG", "NODE", "STATE"),
        cells=_log_cells,
        rows=log_rows,
        dropped=("STATE",),
        empty="No node has joined yet, so there are no logs.",
    ),
}


def matching(rows: Sequence[Row], words: str) -> list[Row]:
    """Rows that contain every word, in any case."""
    wanted = words.lower().split()
    if not wanted:
        return list(rows)
    return [row for row in rows if all(word in row.search.lower() for word in wanted)]


@dataclass(frozen=True)
class Fitted:
    """Columns with their widths, and lines that are exactly as wide as the screen."""

    header: str
    lines: tuple[str, ...]


def fit(table: Table, cells: Sequence[Sequence[str]], width: int) -> Fitted:
    """Lay out the rows that the screen shows. Empty columns are left out, and on a narrow screen the less important."""
    shown = [tuple(_one_line(cell) for cell in row) for row in cells]
    kept = [at for at in range(len(table.columns)) if at == 0 or any(row[at] for row in shown)]
    widths = {
        at: min(_MAX_CELL, max(cell_len(table.columns[at]), *(cell_len(row[at]) for row in shown), 0)) for at in kept
    }
    for name in table.dropped:
        needed = sum(widths[at] + _GAP for at in kept[:-1]) + min(widths[kept[-1]], _MIN_LAST)
        if needed <= width:
            break
        kept = [at for at in kept if table.columns[at] != name]

    def line(row: Sequence[str]) -> str:
        begin = "".join(cut(row[at], widths[at]) + " " * _GAP for at in kept[:-1])
        return cut(begin + cut(row[kept[-1]], max(width - cell_len(begin), 0)), width)

    return Fitted(line(table.columns), tuple(line(row) for row in shown))


def _one_line(cell: str) -> str:
    indent = "  " if cell.startswith("  ") else ""
    return indent + printable(" ".join(cell.split()))


def cut(text: str, width: int) -> str:
    """Exactly `width` cells of the terminal; a mark shows that characters are missing."""
    if width <= 0:
        return ""
    return set_cell_size(text, width) if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"
