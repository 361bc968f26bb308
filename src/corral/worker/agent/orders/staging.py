"""Handlers of the orders about model files, one for each subject (docs/reference/wire/staging.md).

A model is staged when all its files are on the disk, complete and verified. No process is started.
"""

from __future__ import annotations

from functools import partial

import msgspec

from corral.blobs.progress import OnProgress
from corral.bus.api import Tokens
from corral.contract.messages.backends import InstallProgress
from corral.contract.messages.models import DoneReply
from corral.contract.messages.staging import (
    STAGE_PROGRESS,
    CancelStage,
    CollectedFiles,
    CollectFiles,
    FilesOnNode,
    ListFiles,
    StageModel,
    StageReply,
    StageResult,
)
from corral.kit.clock import Clock
from corral.kit.errors import CorralError, Invalid
from corral.kit.log import get_log
from corral.worker.agent.orders.runner import EventPublisher, OrderKey, OrderKind, OrderRun, OrderRunner
from corral.worker.files.model_files import WorkerFiles
from corral.worker.installer.progress import ProgressPublisher, ProgressSubject

log = get_log(__name__)


class StageOrders:
    def __init__(self, runner: OrderRunner, publisher: EventPublisher, files: WorkerFiles, clock: Clock) -> None:
        self._runner = runner
        self._publisher = publisher
        self._files = files
        self._clock = clock

    async def stage(self, order: StageModel, _tokens: Tokens) -> StageReply:
        if not order.op_id:
            raise Invalid("an order to stage files needs an op_id")
        if not order.accept:
            result = await self._runner.run_detached(self._carry_out(order))
            return StageReply(success=result.success, error=result.error)

        async def run(_run: OrderRun) -> StageResult:
            return await self._carry_out(order)

        key = OrderKey(OrderKind.STAGE_MODEL, order.op_id, order.attempt, order.model)
        cancelled = partial(_result, order, error="cancelled", cancelled=True)
        self._runner.accept(key, run, cancelled=cancelled)
        return StageReply(success=True, accepted=True)

    async def cancel(self, order: CancelStage, _tokens: Tokens) -> DoneReply:
        running = self._runner.cancel(order.op_id, order.model, kind=OrderKind.STAGE_MODEL)
        return DoneReply(success=running, error="" if running else "no such order is running")

    async def list_files(self, request: ListFiles, _tokens: Tokens) -> FilesOnNode:
        try:
            return await self._files.measure(request.files)
        except CorralError as error:
            return FilesOnNode(error=error.message)

    async def collect(self, request: CollectFiles, _tokens: Tokens) -> CollectedFiles:
        try:
            return CollectedFiles(removed=await self._files.collect(request.keep, dry_run=request.dry_run))
        except CorralError as error:
            return CollectedFiles(error=error.message)

    async def _carry_out(self, order: StageModel) -> StageResult:
        try:
            await self._stage(order)
        except CorralError as error:
            log.warning("files not staged", model=order.model, op=order.op_id, error=error.message)
            return _result(order, error=error.message, final=isinstance(error, Invalid))
        except Exception as error:
            log.exception("files not staged", model=order.model, op=order.op_id)
            return _result(order, error=f"the worker failed: {error!r}")
        return _result(order, success=True)

    async def _stage(self, order: StageModel) -> None:
        files = order.files
        if order.file_list:
            files = await self._files.read_list(order.file_list, order.sources, order.source_token)
        name = ProgressSubject(order.op_id, self._publisher.node_id, order.model, order.attempt)

        async def publish(event: InstallProgress) -> None:
            await self._publisher.publish(STAGE_PROGRESS, _by_bytes(event), op=order.op_id)

        # The same attempt may be sent again after a restart: numbers start at the clock, as those of installs do.
        seq = int(self._clock.now().timestamp() * 1000)
        async with ProgressPublisher(name, publish, self._clock, after_seq=seq) as progress:
            on_progress: OnProgress = progress.tell
            await self._files.ensure(files, order.sources, order.source_token, on_progress)


def _by_bytes(event: InstallProgress) -> InstallProgress:
    """An install unpacks and starts after its download; staging is the download, so its bytes are the percentage."""
    if not event.total_bytes:
        return event
    return msgspec.structs.replace(event, percentage=min(99.0, 100.0 * event.current_bytes / event.total_bytes))


def _result(
    order: StageModel, *, success: bool = False, error: str = "", final: bool = False, cancelled: bool = False
) -> StageResult:
    return StageResult(
        op_id=order.op_id,
        attempt=order.attempt,
        success=success,
        model=order.model,
        error=error,
        final=final,
        cancelled=cancelled,
    )
