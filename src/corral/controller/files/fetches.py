"""Runs the operations that fetch model files, for users and for loads that wait for files.

The controller that loads models needs the files, so it fetches them: fetches have no lease of their own. A fetch is
stored as a row (`operations/file_operations.py`); when a controller dies, the next leader continues from what is on
its disk. Progress is published like a node's, under the node `controller`, so all controllers show it.

A load that misses files opens such an operation, or joins the active one, and waits for it. After a user has cancelled
it, loads fail until the files are requested again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from corral.blobs.progress import OnProgress, Progress, ignore_progress
from corral.blobs.sources.context import unwrapped_task_group
from corral.bus.api import Bus
from corral.contract.messages.backends import INSTALL_PROGRESS, InstallProgress, Phase
from corral.contract.messages.replicas import ReplicaFile
from corral.contract.models import Definition, read_definition
from corral.controller.files.model_files import ModelFiles
from corral.controller.models.views import definition_of
from corral.controller.operations.file_operations import (
    COUNTER,
    KIND,
    MODEL_GONE,
    begun,
    failed,
    fetched,
    find_taken_back,
    is_due,
    open_fetch,
    read_row,
)
from corral.controller.operations.progress import ProgressCollector, write_rows
from corral.controller.operations.state import settle
from corral.controller.runtime.change_feed import RULES, ChangeFeed
from corral.controller.runtime.leadership import Leadership
from corral.controller.settings.backends import BackendSettings
from corral.kit.clock import Clock
from corral.kit.errors import CorralError, Failed, NotFound
from corral.kit.humanize import format_bytes
from corral.kit.log import get_log
from corral.kit.tasks import KeyedTasks, Wake, run_every
from corral.store.engine.transactions import Store
from corral.store.records import CONTROLLER, OperationNodeStatus
from corral.store.tables import models, operation_nodes, operations, revisions

log = get_log(__name__)


@dataclass(frozen=True)
class _Attempt:
    operation_id: str
    number: int
    definition: Definition
    revision: str  # of the model whose files these are


@dataclass(eq=False)
class _Waiter:
    """A load that waits for an operation."""

    operation_id: str
    on_progress: OnProgress
    done: asyncio.Future[None]


class Fetches:
    name = "model fetches"

    def __init__(
        self,
        store: Store,
        bus: Bus,
        files: ModelFiles,
        progress: ProgressCollector,
        leadership: Leadership,
        feed: ChangeFeed,
        clock: Clock,
        settings: BackendSettings,
        *,
        lease: str,
        interval_s: float = 2.0,
    ) -> None:
        """`lease`: of the controller that loads models."""
        self._store = store
        self._bus = bus
        self._files = files
        self._progress = progress
        self._leadership = leadership
        self._feed = feed
        self._clock = clock
        self._lease = lease
        self._settings = settings
        self._interval_s = interval_s
        self._tasks: KeyedTasks[str] = KeyedTasks()
        self._revisions: dict[str, str] = {}  # by active operation: of its model
        self._urgent: set[str] = set()  # a load waits: the next attempt is due now
        self._waiting: list[_Waiter] = []
        self._wake = Wake()
        self.find = files.find
        self.sources_for = files.sources_for

    async def run(self) -> None:
        for counter in (COUNTER, "models"):
            self._feed.on(counter, self._wake.set)
        async with self._tasks:
            await run_every(self.name, self._interval_s, self.run_once, clock=self._clock, wake=self._wake)

    async def request(self, model_id: str, *, by: str = "") -> str:
        """The operation that fetches the model's files; empty when there is nothing to fetch."""
        async with self._store.read() as tx:
            model = await models.find(tx, model_id)
        if model is None:
            raise NotFound(f"there is no model {model_id}")
        definition = read_definition(model.definition)
        if not await self._files.needs_files(definition):
            return ""
        if self._leads() and await self._files.are_here(definition):
            return ""
        async with self._store.write() as tx:
            await revisions.hold(tx, RULES)
            operation = await open_fetch(tx, await models.get(tx, model_id), by)
        self._notify(operation.id)
        return operation.id

    async def ensure(
        self, definition: Definition, on_progress: OnProgress = ignore_progress
    ) -> tuple[ReplicaFile, ...]:
        """Like `ModelFiles.ensure`, with an operation that shows what is fetched."""
        if not await self._files.are_here(definition):
            await self._wait_for(definition, on_progress)
        return await self._files.ensure(definition, on_progress)

    async def _wait_for(self, definition: Definition, on_progress: OnProgress) -> None:
        async with self._store.write() as tx:
            await revisions.hold(tx, RULES)
            model = await models.find(tx, definition.name)
            if model is None or model.revision != definition.revision:
                return  # operations are for the present revision; files of another one are fetched without
            if (cancelled := await find_taken_back(tx, model)) is not None:
                raise _cancelled_error(cancelled.id)
            operation = await open_fetch(tx, model)
        waiter = _Waiter(operation.id, on_progress, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self._urgent.add(operation.id)
        self._notify(operation.id)
        self._wake.set()
        try:
            await waiter.done
        finally:
            self._waiting.remove(waiter)

    async def run_once(self) -> None:
        """Start the fetches that are requested, and cancel all others."""
        waiting = list(self._waiting)  # before the store is read: their operations were stored before
        if not self._leads():
            for operation_id in self._tasks.running():
                self._tasks.cancel(operation_id)
            return
        async with self._store.read() as tx:
            now = await tx.now()
            opened = await operations.list_open(tx, kind=KIND)
            rows = await operation_nodes.list_for(tx, [operation.id for operation in opened])
            names = [operation.backend for operation in opened]
            present = {model.id: model.revision for model in await models.list_(tx, names)} if names else {}
        wanted = {operation.id: present.get(operation.backend, "") for operation in opened}
        for operation_id in self._tasks.running():
            if wanted.get(operation_id) != self._revisions.get(operation_id):  # cancelled, or edited
                self._tasks.cancel(operation_id)
        self._urgent &= wanted.keys()
        for operation in opened:
            known = rows.get(operation.id)
            due = operation.id in self._urgent or (known and is_due(known[0], wanted[operation.id], now))
            if due and operation.id not in self._tasks.running():
                self._urgent.discard(operation.id)
                self._revisions[operation.id] = wanted[operation.id]
                self._tasks.start(
                    operation.id, partial(self._run_operation, operation.id), name=f"fetch {operation.id}"
                )
        await self._resolve_waiters([each for each in waiting if each.operation_id not in wanted])

    async def _resolve_waiters(self, waiters: Sequence[_Waiter]) -> None:
        """Resolve waiters whose operations have ended, here or on another controller."""
        for waiter in waiters:
            async with self._store.read() as tx:
                operation = await operations.find(tx, waiter.operation_id)
            if waiter.done.done():
                continue
            if operation is not None and operation.outcome == "completed":
                waiter.done.set_result(None)
            else:
                waiter.done.set_exception(_cancelled_error(waiter.operation_id))

    async def _run_operation(self, operation_id: str) -> None:
        try:
            attempt = await self._begin(operation_id)
            if attempt is not None:
                await self._end(attempt, await self._try(attempt))
        except CorralError as error:  # of the store: a later pass continues with what is on the disk by then
            log.warning("fetch postponed", operation=operation_id, error=error.message)
        except Exception:
            log.exception("fetch postponed", operation=operation_id)
        finally:
            self._revisions.pop(operation_id, None)

    async def _begin(self, operation_id: str) -> _Attempt | None:
        """None when there is nothing to do."""
        async with self._store.write() as tx:
            await revisions.hold(tx, RULES)
            await self._leadership.require(tx, self._lease)
            operation = await operations.get(tx, operation_id)
            row = await read_row(tx, operation_id)
            if operation.finished_at is not None or row is None:
                return None
            model = await models.find(tx, operation.backend)
            row = (
                settle(row, OperationNodeStatus.WITHDRAWN, MODEL_GONE) if model is None else begun(row, model.revision)
            )
            await write_rows(tx, operation, [row])
        self._notify(operation_id)
        if model is None:
            return None
        self._revisions[operation_id] = model.revision
        # A document that is no valid definition has no files.
        definition = definition_of(model) or Definition(name=model.id, whole=model.definition)
        return _Attempt(operation_id, row.attempt, definition, model.revision)

    async def _try(self, attempt: _Attempt) -> int | CorralError:
        """The number of bytes, or the error."""
        try:
            files = await self._fetch(attempt)
        except CorralError as error:
            log.warning("files of a model could not be fetched", model=attempt.definition.name, error=error.message)
            return error
        except Exception:
            log.exception("files of a model could not be fetched", model=attempt.definition.name)
            return Failed("an internal error; see the controller's log")
        return sum(file.size_bytes for file in files)

    async def _fetch(self, attempt: _Attempt) -> tuple[ReplicaFile, ...]:
        latest = Progress(Phase.RESOLVING)

        def on_progress(progress: Progress) -> None:
            nonlocal latest
            latest = progress
            for waiter in self._waiting:
                if waiter.operation_id == attempt.operation_id:
                    waiter.on_progress(progress)

        async def publish() -> None:
            published, seq = None, 0
            while True:
                if latest is not published:
                    published, seq = latest, seq + 1
                    await self._publish(_event(attempt, latest, seq))
                await self._clock.sleep(self._settings.progress_interval_s)

        async with unwrapped_task_group() as tasks:
            publisher = tasks.create_task(publish())
            try:
                return await self._files.ensure(attempt.definition, on_progress)
            finally:
                publisher.cancel()

    async def _publish(self, event: InstallProgress) -> None:
        await self._progress.on_progress(event, {"node": CONTROLLER})
        with contextlib.suppress(CorralError):  # without a bus other controllers read the stored row, once a second
            await self._bus.publish(INSTALL_PROGRESS, event, node=CONTROLLER, op=event.op_id)

    async def _end(self, attempt: _Attempt, outcome: int | CorralError) -> None:
        """Waiters get the outcome even if it cannot be stored."""
        try:
            await self._write_end(attempt, outcome)
        finally:
            for waiter in self._waiting:
                if waiter.operation_id == attempt.operation_id and not waiter.done.done():
                    if isinstance(outcome, CorralError):
                        waiter.done.set_exception(outcome)
                    else:
                        waiter.done.set_result(None)

    async def _write_end(self, attempt: _Attempt, outcome: int | CorralError) -> None:
        async with self._store.write() as tx:
            await revisions.hold(tx, RULES)
            await self._leadership.require(tx, self._lease)
            operation = await operations.get(tx, attempt.operation_id)
            stored = await read_row(tx, attempt.operation_id)
            if stored is None or operation.finished_at is not None:
                return
            model = await models.find(tx, operation.backend)
            if model is not None and model.revision != attempt.revision:
                return  # edited meanwhile: the next attempt fetches other files
            (row,) = self._progress.merge(attempt.operation_id, [stored])
            if isinstance(outcome, CorralError):
                settings, now = self._settings, await tx.now()
                row = failed(row, outcome, now, first_s=settings.retry_first_s, cap_s=settings.retry_cap_s)
            else:
                row = fetched(row, outcome)
            await write_rows(tx, operation, [row])
        self._notify(attempt.operation_id)

    def _leads(self) -> bool:
        return self._leadership.epoch(self._lease) != 0

    def _notify(self, operation_id: str) -> None:
        self._feed.notify(COUNTER, operation_id)


def _event(attempt: _Attempt, progress: Progress, seq: int) -> InstallProgress:
    total = progress.total_bytes
    share = progress.current_bytes / total if progress.share is None and total else progress.share or 0.0
    return InstallProgress(
        op_id=attempt.operation_id,
        node_id=CONTROLLER,
        backend=attempt.definition.name,
        file_name=progress.file,
        current=format_bytes(progress.current_bytes) if progress.current_bytes else "",
        total=format_bytes(total) if total else "",
        percentage=min(100.0, 100.0 * share),
        phase=progress.phase,
        attempt=attempt.number,
        seq=seq,
        current_bytes=progress.current_bytes,
        total_bytes=total,
        rate=progress.rate,
    )


def _cancelled_error(operation_id: str) -> Failed:
    short = operation_id[:8]
    return Failed(f"operation {short} was cancelled; `corral ops retry {short}` fetches the files again")
