"""The replicas there are or will be, as the scheduler looks at them. Pure.

One per row, and one per process without a row: whoever wants it or not, its memory is taken and its number in use.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from corral.contract.messages.replicas import ReplicaProcess, ReplicaState
from corral.controller.inventory.records import ProcessActivity
from corral.controller.replicas.lifecycle import Place
from corral.controller.scheduler import world as seen
from corral.store.records import DesiredReplica, ReplicaStage


def mirror(rows: Iterable[DesiredReplica], places: Mapping[str, Place]) -> tuple[seen.Replica, ...]:
    rows = list(rows)
    found = [_of_row(row, places.get(row.node_id)) for row in rows]
    keys = {row.key for row in rows}
    for place in places.values():
        for process in place.processes:
            key = (place.id, process.model, process.replica)
            if process.model and key not in keys and process.state != ReplicaState.FAILED:
                keys.add(key)
                found.append(_of_process(place, process))
    return tuple(found)


def _of_row(row: DesiredReplica, place: Place | None) -> seen.Replica:
    process = place.process_of(row) if place is not None else None
    serves = process is not None and process.state == ReplicaState.READY
    match row.stage:
        case ReplicaStage.LEAVING:
            state = seen.ReplicaState.STOPPING
        case ReplicaStage.RUNNING if serves:
            state = seen.ReplicaState.READY
        case _:
            state = seen.ReplicaState.STARTING
    quiet = (
        place.quiet.get(process.process_id, ProcessActivity())
        if place is not None and process is not None
        else ProcessActivity()
    )
    return seen.Replica(
        row.node_id,
        row.model,
        row.replica,
        state,
        row.revision,
        process.process_id if process is not None else row.process_id,
        row.memory_bytes or (process.memory_bytes if process is not None else 0),
        devices=row.devices,
        slots=process.slots if process is not None else 1,
        in_flight=quiet.in_flight,
        activity_known=quiet.known,
        ready_at=row.ready_at,
        last_used_at=row.last_used_at,
    )


def _of_process(place: Place, process: ReplicaProcess) -> seen.Replica:
    return seen.Replica(
        place.id,
        process.model,
        process.replica,
        seen.ReplicaState.STOPPING,
        process.revision,
        process.process_id,
        process.memory_bytes,
        devices=process.devices,
        slots=process.slots,
        in_flight=place.quiet.get(process.process_id, ProcessActivity()).in_flight,
    )
