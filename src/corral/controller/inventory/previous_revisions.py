"""After an edit the former revision answers until the present one can, and never after that: not even when the first
process of the present one ends again a moment later, before whoever keeps the replicas has looked."""

from __future__ import annotations

from collections.abc import Iterable

from corral.contract.messages.replicas import ReplicaProcess, ReplicaState
from corral.controller.inventory.routing import read_routing
from corral.store.engine.transactions import Transaction
from corral.store.tables import models


async def forget_previous_revisions(tx: Transaction, told: Iterable[ReplicaProcess]) -> None:
    """In the transaction in which these were written down: from its end on gateways are shown what it says."""
    ready = {process.model for process in told if process.state == ReplicaState.READY and process.model}
    if not ready:
        return
    for row in await models.list_(tx, sorted(ready)):
        if row.previous_revisions:
            shown, _ = await read_routing(tx, row.id)
            if any(replica.revision == row.revision for replica in shown):
                await models.forget_previous_revisions(tx, row.id, row.revision)
