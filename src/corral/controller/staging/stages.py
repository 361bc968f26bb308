"""Runs the operations that stage model files on nodes before a load.

The controller that loads models does this too, under the same lease. Each operation needs the files on the controller
first: a linked fetch operation brings them. Then every node gets an order of its own, at the same time, so that nodes
can feed each other. A worker carries the same order out once, so an order without a known outcome is simply sent again:
after a lost reply, a restarted worker or a change of the leader.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, Protocol

from msgspec.structs import replace

from corral.blobs.progress import OnProgress, ignore_progress
from corral.bus.api import Bus, Tokens
from corral.contract.messages.replicas import ReplicaFile
from corral.contract.messages.staging import STAGE_RESULT, StageModel, StageResult
from corral.contract.models import Definition, read_definition
from corral.controller.models.views import definition_of
from corral.controller.operations.file_operations import (
    COUNTER,
    MODEL_GONE,
    begun,
    failed,
    fetched,
    is_due,
    open_stage,
    version_of,
)
from corral.controller.operations.node_tasks import NodeTasks
from corral.controller.operations.progress import NODE_GONE, ProgressCollector
from corral.controller.operations.state import settle
from corral.controller.operations.views import STAGE
from corral.controller.orders.observations import OrderAccepted, OrderEnded, OrderNotSent, OrderUnconfirmed
from corral.controller.runtime.change_feed import RULES, ChangeFeed
from corral.controller.runtime.leadership import Leadership
from corral.controller.settings.backends import BackendSettings
from corral.controller.staging.calls import NO_WORKER, StageCalls
from corral.kit.clock import Clock
from corral.kit.errors import Conflict, CorralError, Failed, Invalid, NotFound, Unreachable
from corral.kit.log import get_log
from corral.kit.tasks import Wake, run_every
from corral.store.engine.transactions import Store, Transaction
from corral.store.records import ENDED, OperationNode, OperationNodeStatus, Scope
from corral.store.tables import models, node_files, revisions
from corral.store.tables.nodes import NodeOutline
from corral.store.tables.operations import Operation

log = get_log(__name__)

PREPARING = "waits for the files on the controller"
NO_FILES = "the model has no files to stage: its backend fetches them by itself"


class StagedFiles(Protocol):
    """The part of `controller/files` that staging needs."""

    async def ensure(
        self, definition: Definition, on_progress: OnProgress = ignore_progress
    ) -> tuple[ReplicaFile, ...]: ...
    def sources_for(self, node_id: str, files: Sequence[ReplicaFile] = ()) -> tuple[tuple[str, ...], str]: ...


@dataclass(frozen=True)
class _Prepared:
    revision: str
    definition: Definition
    files: tuple[ReplicaFile, ...] | None = None  # None: they are being fetched


class Stages:
    name = "model staging"

    def __init__(
        self,
        store: Store,
        bus: Bus,
        files: StagedFiles,
        calls: StageCalls,
        progress: ProgressCollector,
        leadership: Leadership,
        feed: ChangeFeed,
        clock: Clock,
        settings: BackendSettings,
        *,
        lease: str,
        interval_s: float = 2.0,
        resend_s: float = 15.0,
    ) -> None:
        """`lease`: of the controller that loads models. `resend_s`: when an order without a known outcome is sent
        again."""
        self._store = store
        self._bus = bus
        self._files = files
        self._calls = calls
        self._progress = progress
        self._feed = feed
        self._clock = clock
        self._settings = settings
        self._interval_s = interval_s
        self._resend_s = resend_s
        self._tasks = NodeTasks(
            store, leadership, feed, kind=STAGE, lease=lease, cancel=self._cancel, merge=progress.merge
        )
        self._prepared: dict[str, _Prepared] = {}
        self._results: dict[tuple[str, str, int], asyncio.Future[StageResult]] = {}
        self._wake = Wake()

    async def run(self) -> None:
        for counter in (COUNTER, "models", "nodes"):
            self._feed.on(counter, self._wake.set)
        await self._bus.subscribe(STAGE_RESULT, self.on_result)
        async with self._tasks:
            await run_every(self.name, self._interval_s, self.run_once, clock=self._clock, wake=self._wake)

    async def request(self, model_id: str, scope: Scope, *, by: str = "") -> str:
        """The id of the operation that stages the model's files on the nodes of the scope. Raises NotFound, and Invalid
        for a model without files."""
        async with self._store.write() as tx:
            await revisions.hold(tx, RULES)
            model = await models.find(tx, model_id)
            if model is None:
                raise NotFound(f"there is no model {model_id}")
            read_definition(model.definition)  # raises Invalid for one that cannot be used
            operation = await open_stage(tx, model, scope, by)
        log.info("staging requested", model=model_id, operation=operation.id, scope=scope.kind, by=by)
        self._notify(operation.id)
        return operation.id

    async def on_result(self, result: StageResult, tokens: Tokens) -> None:
        # Only this node may publish on the subject; a node id inside the message would prove nothing.
        waiting = self._results.get((tokens["node"], result.op_id, result.attempt))
        if waiting is not None and not waiting.done():
            waiting.set_result(result)

    async def run_once(self) -> None:
        """Start the transfers that are requested and can run now, and cancel all others."""
        opened = await self._tasks.read_open()
        self._prepared = opened.keep_open(self._prepared)
        if not opened.operations:
            return
        async with self._store.read() as tx:
            stored = {model.id: model for model in await models.list_(tx, [each.backend for each in opened.operations])}
        for operation in opened.operations:
            model = stored.get(operation.backend)
            definition = definition_of(model) if model is not None else None
            if model is None or definition is None:
                await self._tasks.change_rows(
                    operation.id, lambda row: settle(row, OperationNodeStatus.WITHDRAWN, MODEL_GONE)
                )
                continue
            own = [row for row in opened.rows.get(operation.id, ()) if row.status not in ENDED]
            await self._advance(operation, definition, model.revision, own, opened.outlines, opened.now)

    def _cancel(self, operation_id: str, node_id: str) -> Coroutine[Any, Any, None] | None:
        known = self._prepared.get(operation_id)
        return self._calls.cancel(node_id, operation_id, known.definition.name) if known is not None else None

    async def _advance(
        self,
        operation: Operation,
        definition: Definition,
        revision: str,
        rows: Sequence[OperationNode],
        outlines: Mapping[str, NodeOutline],
        now: datetime,
    ) -> None:
        known = self._prepared.get(operation.id)
        if known is None or known.revision != revision:  # new here, or edited
            self._tasks.cancel_operation(operation.id)
            known = self._prepared[operation.id] = _Prepared(revision, definition)
        ready, absent = [], []
        for row in rows:
            outline = outlines.get(row.node_id)
            if outline is not None and self._tasks.is_running(operation.id, row.node_id):
                continue
            if outline is None or _why_waiting(outline):
                absent.append((row, outline))
            elif is_due(row, revision, now):
                ready.append(row)
        if absent:
            reasons = {row.node_id: _why_waiting(outline) if outline else "" for row, outline in absent}
            await self._tasks.change_rows(operation.id, partial(_wait_for_node, reasons=reasons), set(reasons))
        if not ready:
            return
        if known.files is None:
            work = partial(self._prepare, operation, known)
            self._tasks.start(operation.id, "", work, name=f"prepare {operation.backend}")
            return
        for row in ready:
            work = partial(self._run, operation, row, known, now)
            self._tasks.start(operation.id, row.node_id, work, name=f"stage {operation.backend} on {row.node_name}")

    async def _prepare(self, operation: Operation, known: _Prepared) -> None:
        """Have the files on the controller; a linked operation shows that."""

        def preparing(row: OperationNode) -> OperationNode:
            at_rest = (OperationNodeStatus.QUEUED, OperationNodeStatus.ERROR)
            return replace(row, status=OperationNodeStatus.QUEUED, reason=PREPARING) if row.status in at_rest else row

        try:
            await self._tasks.change_rows(operation.id, preparing)
            files = await self._files.ensure(known.definition)
            if not files:
                raise Invalid(NO_FILES)
            self._prepared[operation.id] = _Prepared(known.revision, known.definition, files)
        except CorralError as error:
            log.warning("files cannot be staged", model=operation.backend, error=error.message)
            await self._write_failure(operation, error)
        except Exception:
            log.exception("files cannot be staged", model=operation.backend)
            await self._write_failure(operation, Failed("an internal error; see the controller's log"))
        self._wake.set()

    async def _write_failure(self, operation: Operation, error: CorralError, node_id: str = "") -> None:
        try:
            async with self._store.read() as tx:
                now = await tx.now()
            settings = self._settings

            def fail(row: OperationNode) -> OperationNode:
                return failed(row, error, now, first_s=settings.retry_first_s, cap_s=settings.retry_cap_s)

            await self._tasks.change_rows(operation.id, fail, {node_id} if node_id else None)
        except CorralError as problem:  # of the store: a later pass does it again
            log.warning("staging postponed", operation=operation.id, error=problem.message)

    async def _run(self, operation: Operation, row: OperationNode, known: _Prepared, now: datetime) -> None:
        try:
            await self._stage(operation, row, known, now)
        except CorralError as error:
            await self._write_failure(operation, error, row.node_id)
        except Exception:
            log.exception("staging failed", operation=operation.id, node=row.node_name)
            await self._write_failure(operation, Failed("an internal error; see the controller's log"), row.node_id)
        self._wake.set()

    async def _begin(self, operation: Operation, node_id: str, revision: str, now: datetime) -> OperationNode | None:
        """The row of the attempt: of a new one, or of one that an earlier leader began. None: it is not due any more,
        for the pass read it before another attempt had ended."""
        found: list[OperationNode] = []

        def begin(row: OperationNode) -> OperationNode:
            if not is_due(row, revision, now):
                return row
            found.append(row if _continues(row, revision) else begun(row, revision))
            return found[0]

        await self._tasks.change_rows(operation.id, begin, {node_id})
        return found[0] if found else None

    async def _stage(self, operation: Operation, row: OperationNode, known: _Prepared, now: datetime) -> None:
        files = known.files or ()
        begun_row = await self._begin(operation, row.node_id, known.revision, now)
        if begun_row is None:
            return  # cancelled, or tried meanwhile
        row = begun_row
        result = await self._outcome(operation, row, files)
        if not result.success:
            why = result.error or "the node gave no reason"
            if bad := self._progress.bad_sources_text(operation.id, row.node_id):
                why = f"{why}; {bad}"
            raise Invalid(why) if result.final else Failed(why)
        digests = [(row.node_id, file.digest) for file in files if file.digest]
        with contextlib.suppress(Conflict):  # the node was deleted
            async with self._store.write() as tx:
                await node_files.seen(tx, digests)
        note = self._progress.sources_text(operation.id, row.node_id)
        size_bytes = sum({file.digest or file.path: file.size_bytes for file in files}.values())

        def succeed(each: OperationNode) -> OperationNode:
            return replace(fetched(each, size_bytes), reason=note)

        async def is_current(tx: Transaction) -> bool:
            model = await models.find(tx, operation.backend)
            return model is not None and model.revision == known.revision

        await self._tasks.change_rows(operation.id, succeed, {row.node_id}, only_if=is_current)
        log.info("files staged", model=operation.backend, node=row.node_name, operation=operation.id)

    async def _outcome(self, operation: Operation, row: OperationNode, files: tuple[ReplicaFile, ...]) -> StageResult:
        """Send the order until its outcome is known. Raises Unreachable when no worker listens."""
        key = (row.node_id, operation.id, row.attempt)
        waiting: asyncio.Future[StageResult] = asyncio.get_running_loop().create_future()
        self._results[key] = waiting
        try:
            while True:
                sources, token = self._files.sources_for(row.node_id, files)
                order = StageModel(
                    op_id=operation.id,
                    attempt=row.attempt,
                    model=operation.backend,
                    files=files,
                    sources=sources,
                    source_token=token,
                    accept=True,
                )
                match await self._calls.stage(row.node_id, order):
                    case OrderEnded() as ended:
                        return StageResult(operation.id, row.attempt, ended.success, operation.backend, ended.error)
                    case OrderAccepted() | OrderUnconfirmed() | OrderNotSent():
                        pass
                    case _:
                        raise Unreachable(NO_WORKER)
                done, _ = await asyncio.wait([waiting], timeout=self._resend_s)
                if done:
                    return waiting.result()
        finally:
            del self._results[key]

    def _notify(self, operation_id: str) -> None:
        self._feed.notify(COUNTER, operation_id)


def _continues(row: OperationNode, revision: str) -> bool:
    """Whether an order of the row may still run on the node, from an earlier leader."""
    return (
        row.status is OperationNodeStatus.DOWNLOADING
        and row.phase != ""
        and row.attempt > 0
        and row.version == version_of(revision)
    )


def _why_waiting(outline: NodeOutline) -> str:
    if outline.status not in ("healthy", "draining"):
        return f"node {outline.status}, will be tried when it is healthy"
    return "the node cannot reach the bus, will be tried when it can" if outline.bus_down else ""


def _wait_for_node(row: OperationNode, *, reasons: Mapping[str, str]) -> OperationNode:
    reason = reasons[row.node_id]
    if not reason:
        return settle(row, OperationNodeStatus.WITHDRAWN, NODE_GONE)
    return replace(row, status=OperationNodeStatus.QUEUED, reason=reason, rate=0.0, next_try_at=None, waits=True)
