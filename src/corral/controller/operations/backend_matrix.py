"""The matrix of backends and nodes: installed and available versions, drift, and pending work. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from corral.contract.admin import BackendMatrix, MatrixCell, MatrixIntent, MatrixNode, MatrixRow
from corral.contract.messages.backends import NodeBackend, UpgradeInfo
from corral.controller.backends.rules import Unwanted, fold, has_to_go
from corral.controller.inventory.installed import concrete_name, find_installed, names_in, previous_digests
from corral.controller.operations.views import rfc3339
from corral.store.records import ENDED, BackendIntent, BackendRule, OperationNode, OperationNodeStatus
from corral.store.tables.node_backends import Inventory
from corral.store.tables.nodes import NodeOutline
from corral.store.tables.operations import Operation

_OPEN = ("waiting", "sent", "parked")
_STAGES = {
    OperationNodeStatus.QUEUED: "waiting",
    OperationNodeStatus.DOWNLOADING: "sent",
    OperationNodeStatus.RUNNING_ON_WORKER: "sent",
}
Pending = Mapping[str, Mapping[str, MatrixIntent]]  # by node id, then backend


def pending_of(
    operations: Sequence[Operation], rows: Mapping[str, Sequence[OperationNode]], intents: Sequence[BackendIntent]
) -> Pending:
    """The pending work by node: from the rows of operations, which include unreachable nodes; and from intents, for
    work whose operation is no longer stored."""
    found: dict[str, dict[str, MatrixIntent]] = {}
    for intent in intents:
        if intent.stage in _OPEN:
            found.setdefault(intent.node_id, {})[intent.backend] = MatrixIntent(
                intent.kind,
                intent.stage,
                intent.operation_id,
                intent.failures,
                intent.reason,
                rfc3339(intent.next_try_at),
            )
    for operation in sorted(operations, key=lambda operation: operation.generation):
        for row in rows.get(operation.id, ()):
            if row.status not in ENDED:
                found.setdefault(row.node_id, {})[operation.backend] = _of_row(operation, row)
    return found


def pending_deletes(
    outlines: Sequence[NodeOutline],
    labels: Mapping[str, Mapping[str, str]],
    inventories: Mapping[str, Inventory],
    rules: Sequence[BackendRule],
) -> Pending:
    """The pending deletes of unreachable nodes: the reconciler writes intents only for reachable ones."""
    found: dict[str, dict[str, MatrixIntent]] = {}
    for outline in outlines:
        inventory = inventories.get(outline.id)
        if outline.status == "healthy" or inventory is None:
            continue
        names = names_in(inventory.backends)
        wanted = fold(rules, node_id=outline.id, labels=labels.get(outline.id, {}), installed=names)
        reason = f"node {outline.status}, will retry when healthy"
        for backend, want in wanted.items():
            if isinstance(want, Unwanted) and has_to_go(inventory.backends, backend, wanted):
                todo = MatrixIntent("delete", "waiting", want.operation, 0, reason, "")
                found.setdefault(outline.id, {})[backend] = todo
    return found


def _of_row(operation: Operation, row: OperationNode) -> MatrixIntent:
    failing = "waiting" if row.next_try_at is not None else "parked"
    return MatrixIntent(
        operation.kind,
        _STAGES.get(row.status, failing),
        operation.id,
        row.failures,
        row.reason,
        rfc3339(row.next_try_at),
        row.phase,
        round(row.percentage, 1),
    )


def matrix_of(
    outlines: Sequence[NodeOutline],
    inventories: Mapping[str, Inventory],
    pending: Pending,
    newer: Mapping[str, UpgradeInfo],
    checked_at: str = "",
) -> BackendMatrix:
    """`outlines` in name order. One row per name that users use: the builds of a meta backend appear in its row."""
    drifting = {name: {node.node_id for node in info.node_drift} for name, info in newer.items()}
    cells: dict[str, dict[str, MatrixCell]] = {}
    builds: dict[str, set[str]] = {}
    for outline in outlines:
        inventory = inventories.get(outline.id)
        rows = inventory.backends if inventory is not None else ()
        todo = pending.get(outline.id, {})
        for backend in dict.fromkeys((*_names(rows), *todo)):
            variant = concrete_name(rows, backend)
            builds.setdefault(backend, set()).add(variant)
            cells.setdefault(backend, {})[outline.id] = _cell(
                rows, backend, variant, todo.get(backend), newer.get(variant), outline.id in drifting.get(variant, ())
            )
    return BackendMatrix(
        tuple(
            MatrixNode(row.id, row.name, row.status, row.capability, row.platform, row.id in inventories)
            for row in outlines
        ),
        tuple(_row(backend, cells[backend], builds[backend], newer) for backend in sorted(cells)),
        checked_at,
    )


def _names(rows: Sequence[NodeBackend]) -> list[str]:
    behind = {row.meta_backend_for for row in rows if row.meta_backend_for}
    return [row.name for row in rows if row.is_meta or row.name not in behind]


def _cell(
    rows: Sequence[NodeBackend],
    backend: str,
    variant: str,
    intent: MatrixIntent | None,
    newer: UpgradeInfo | None,
    drifts: bool,
) -> MatrixCell:
    found = find_installed(rows, backend)
    if found is None:
        return MatrixCell(installed=False, intent=intent)
    return MatrixCell(
        installed=True,
        version=found.version,
        digest=found.digest,
        variant=variant if variant != backend else "",
        installed_at=found.installed_at,
        is_system=found.system,
        outdated=newer is not None and _is_old(found.version, found.digest, newer),
        drift=drifts,
        can_roll_back=bool(previous_digests(rows, backend)),
        intent=intent,
        problem=found.problem,
    )


def _is_old(version: str, digest: str, newer: UpgradeInfo) -> bool:
    """Compare with the node's own version: the report covers most nodes, and this one may have been upgraded since."""
    if newer.available_digest:
        return digest != newer.available_digest
    return bool(newer.available_version) and version != newer.available_version


def _row(backend: str, cells: dict[str, MatrixCell], builds: set[str], newer: Mapping[str, UpgradeInfo]) -> MatrixRow:
    found = [newer[build] for build in sorted(builds) if build in newer]
    return MatrixRow(
        backend,
        cells,
        upgrade_available=any(cell.outdated or cell.drift for cell in cells.values()),
        available_version=next((info.available_version for info in found if info.available_version), ""),
        available_digest=found[0].available_digest if len(found) == 1 else "",
        drift=any(cell.drift for cell in cells.values()),
    )
