"""Decides which processes gateways may send requests to. Pure.

Only processes that their node lists as ready, of the revision that currently serves the model. After an edit that is
the previous revision until a process of the new one is ready; from then on the previous one is never routed to again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from corral.contract.messages.replicas import ReplicaProcess, ReplicaState
from corral.contract.view import ViewReplica


@dataclass(frozen=True)
class Listing:
    """The processes that one node reports."""

    node_id: str
    status: str
    processes: tuple[ReplicaProcess, ...]
    current: bool = True  # reported by the worker that runs now


@dataclass(frozen=True)
class Served:
    """The revisions that may serve one model, the best first."""

    present: str
    previous_revisions: tuple[str, ...] = ()
    on_trial: str = ""  # a revision that serves a share of the requests beside the best


Key = tuple[str, str, int]


def routable(
    listings: Iterable[Listing], models: Mapping[str, Served], leaving: Collection[Key]
) -> tuple[tuple[ViewReplica, ...], dict[str, str]]:
    """The routable processes, and by model the serving revision where it is not the current one."""
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
    # While a process replaces another, both may be ready for a moment: only the later one gets requests.
    latest = {
        (replica.node_id, replica.model, replica.replica): replica
        for replica in candidates
        if replica.revision in (answering[replica.model], models[replica.model].on_trial)
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
        # A draining node serves until others can; an unhealthy one only if no other can.
        last_resort=listing.status != "healthy" or not listing.current,
        continues=process.continues,
    )


def routing_facts(processes: Iterable[ReplicaProcess]) -> frozenset[tuple[str, str, int, str, int]]:
    """The facts of a node's processes that matter to gateways: if they are unchanged, gateways need no update."""
    return frozenset(
        (process.process_id, process.model, process.replica, process.revision, process.slots)
        for process in processes
        if process.state == ReplicaState.READY and process.model
    )
