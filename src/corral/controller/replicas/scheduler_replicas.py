"""Converts rows and processes into the scheduler's replicas. Pure.

One per row, and one per process without a row: wanted or not, its memory is taken and its index in use.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from corral.contract.messages.replicas import ReplicaProcess, ReplicaState
from corral.controller.inventory.activity import ProcessActivity
from corral.controller.replicas.lifecycle import ReplicaHost
from corral.controller.scheduler import world as scheduler
from corral.store.records import DesiredReplica, ReplicaStage


def scheduler_replicas(
    rows: Iterable[DesiredReplica], hosts: Mapping[str, ReplicaHost]
) -> tuple[scheduler.Replica, ...]:
    rows = list(rows)
    found = [_of_row(row, hosts.get(row.node_id)) for row in rows]
    keys = {row.key for row in rows}
    for host in hosts.values():
        for process in host.processes:
            key = (host.id, process.model, process.replica)
            if process.model and key not in keys and process.state != ReplicaState.FAILED:
                keys.add(key)
                found.append(_of_process(host, process))
    return tuple(found)


def _of_row(row: DesiredReplica, host: ReplicaHost | None) -> scheduler.Replica:
    process = host.process_of(row) if host is not None else None
    serves = process is not None and process.state == ReplicaState.READY
    match row.stage:
        case ReplicaStage.LEAVING:
            state = scheduler.ReplicaState.STOPPING
        case ReplicaStage.RUNNING if serves:
            state = scheduler.ReplicaState.READY
        case _:
            state = scheduler.ReplicaState.STARTING
    # All of them end with the replica: one that is replaced, or a second one left behind, may be busy alone.
    own = host.processes_of(row) if host is not None else ()
    activities = [host.activity.get(each.process_id, ProcessActivity()) for each in own] if host is not None else []
    return scheduler.Replica(
        node_id=row.node_id,
        model=row.model,
        index=row.replica,
        state=state,
        revision=row.revision,
        process_id=process.process_id if process is not None else row.process_id,
        memory_bytes=row.memory_bytes or (process.memory_bytes if process is not None else 0),
        devices=row.devices,
        slots=process.slots if process is not None else 1,
        in_flight=sum(each.in_flight for each in activities),
        activity_known=bool(activities) and all(each.known for each in activities),
        ready_at=row.ready_at,
        last_used_at=row.last_used_at,
    )


def _of_process(host: ReplicaHost, process: ReplicaProcess) -> scheduler.Replica:
    return scheduler.Replica(
        node_id=host.id,
        model=process.model,
        index=process.replica,
        state=scheduler.ReplicaState.STOPPING,
        revision=process.revision,
        process_id=process.process_id,
        memory_bytes=process.memory_bytes,
        devices=process.devices,
        slots=process.slots,
        in_flight=host.activity.get(process.process_id, ProcessActivity()).in_flight,
    )
