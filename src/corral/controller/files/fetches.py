"""Carries out fetches of models' files: the operations people watch, and the same for loads that wait for files.

The controller that loads models is the one that needs the files, so it is the one that fetches: there is no lease of
its own. What is asked is a row (`operations/fetches.py`); a controller that dies leaves it to the next, which goes on
from what is on its disk. Progress travels as a node's would, under the node `controller`, so all controllers show it.

A load that finds files missing opens such an operation, or joins the one under way, and waits for it. When a person
has cancelled it, loads are told so, until somebody asks for the files again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from corral.blobs.progress import OnProgress, Progress, ignore_progress
from corral.blobs.sources.context import unwrapped_task_group
from corral.bus.api import Bus, Tokens
from corral.contract.messages.backends import INSTALL_PROGRESS, InstallProgress, Phase
from corral.contract.messages.replicas import ReplicaFile
from corral.contract.models import Definition, read_definition
from corral.controller.models.views import definition_of
from corral.controller.operations.fetches import (
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
    write_row,
)
from corral.controller.operations.state import settle
from corral.controller.runtime.change_feed import RULES, ChangeFeed
from corral.controller.runtime.leadership import Leadership
from corral.kit.clock import Clock
from corral.kit.errors import CorralError, Failed, NotFound
from corral.kit.humanize import format_bytes
from corral.kit.log import get_log
from corral.kit.tasks import KeyedTasks, Wake, run_every
from corral.store.engine.transactions import Store
from corral.store.records import CONTROLLER, OperationNode, OperationNodeStatus
from corral.store.tables import models, operation_nodes, operations, revisions

log = get_log(__name__)


class Files(Protocol):
    """What we need of `model_files.py`."""

    async def ensure(self, definition: Definition, tell: OnProgress) -> tuple[ReplicaFile, ...]: ...
    async def needs_files(self, definition: Definition) -> bool: ...
    async def are_here(self, definition: Definition) -> bool: ...
    def find(self, digest: str) -> Path | None: ...
    def sources_for(self, node_id: str, files: Sequence[ReplicaFile] = ()) -> tuple[tuple[str, ...], str]: ...


class ProgressSink(Protocol):
    """What all controllers know of progress."""

    async def on_progress(self, event: InstallProgress, tokens: Tokens) -> None: ...
    def merge(self, operation_id: str, rows: Sequence[OperationNode]) -> list[OperationNode]: ...


@dataclass(frozen=True)
class FetchPace:
    look_s: float = 2.0
    tell_s: float = 0.25
    first_retry_s: float = 30.0
    last_retry_s: float = 900.0


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
    tell: OnProgress
    over: asyncio.Future[None]


class Fetches:
    name = "model fetches"

    def __init__(
        self,
        store: Store,
        bus: Bus,
        files: Files,
        progress: ProgressSink,
        leadership: Leadership,
        feed: ChangeFeed,
        clock: Clock,
        *,
        lease: str,
        pace: FetchPace | None = None,
    ) -> None:
        """`lease`: of whoever loads models."""
        self._store = store
        self._bus = bus
        self._files = files
        self._progress = progress
        self._leadership = leadership
        self._feed = feed
        self._clock = clock
        self._lease = lease
        self._pace = pace or FetchPace()
        self._tasks: KeyedTasks[str] = KeyedTasks()
        self._at: dict[str, str] = {}  # by operation under way: the revision its files are of
        self._urgent: set[str] = set()  # somebody waits: whatever the next try was to be, it is now
        self._waiting: list[_Waiter] = []
        self._wake = Wake()
        self.find = files.find
        self.sources_for = files.sources_for

    async def run(self) -> None:
        for counter in (COUNTER, "models"):
            self._feed.on(counter, self._wake.set)
        async with self._tasks:
            await run_every(self.name, self._pace.look_s, self.look, clock=self._clock, wake=self._wake)

    # For people

    async def ask(self, model_id: str, *, by: str = "") -> str:
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
        self._told(operation.id)
        return operation.id

    # For whoever loads models

    async def ensure(self, definition: Definition, tell: OnProgress = ignore_progress) -> tuple[ReplicaFile, ...]:
        """As `ModelFiles.ensure`; what has to be fetched is an operation meanwhile."""
        if not await self._files.are_here(definition):
            await self._wait_for(definition, tell)
        return await self._files.ensure(definition, tell)

    async def _wait_for(self, definition: Definition, tell: OnProgress) -> None:
        async with self._store.write() as tx:
            await revisions.hold(tx, RULES)
            model = await models.find(tx, definition.name)
            if model is None or model.revision != definition.revision:
                return  # an operation is about the model as it is now; this is fetched for whoever needs it
            if (cancelled := await find_taken_back(tx, model)) is not None:
                raise _taken_back(cancelled.id)
            operation = await open_fetch(tx, model)
        waiter = _Waiter(operation.id, tell, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self._urgent.add(operation.id)
        self._told(operation.id)
        self._wake.set()
        try:
            await waiter.over
        finally:
            self._waiting.remove(waiter)

    # The loop

    async def look(self) -> None:
        """Once: what is asked for is under way, and nothing else is."""
        waiting = list(self._waiting)  # before the store is read: what they wait for was there before
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
            if wanted.get(operation_id) != self._at.get(operation_id):  # cancelled, or of another revision by now
                self._tasks.cancel(operation_id)
        self._urgent &= wanted.keys()
        for operation in opened:
            known = rows.get(operation.id)
            due = operation.id in self._urgent or (known and is_due(known[0], wanted[operation.id], now))
            if due and operation.id not in self._tasks.running():
                self._urgent.discard(operation.id)
                self._at[operation.id] = wanted[operation.id]
                self._tasks.start(operation.id, partial(self._carry_out, operation.id), name=f"fetch {operation.id}")
        await self._answer_late([each for each in waiting if each.operation_id not in wanted])

    async def _answer_late(self, waiters: Sequence[_Waiter]) -> None:
        """Of operations that have ended, here or elsewhere, before they could be told."""
        for waiter in waiters:
            async with self._store.read() as tx:
                operation = await operations.find(tx, waiter.operation_id)
            if waiter.over.done():
                continue
            if operation is not None and operation.outcome == "completed":
                waiter.over.set_result(None)
            else:
                waiter.over.set_exception(_taken_back(waiter.operation_id))

    async def _carry_out(self, operation_id: str) -> None:
        try:
            attempt = await self._begin(operation_id)
            if attempt is not None:
                await self._end(attempt, await self._try(attempt))
        except CorralError as error:  # of the store: a later look begins again, with what is on the disk by then
            log.warning("a fetch goes on later", operation=operation_id, error=error.message)
        except Exception:
            log.exception("a fetch goes on later", operation=operation_id)
        finally:
            self._at.pop(operation_id, None)

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
            await write_row(tx, operation, row)
        self._told(operation_id)
        if model is None:
            return None
        self._at[operation_id] = model.revision
        # What cannot be read as a definition has no files; whoever stored it knows of no such word.
        definition = definition_of(model) or Definition(name=model.id, whole=model.definition)
        return _Attempt(operation_id, row.attempt, definition, model.revision)

    async def _try(self, attempt: _Attempt) -> int | CorralError:
        """How many bytes there are now, or what kept them from coming."""
        try:
            files = await self._fetch(attempt)
        except CorralError as error:
            log.warning("files of a model could not be fetched", model=attempt.definition.name, error=error.message)
            return error
        except Exception:
            log.exception("files of a model could not be fetched", model=attempt.definition.name)
            return Failed("something went wrong; the controller's log says what")
        return sum(file.size_bytes for file in files)

    async def _fetch(self, attempt: _Attempt) -> tuple[ReplicaFile, ...]:
        latest = Progress(Phase.RESOLVING)

        def tell(progress: Progress) -> None:
            nonlocal latest
            latest = progress
            for waiter in self._waiting:
                if waiter.operation_id == attempt.operation_id:
                    waiter.tell(progress)

        async def speak() -> None:
            told, seq = None, 0
            while True:
                if latest is not told:
                    told, seq = latest, seq + 1
                    await self._say(_event(attempt, latest, seq))
                await self._clock.sleep(self._pace.tell_s)

        async with unwrapped_task_group() as tasks:
            speaking = tasks.create_task(speak())
            try:
                return await self._files.ensure(attempt.definition, tell)
            finally:
                speaking.cancel()

    async def _say(self, event: InstallProgress) -> None:
        await self._progress.on_progress(event, {"node": CONTROLLER})
        with contextlib.suppress(CorralError):  # without a bus others see what is written down, once a second
            await self._bus.publish(INSTALL_PROGRESS, event, node=CONTROLLER, op=event.op_id)

    async def _end(self, attempt: _Attempt, came: int | CorralError) -> None:
        """Whoever waits is told even if it cannot be written down."""
        try:
            await self._write_end(attempt, came)
        finally:
            for waiter in self._waiting:
                if waiter.operation_id == attempt.operation_id and not waiter.over.done():
                    if isinstance(came, CorralError):
                        waiter.over.set_exception(came)
                    else:
                        waiter.over.set_result(None)

    async def _write_end(self, attempt: _Attempt, came: int | CorralError) -> None:
        async with self._store.write() as tx:
            await revisions.hold(tx, RULES)
            await self._leadership.require(tx, self._lease)
            operation = await operations.get(tx, attempt.operation_id)
            stored = await read_row(tx, attempt.operation_id)
            if stored is None or operation.finished_at is not None:
                return
            model = await models.find(tx, operation.backend)
            if model is not None and model.revision != attempt.revision:
                return  # edited meanwhile: it goes on with other files
            (row,) = self._progress.merge(attempt.operation_id, [stored])
            if isinstance(came, CorralError):
                pace, now = self._pace, await tx.now()
                row = failed(row, came, now, first_s=pace.first_retry_s, cap_s=pace.last_retry_s)
            else:
                row = fetched(row, came)
            await write_row(tx, operation, row)
        self._told(attempt.operation_id)

    def _leads(self) -> bool:
        return self._leadership.epoch(self._lease) != 0

    def _told(self, operation_id: str) -> None:
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


def _taken_back(operation_id: str) -> Failed:
    short = operation_id[:8]
    return Failed(f"operation {short} was cancelled; `corral ops retry {short}` asks for them again")
