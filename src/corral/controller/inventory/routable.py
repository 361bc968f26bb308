"""Which processes gateways may send requests to. Pure.

Only what a node itself lists as ready, of the revision that answers for its model now. After an edit that is the former
one until a process of the present one is ready; from then on nothing of the former one is ever shown again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from corral.contract.messages.replicas import ReplicaProcess, ReplicaState
from corral.contract.view import ViewReplica


@dataclass(frozen=True)
class Listing:
    """What one node says it runs."""

    node_id: str
    status: str
    processes: tuple[ReplicaProcess, ...]
    current: bool = True  # told by the worker that runs there now


@dataclass(frozen=True)
class Served:
    """What may answer for one model, the best first."""

    present: str
    previous_revisions: tuple[str, ...] = ()


Key = tuple[str, str, int]


def routable(
    listings: Iterable[Listing], models: Mapping[str, Served], leaving: Collection[Key]
) -> tuple[tuple[ViewReplica, ...], dict[str, str]]:
    """What gateways may ask, and by model the revision that answers where it is not the present one."""
    candidates = [
        _shown(listing, process)
        for listing in listings
        if listing.status in ("healthy", "unhealthy", "draining")
        for process in listing.processes
        if process.state == ReplicaState.READY
        and process.model in models
        and (listing.node_id, process.model, process.replica) not in leaving
    ]
    by_model: dict[str, set[str]] = {}
    for replica in candidates:
        by_model.setdefault(replica.model, set()).add(replica.revision)
    answering = {name: _answering(models[name], revisions) for name, revisions in by_model.items()}
    # While a process takes the place of another both may be ready for a moment: the later one is asked, and only that.
    latest = {
        (replica.node_id, replica.model, replica.replica): replica
        for replica in candidates
        if replica.revision == answering[replica.model]
    }
    shown = tuple(latest.values())
    others = {name: found for name, found in answering.items() if found and found != models[name].present}
    return shown, others


def _answering(served: Served, there: set[str]) -> str | None:
    return next((revision for revision in (served.present, *served.previous_revisions) if revision in there), None)


def _shown(listing: Listing, process: ReplicaProcess) -> ViewReplica:
    return ViewReplica(
        process_id=process.process_id,
        node_id=listing.node_id,
        model=process.model,
        replica=process.replica,
        revision=process.revision,
        slots=max(1, process.slots),
        digest=process.digest,
        # A node that is being emptied serves until others can; one that did not answer lately, when no other can.
        last_resort=listing.status != "healthy" or not listing.current,
    )


def routing_facts(processes: Iterable[ReplicaProcess]) -> frozenset[tuple[str, str, int, str, int]]:
    """Of a node's list, what gateways would notice: the same before and after means there is nothing to tell them."""
    return frozenset(
        (process.process_id, process.model, process.replica, process.revision, process.slots)
        for process in processes
        if process.state == ReplicaState.READY and process.model
    )
