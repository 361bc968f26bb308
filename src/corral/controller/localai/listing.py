"""What such a node would list, if it listed anything: made from the rows of its processes. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from corral.contract.manifest import GRPC
from corral.contract.messages.replicas import ReplicaProcess
from corral.controller.runtime.node_views import rfc3339
from corral.store.tables.peer_processes import PeerProcess


def listed(rows: Iterable[PeerProcess]) -> tuple[ReplicaProcess, ...]:
    return tuple(_shown(row) for row in rows)


def _shown(row: PeerProcess) -> ReplicaProcess:
    return ReplicaProcess(
        process_id=row.process_id,
        model=row.model,
        replica=row.replica,
        backend=row.backend,
        state=row.state,
        protocol=GRPC,
        revision=row.revision,
        slots=row.slots,
        devices=row.devices,
        memory_bytes=row.memory_bytes,
        started_at=rfc3339(row.started_at),
        ready_at=rfc3339(row.ready_at),
        error=row.error,
    )
