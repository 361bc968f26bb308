"""Reads the routable processes, for the gateways' view and for checks whether a model is served."""

from __future__ import annotations

from corral.contract.view import ViewReplica
from corral.controller.inventory.routable import Listing, Served, routable
from corral.controller.rollouts.trial import share_of
from corral.store.engine.transactions import Transaction
from corral.store.records import ReplicaStage
from corral.store.tables import models, node_backends, nodes, replicas, rollouts
from corral.store.tables.nodes import NodeOutline


async def read_routing(tx: Transaction, model: str = "") -> tuple[tuple[ViewReplica, ...], dict[str, str]]:
    """Of one model or all: the processes, and by model the serving revision where it is not the current one."""
    listed = await node_backends.list_processes(tx)
    if not any(process.model for listing_of in listed.values() for process in listing_of.processes):
        return (), {}
    outlines = {outline.id: outline for outline in await nodes.list_outlines(tx, list(listed)) if outline.approved}
    found = await models.list_(tx, [model] if model else None)
    on_trial = {
        rollout.subject: rollout.trial.revision
        for rollout in await rollouts.list_trials(tx)
        if rollout.trial is not None and share_of(rollout)
    }
    served = {row.id: Served(row.revision, row.previous_revisions, on_trial.get(row.id, "")) for row in found}
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
