"""Ends an upgrade of Corral that is reverted: nodes that have switched are ordered the version that they ran before.

The way back is an explicit order, as a person would give it: the older wheel, signed again with a higher counter, in an
operation of its own. It is stored in the transaction in which the version is found to be bad.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from corral.controller.access.release_keys import COUNTER, ReleaseKeys
from corral.controller.operations.corral_operations import open_corral_return
from corral.controller.operations.revert import REVERTED
from corral.controller.operations.state import settle
from corral.controller.releases.signing import CorralWheel, add_release
from corral.kit.errors import Invalid
from corral.kit.log import get_log
from corral.store.engine.transactions import Transaction
from corral.store.records import ENDED, OperationNode, OperationNodeStatus, Rollout
from corral.store.tables import operation_nodes, operations, release_wheels, releases, revisions
from corral.store.tables.operations import Operation

log = get_log(__name__)


async def revert_upgrade(
    tx: Transaction, keys: ReleaseKeys, operation: Operation, rollout: Rollout, rows: Sequence[OperationNode]
) -> Rollout:
    """Returns the rollout with the operations that carry out the way back. The caller holds the counter of rules."""
    now = await tx.now()
    reason = f"the rollout was reverted: {rollout.verdict}"
    release = await releases.get(tx, operation.request.release)
    switched = [row for row in rows if _has_switched(row, rollout, release.sha256)]
    withdrawn = [settle(row, OperationNodeStatus.WITHDRAWN, reason) for row in rows if row.status not in ENDED]
    await operation_nodes.put(tx, [replace(row, updated_at=now) for row in withdrawn])
    await revisions.hold(tx, COUNTER)
    by_wheel: dict[str, list[OperationNode]] = {}
    for row in switched:
        before = rollout.nodes.get(row.node_id)
        by_wheel.setdefault(before.digest if before is not None else "", []).append(row)
    ids, stay = [], []
    for digest, own in sorted(by_wheel.items()):
        try:
            ids.append(await _open_return(tx, keys, digest, own, rollout))
        except Invalid as error:
            stay.append(f"{', '.join(row.node_name for row in own)} cannot be returned by itself: {error.message}")
    failed = "; ".join([rollout.verdict, *stay])
    # Cancelled, too: orders that still run are stopped.
    await operations.replace(tx, replace(operation, cancelled_at=now, finished_at=now, outcome=REVERTED, error=failed))
    await revisions.bump(tx, "operations")
    log.warning("upgrade of corral is reverted", operation=operation.id, verdict=rollout.verdict, nodes=len(switched))
    return replace(rollout, reverted_by=tuple(ids))


def _has_switched(row: OperationNode, rollout: Rollout, sha256: str) -> bool:
    """Or may just do so."""
    before = rollout.nodes.get(row.node_id)
    if before is not None and before.digest == sha256:
        return False  # it ran this version already
    return row.status in (OperationNodeStatus.SUCCESS, OperationNodeStatus.DOWNLOADING)


async def _open_return(
    tx: Transaction, keys: ReleaseKeys, digest: str, rows: Sequence[OperationNode], rollout: Rollout
) -> str:
    content = await release_wheels.find(tx, digest) if digest else None
    version = rollout.nodes[rows[0].node_id].version if rows[0].node_id in rollout.nodes else ""
    if content is None:
        raise Invalid(
            f"the controllers have no wheel of {version or 'the version before'}: give it with "
            f"`corral fleet upgrade --wheel`"
        )
    release = await add_release(tx, keys, CorralWheel(digest, version, content), "", "")
    operation = await open_corral_return(tx, release, [(row.node_id, row.node_name) for row in rows])
    return operation.id
