"""Sends the orders that `plan` decided on, in the background, and logs what was decided."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from corral.contract.messages.replicas import StartReplica, StopReplica
from corral.controller.orders.observations import ReplicaObservation, WorkerUnreachable
from corral.controller.orders.replica_calls import ReplicaOrders
from corral.controller.registry.changes import NodeChanges
from corral.controller.replicas.file_provisioner import FileSource
from corral.controller.replicas.plan_input import PlanResult
from corral.controller.replicas.snapshot import FleetSnapshot
from corral.kit.log import get_log
from corral.kit.tasks import BackgroundTasks
from corral.store.records import DesiredReplica

log = get_log(__name__)


class OrderSender(BackgroundTasks):
    """`async with` it. `on_observation` gets what became of a start; `on_stopped` is called after a stop."""

    def __init__(
        self,
        calls: ReplicaOrders,
        files: FileSource,
        changes: NodeChanges,
        *,
        on_observation: Callable[[ReplicaObservation], None],
        on_stopped: Callable[[], None],
        stop_grace_s: float = 0.0,
    ) -> None:
        """`stop_grace_s`: 0 = the worker's own."""
        super().__init__()
        self._calls = calls
        self._files = files
        self._changes = changes
        self._on_observation = on_observation
        self._on_stopped = on_stopped
        self._stop_grace_s = stop_grace_s

    def send(self, snapshot: FleetSnapshot, result: PlanResult) -> None:
        """Returns at once."""
        _log_events(snapshot, result)
        for start in result.starts:
            definition = snapshot.definitions.get(start.row.model)
            if definition is not None:
                self.start(self._start_replica(start.row, definition.whole), name=f"start {start.row.model}")
        for row, process_id in result.stops:
            order = StopReplica(
                process_id=process_id,
                grace_s=self._stop_grace_s,
                op_id=row.op_id,
                attempt=row.stop_attempt,
                accept=row.stop_attempt > 0,
                force=row.force,
            )
            self.start(self._stop_replica(row.node_id, order), name=f"stop {process_id}")
        for node_id, process_id in result.unwanted:
            # Without force: a process that looks idle from here may have received a request a moment ago.
            order = StopReplica(process_id=process_id, grace_s=self._stop_grace_s, op_id=f"clear-{process_id}")
            self.start(self._stop_replica(node_id, order), name=f"stop {process_id}")

    async def _start_replica(self, row: DesiredReplica, definition: dict[str, Any]) -> None:
        urls, token = self._files.sources_for(row.node_id, row.files or ())
        observation = await self._calls.start(
            row.node_id,
            StartReplica(
                op_id=row.op_id,
                attempt=row.attempt,
                process_id=row.process_id,
                model=row.model,
                replica=row.replica,
                backend=row.backend,
                revision=row.revision,
                definition=definition,
                files=row.files or (),
                devices=row.devices,
                memory_bytes=row.memory_bytes,
                sources=urls,
                source_token=token,
                accept=True,
            ),
        )
        log.info("replica ordered", model=row.model, node_id=row.node_id, answer=type(observation).__name__)
        if isinstance(observation, WorkerUnreachable):
            await self._changes.mark_unreachable(row.node_id)
        self._on_observation(observation)

    async def _stop_replica(self, node_id: str, order: StopReplica) -> None:
        await self._calls.stop(node_id, order)
        self._on_stopped()


def _log_events(snapshot: FleetSnapshot, result: PlanResult) -> None:
    for words, row in result.events:
        host = snapshot.hosts.get(row.node_id)
        log.info(
            words.splitlines()[0][:200],
            model=row.model,
            node=host.name if host is not None else "",
            node_id=row.node_id,
            replica=row.replica,
            why=row.reason,
        )
