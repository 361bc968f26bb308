"""Handlers of the orders for replicas, one for each subject (docs/reference/wire/replicas.md).

A replica has started when its backend's version is installed, its files are on the disk, its process serves and, for
gRPC, has loaded the model. The controller decides which node runs a replica.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from corral.blobs.progress import Progress
from corral.bus.api import Tokens
from corral.contract.messages.backends import InstallProgress, Phase
from corral.contract.messages.replicas import (
    START_REPLICA_PROGRESS,
    ReplicaProgress,
    ReplicaReply,
    ReplicaResult,
    StartReplica,
    StopReplica,
)
from corral.kit.clock import Clock
from corral.kit.errors import CorralError, Failed, Invalid, NotFound
from corral.kit.log import get_log
from corral.worker.agent.orders.replica_spec import spec_of
from corral.worker.agent.orders.runner import EventPublisher, OrderKey, OrderKind, OrderRun, OrderRunner
from corral.worker.files.model_files import WorkerFiles
from corral.worker.ingress.replicas import ReplicaRelay
from corral.worker.installer.installer import Installer
from corral.worker.installer.progress import ProgressPublisher, ProgressSubject
from corral.worker.supervisor.spec import ProcessSpec
from corral.worker.supervisor.supervisor import Supervisor

log = get_log(__name__)

Order = StartReplica | StopReplica


class ReplicaOrders:
    def __init__(
        self,
        installer: Installer,
        supervisor: Supervisor,
        runner: OrderRunner,
        publisher: EventPublisher,
        models_dir: Path,
        files: WorkerFiles,
        clock: Clock,
        relay: ReplicaRelay,
        *,
        drain_s: float,
    ) -> None:
        self._installer = installer
        self._supervisor = supervisor
        self._runner = runner
        self._publisher = publisher
        self._models_dir = models_dir
        self._files = files
        self._clock = clock
        self._relay = relay
        self._drain_s = drain_s

    async def start(self, order: StartReplica, _tokens: Tokens) -> ReplicaReply:
        return await self._answer(OrderKind.START_REPLICA, order, lambda: self._start(order))

    async def stop(self, order: StopReplica, _tokens: Tokens) -> ReplicaReply:
        return await self._answer(OrderKind.STOP_REPLICA, order, lambda: self._stop(order))

    async def _start(self, order: StartReplica) -> str:
        """The id of the process that serves; a new id when the process of a repeated order has ended."""
        build = await self._installer.find(order.backend, order.digest)
        if build is None:
            which = f"{order.backend} {order.digest}".strip()
            raise NotYetAvailable(f"{which} is not installed on this machine")
        await self._installer.ensure_libraries(build)
        if order.file_list:
            listed = await self._files.read_list(order.file_list, order.sources, order.source_token)
            order = msgspec.structs.replace(order, files=listed, file_list="")
        with self._files.protect(order.files):
            try:
                await self._fetch_files(order)
                spec = await asyncio.to_thread(spec_of, order, build, self._models_dir)
            except NotFound as error:
                raise NotYetAvailable(error.message) from error
            return await self._run(spec, order)

    async def _run(self, spec: ProcessSpec, order: StartReplica) -> str:
        try:
            return (await self._supervisor.start(spec)).process_id
        except asyncio.CancelledError:
            # Without an order, no process may start on its own.
            await self._stop_quietly(order.process_id)
            raise

    async def _fetch_files(self, order: StartReplica) -> None:
        """Fetch the files and report progress; later the process reports its own start."""
        last = Progress(Phase.RESOLVING)

        async def publish(event: InstallProgress) -> None:
            progress_event = ReplicaProgress(
                op_id=order.op_id,
                attempt=order.attempt,
                seq=event.seq,
                process_id=order.process_id,
                phase=event.phase,
                file=event.file_name,
                file_index=last.file_index,
                total_files=last.file_count,
                current_bytes=event.current_bytes,
                total_bytes=event.total_bytes,
                rate=event.rate,
                sources=event.sources,
                bad_sources=event.bad_sources,
            )
            await self._publisher.publish(START_REPLICA_PROGRESS, progress_event, op=order.op_id)

        name = ProgressSubject(
            order.op_id if order.accept else "", self._publisher.node_id, order.backend, order.attempt
        )
        # The same attempt may be sent again after a restart: numbers start at the clock, as those of installs do.
        seq = int(self._clock.now().timestamp() * 1000)
        async with ProgressPublisher(name, publish, self._clock, after_seq=seq) as progress:

            def on_progress(step: Progress) -> None:
                nonlocal last
                last = step
                progress.tell(step)

            await self._files.ensure(order.files, order.sources, order.source_token, on_progress)
            if order.files:
                on_progress(replace(last, phase=Phase.STARTING))

    async def _stop(self, order: StopReplica) -> str:
        if order.op_id:  # the start may still fetch files: a stopped replica must not start later
            self._runner.cancel(order.op_id, order.process_id, kind=OrderKind.START_REPLICA)
        if not order.force:
            await self._drain(order.process_id)
        try:
            stopped = await self._supervisor.stop(order.process_id, grace_s=order.grace_s or None)
        except NotFound:
            return order.process_id  # stopped already
        if not stopped.terminated:
            raise Failed(stopped.error)
        return stopped.process_id

    async def _drain(self, process_id: str) -> None:
        """Let running requests end. The controller saw the replica idle, but a gateway may not know yet that it
        stops."""
        if self._supervisor.find(process_id) is None or await self._relay.retire(process_id, self._drain_s):
            return
        raise Failed(
            f"{process_id} has requests in flight: it accepts no new ones and can be stopped when they have ended"
        )

    async def _stop_quietly(self, process_id: str) -> None:
        try:
            await self._supervisor.stop(process_id, force=True)
        except CorralError as error:
            log.info("nothing to stop", process=process_id, reason=error.message)

    async def _answer(self, kind: OrderKind, order: Order, work: Callable[[], Awaitable[str]]) -> ReplicaReply:
        if not (order.accept and order.op_id):
            result = await self._runner.run_detached(self._carry_out(order, work))
            return ReplicaReply(success=result.success, error=result.error, process_id=result.process_id)

        async def run(_run: OrderRun) -> ReplicaResult:
            return await self._carry_out(order, work)

        key = OrderKey(kind, order.op_id, order.attempt, order.process_id)
        cancelled = partial(_result, order, success=False, error="cancelled")
        self._runner.accept(key, run, cancelled=cancelled)
        return ReplicaReply(success=True, accepted=True, process_id=order.process_id)

    async def _carry_out(self, order: Order, work: Callable[[], Awaitable[str]]) -> ReplicaResult:
        try:
            process_id = await work()
        except CorralError as error:
            log.warning("order failed", process=order.process_id, op=order.op_id, error=error.message)
            return _result(order, success=False, error=error.message, final=isinstance(error, Invalid))
        except Exception as error:
            log.exception("order failed", process=order.process_id, op=order.op_id)
            return _result(order, success=False, error=f"the worker failed: {error!r}")
        return _result(order, success=True, process_id=process_id)


class NotYetAvailable(Failed):
    """A backend or a file is missing that may arrive later."""

    code = "not_yet"


def _result(
    order: Order, *, success: bool, error: str = "", final: bool = False, process_id: str = ""
) -> ReplicaResult:
    return ReplicaResult(
        op_id=order.op_id,
        attempt=order.attempt,
        success=success,
        process_id=process_id or order.process_id,
        error=error,
        final=final,
    )
