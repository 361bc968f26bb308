"""Describes which earlier rules hold again when an operation is cancelled or withdrawn.

It folds the rules (`backends/rules.py`) with and without the withdrawn one, and describes the difference to the user.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from corral.contract.messages.backends import NodeBackend
from corral.controller.backends.rules import Unwanted, Wanted, fold
from corral.controller.inventory.installed import find_installed, names_in
from corral.controller.inventory.nodes import takes_backends
from corral.store.engine.transactions import Transaction
from corral.store.records import BackendRule, ScopeKind
from corral.store.tables import backend_rules, node_backends, node_labels, nodes
from corral.store.tables.operations import Operation

MAX_NAMED = 3  # nodes that a sentence lists by name


@dataclass(frozen=True)
class NodeFacts:
    """The facts of a node that the fold needs."""

    id: str
    name: str
    labels: Mapping[str, str]
    backends: tuple[NodeBackend, ...]


async def describe_restored_rules(
    tx: Transaction, operation: Operation, before: Sequence[BackendRule]
) -> tuple[str, ...]:
    """A sentence for each earlier operation that decides again. `before`: the backend's rules before the withdrawal."""
    after = await backend_rules.list_live(tx, operation.backend)
    if not any(rule.generation < operation.generation for rule in after):
        return ()
    outlines = [row for row in await nodes.list_outlines(tx) if takes_backends(row)]
    ids = [row.id for row in outlines]
    labelled = any(rule.scope_kind == ScopeKind.SELECTOR for rule in before)
    labels = await node_labels.list_for(tx, ids) if labelled else {}
    inventories = {row.node_id: row.backends for row in await node_backends.list_(tx, ids)}
    nodes_facts = [NodeFacts(row.id, row.name, labels.get(row.id, {}), inventories.get(row.id, ())) for row in outlines]
    return sentences(operation, nodes_facts, before, after)


def sentences(
    operation: Operation, nodes_facts: Sequence[NodeFacts], before: Sequence[BackendRule], after: Sequence[BackendRule]
) -> tuple[str, ...]:
    """`places` in name order."""
    found: dict[tuple[str, str], list[str]] = {}
    for node in nodes_facts:
        if _decides(before, node, operation.backend, operation.generation):
            restored = _holds(after, node, operation.backend)
            if restored is not None and (word := _becomes(restored, node, operation)):
                found.setdefault((word, restored.operation), []).append(node.name)
    return tuple(
        f"{operation.backend} {word} on {_where(names)}, as asked earlier in operation {earlier[:8]}"
        for (word, earlier), names in found.items()
    )


def _decides(rules: Sequence[BackendRule], node: NodeFacts, backend: str, generation: int) -> bool:
    want = _holds(rules, node, backend)
    return want is not None and want.generation == generation


def _holds(rules: Sequence[BackendRule], node: NodeFacts, backend: str) -> Wanted | Unwanted | None:
    return fold(rules, node_id=node.id, labels=node.labels, installed=names_in(node.backends)).get(backend)


def _becomes(want: Wanted | Unwanted, node: NodeFacts, operation: Operation) -> str:
    there = find_installed(node.backends, operation.backend) is not None
    if isinstance(want, Unwanted):
        return "will be deleted again" if there else ""
    if not there:
        return "will be installed"
    return "goes back to what it was" if operation.kind in ("upgrade", "rollback") else ""


def _where(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= MAX_NAMED else f"{len(names)} nodes"
