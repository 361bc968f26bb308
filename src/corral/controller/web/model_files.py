"""The files of a model as the page shows them: where each comes from, how much of them each node has, and which nodes
feed it while they move; and the models of which a node has files. Pure; `files_part.html` and `node_files_part.html`
write what is decided here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from corral.contract.admin import OperationNodeView, OperationView
from corral.contract.catalogue import ModelFilesView, ModelFileView, NodeFilesView
from corral.contract.installs import shown_uri
from corral.controller.web.operations import amount_of, sources_of
from corral.controller.web.words import model_href, node_href, size, used_of

NODES_SHOWN = 100  # those whose files move come first, then those that lack some
FILES_SHOWN = 50
_ENDED = frozenset(("success", "skipped", "cancelled", "error"))
_WORDS = {  # the state of a node's copy: the class of its pill, its words
    "whole": ("ready", "complete"),
    "partial": ("waiting", "incomplete"),
    "none": ("cold", "none"),
    "unknown": ("cold", "unknown"),
}
_MOVING = ("loading", "receiving")
_ORDER = ("receiving", "incomplete", "none", "unknown", "complete")


@dataclass(frozen=True)
class FileLine:
    path: str
    size: str
    source: str
    on_controller: bool


@dataclass(frozen=True)
class CopyLine:
    """What one node has."""

    node: str
    href: str
    pill: str
    words: str
    percent: int | None  # None: nothing to compare with
    amount: str
    sources: str
    free: str
    note: str


@dataclass(frozen=True)
class ModelOnNode:
    """The files of one model that a node has."""

    model: str
    href: str
    copy: CopyLine


@dataclass(frozen=True)
class NodeFilesTable:
    note: str
    free: str
    models: tuple[ModelOnNode, ...]
    models_more: int


@dataclass(frozen=True)
class FilesTable:
    size: str
    note: str
    files: tuple[FileLine, ...]
    files_more: int
    nodes: tuple[CopyLine, ...]
    nodes_more: int
    complete: int  # nodes that have everything


def files_table(view: ModelFilesView, operations: Sequence[OperationView]) -> FilesTable:
    """`operations`: those under way; the ones that bring this model's files tell what moves."""
    moving = _moving(view.model, operations)
    nodes = sorted((_copy(node, moving.get(node.node_id)) for node in view.nodes), key=_place)
    files = [_file(file) for file in view.files]
    return FilesTable(
        size=size(view.size_bytes) if view.size_bytes else "",
        note=view.note,
        files=tuple(files[:FILES_SHOWN]),
        files_more=max(0, len(files) - FILES_SHOWN),
        nodes=tuple(nodes[:NODES_SHOWN]),
        nodes_more=max(0, len(nodes) - NODES_SHOWN),
        complete=sum(node.state == "whole" for node in view.nodes),
    )


def node_files_table(held: Mapping[str, NodeFilesView], operations: Sequence[OperationView]) -> NodeFilesTable:
    """Of the models of which the node has something, or receives it."""
    lines = [_on_node(model, view, operations) for model, view in sorted(held.items())]
    shown = [line for line in lines if line.copy.words not in ("none", "unknown")]
    return NodeFilesTable(
        note=next((view.reason for view in held.values() if view.reason), ""),
        free=next((line.copy.free for line in lines if line.copy.free), ""),
        models=tuple(shown[:NODES_SHOWN]),
        models_more=max(0, len(shown) - NODES_SHOWN),
    )


def _on_node(model: str, view: NodeFilesView, operations: Sequence[OperationView]) -> ModelOnNode:
    return ModelOnNode(model, model_href(model), _copy(view, _moving(model, operations).get(view.node_id)))


def _moving(model: str, operations: Sequence[OperationView]) -> Mapping[str, OperationNodeView]:
    """The newest row of each node to which the model's files are being brought."""
    found: dict[str, OperationNodeView] = {}
    for view in sorted(operations, key=lambda view: view.created_at):
        if view.kind in ("stage", "staging") and view.backend == model and not view.finished_at:
            found |= {row.node_id: row for row in view.nodes if row.status not in _ENDED}
    return found


def _file(file: ModelFileView) -> FileLine:
    whole = bool(file.size_bytes) and file.controller_bytes >= file.size_bytes
    return FileLine(file.path, size(file.size_bytes) if file.size_bytes else "", shown_uri(file.source), whole)


def _copy(node: NodeFilesView, row: OperationNodeView | None) -> CopyLine:
    receives = row is not None and node.state != "whole" and row.status in ("downloading", "running_on_worker")
    pill, words = _MOVING if receives else _WORDS.get(node.state, _WORDS["unknown"])
    known = node.state != "unknown" and node.total_bytes > 0
    amount = used_of(node.have_bytes, node.total_bytes) if known else ""
    have, total = node.have_bytes, node.total_bytes
    if receives and row is not None and row.total_bytes:
        have, total, amount = row.current_bytes, row.total_bytes, amount_of(row)
    return CopyLine(
        node=node.node_name,
        href=node_href(node.node_name),
        pill=pill,
        words=words,
        percent=min(100, 100 * have // total) if total and (known or receives) else None,
        amount=amount,
        sources=sources_of(row) if row is not None else "",
        free=f"{size(node.free_bytes)} free" if node.free_bytes else "",
        note=((row.error or row.note) if row is not None else "") or node.reason,
    )


def _place(line: CopyLine) -> tuple[int, str]:
    return _ORDER.index(line.words), line.node
