"""Reads the routable processes, for the gateways' view and for checks whether a model is served.

After an edit the previous revision serves until the current one is ready, and never again after that: not even if the
first process of the current revision ends before the replica reconciler has run.
"""

from __future__ import annotations

from collections.abc import Iterable

from corral.contract.messages.replicas import ReplicaProcess, ReplicaState
from corral.contract.view import ViewReplica
from corral.controller.inventory.routable import Listing, Served, routable
from corral.store.engine.transactions import Transaction
from corral.store.records import ReplicaStage
from corral.store.tables import models, node_backends, nodes, replicas
from corral.store.tables.nodes import NodeOutline


async def read_routing(tx: Transaction, model: str = "") -> tuple[tuple[ViewReplica, ...], dict[str, str]]:
    """Of one model or all: the processes, and by model the serving revision where it is not the current one."""
    listed = await node_backends.list_processes(tx)
    if not any(process.model for listing_of in listed.values() for process in listing_of.processes):
        return (), {}
    outlines = {outline.id: outline for outline in await nodes.list_outlines(tx, list(listed)) if outline.approved}
    found = await models.list_(tx, [model] if model else None)
    served = {row.id: Served(row.revision, row.previous_revisions) for row in found}
    leaving = {
        (row.node_id, row.model, row.replica) for row in await replicas.list_(tx) if row.stage == ReplicaStage.LEAVING
    }
    listings = [
        Listing(
            node_id, outlines[node_id].status, listing_of.processes, _is_current(listing_of.boot_id, outlines[node_id])
        )
        for node_id, listing_of in listed.items()
        if node_id in outlines
    ]
    return routable(listings, served, leaving)


def _is_current(boot_id: str, outline: NodeOutline) -> bool:
    return boot_id in ("", outline.boot_id)


async def forget_previous_revisions(tx: Transaction, processes: Iterable[ReplicaProcess]) -> None:
    """Call it in the transaction that stores these processes: gateways see them from its commit on."""
    ready = {process.model for process in processes if process.state == ReplicaState.READY and process.model}
    if not ready:
        return
    for row in await models.list_(tx, sorted(ready)):
        if row.previous_revisions:
            shown, _ = await read_routing(tx, row.id)
            if any(replica.revision == row.revision for replica in shown):
                await models.forget_previous_revisions(tx, row.id, row.revision)
