"""Orders about replicas: one function per subject (docs/reference/wire/replicas.md). Between Corral peers only.

Starting one means: its backend's version is on the disk, its files are there, the process serves and, for gRPC, has
its model loaded. Where a replica should be is the controller's to say.
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
    START_REPLICA_RESULT,
    STOP_REPLICA_RESULT,
    ReplicaProgress,
    ReplicaReply,
    ReplicaResult,
    StartReplica,
    StopReplica,
)
from corral.kit.clock import Clock
from corral.kit.errors import CorralError, Failed, Invalid, NotFound
from corral.kit.log import get_log
from corral.worker.agent.order_runs import OrderRuns, Run
from corral.worker.agent.outcomes import OrderKey, Outcome
from corral.worker.agent.replacing import Traffic
from corral.worker.agent.replica_spec import spec_of
from corral.worker.agent.voice import Voice
from corral.worker.files.model_files import WorkerFiles
from corral.worker.installer.installer import Installer
from corral.worker.installer.progress import OrderName, ProgressPublisher
from corral.worker.supervisor.spec import ProcessSpec
from corral.worker.supervisor.supervisor import Supervisor

log = get_log(__name__)

START, STOP = "replica.start", "replica.stop"
_RESULTS = {START: START_REPLICA_RESULT, STOP: STOP_REPLICA_RESULT}

Order = StartReplica | StopReplica


class ReplicaOrders:
    def __init__(
        self,
        installer: Installer,
        supervisor: Supervisor,
        runs: OrderRuns,
        voice: Voice,
        models: Path,
        files: WorkerFiles,
        clock: Clock,
        traffic: Traffic,
        *,
        drain_s: float,
    ) -> None:
        self._installer = installer
        self._supervisor = supervisor
        self._runs = runs
        self._voice = voice
        self._models = models
        self._files = files
        self._clock = clock
        self._traffic = traffic
        self._drain_s = drain_s

    async def start(self, order: StartReplica, _tokens: Tokens) -> ReplicaReply:
        return await self._answer(START, order, lambda: self._start(order))

    async def stop(self, order: StopReplica, _tokens: Tokens) -> ReplicaReply:
        return await self._answer(STOP, order, lambda: self._stop(order))

    async def _start(self, order: StartReplica) -> str:
        """The id of the process that serves: a new one, when an order is repeated whose process is over."""
        build = await self._installer.find(order.backend, order.digest)
        if build is None:
            which = f"{order.backend} {order.digest}".strip()
            raise NotYet(f"{which} is not installed on this machine")
        await self._installer.ensure_libraries(build)
        if order.file_list:
            listed = await self._files.read_list(order.file_list, order.sources, order.source_token)
            order = msgspec.structs.replace(order, files=listed, file_list="")
        with self._files.holding(order.files):
            try:
                await self._fetch_files(order)
                spec = await asyncio.to_thread(spec_of, order, build, self._models)
            except NotFound as error:
                raise NotYet(error.message) from error
            return await self._run(spec, order)

    async def _run(self, spec: ProcessSpec, order: StartReplica) -> str:
        try:
            return (await self._supervisor.start(spec)).process_id
        except asyncio.CancelledError:
            # Nobody waits for it any more, and a start that goes on by itself would be nobody's.
            await self._stop_quietly(order.process_id)
            raise

    async def _fetch_files(self, order: StartReplica) -> None:
        """The order's progress is that of its files; once they are here, a process that starts tells by itself."""
        last = Progress(Phase.RESOLVING)

        async def publish(event: InstallProgress) -> None:
            told = ReplicaProgress(
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
            )
            await self._voice.say(START_REPLICA_PROGRESS, told, op=order.op_id)

        name = OrderName(order.op_id if order.accept else "", self._voice.node_id, order.backend, order.attempt)
        # The same attempt may be sent again after a restart: numbers go on from the clock, as those of installs do.
        seq = int(self._clock.now().timestamp() * 1000)
        async with ProgressPublisher(name, publish, self._clock, after_seq=seq) as progress:

            def tell(heard: Progress) -> None:
                nonlocal last
                last = heard
                progress.tell(heard)

            await self._files.ensure(order.files, order.sources, order.source_token, tell)
            if order.files:
                tell(replace(last, phase=Phase.STARTING))

    async def _stop(self, order: StopReplica) -> str:
        if order.op_id:  # it may still be fetching files: what is stopped must not come up later
            self._runs.cancel(order.op_id, order.process_id, kind=START)
        if not order.force:
            await self._finish(order.process_id)
        try:
            stopped = await self._supervisor.stop(order.process_id, grace_s=order.grace_s or None)
        except NotFound:
            return order.process_id  # it is as it should be
        if not stopped.terminated:
            raise Failed(stopped.error)
        return stopped.process_id

    async def _finish(self, process_id: str) -> None:
        """Whoever ordered the stop saw it idle; but a gateway may not have heard of it yet, and have sent one more."""
        if self._supervisor.find(process_id) is None or await self._traffic.retire(process_id, self._drain_s):
            return
        raise Failed(f"{process_id} has requests under way: it takes no more, and can be stopped after them")

    async def _stop_quietly(self, process_id: str) -> None:
        try:
            await self._supervisor.stop(process_id, force=True)
        except CorralError as error:
            log.info("nothing to stop", process=process_id, reason=error.message)

    async def _answer(self, kind: str, order: Order, work: Callable[[], Awaitable[str]]) -> ReplicaReply:
        if not (order.accept and order.op_id):
            result = await self._runs.see_through(self._carry_out(order, work))
            return ReplicaReply(success=result.success, error=result.error, process_id=result.process_id)
        key = OrderKey(kind, order.op_id, order.attempt, order.process_id)
        given_up = partial(_result, order, success=False, error="cancelled")

        async def run(_run: Run) -> ReplicaResult:
            return await self._carry_out(order, work)

        self._runs.accept(key, run, self._tell, given_up=given_up)
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

    async def _tell(self, outcome: Outcome) -> None:
        if outcome.replica is not None:
            await self._voice.try_to_say(_RESULTS[outcome.kind], outcome.replica, op=outcome.replica.op_id)


class NotYet(Failed):
    """Something is missing that may well come: a backend, a file."""

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
