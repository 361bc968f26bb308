"""The service for operations: list, cancel, retry, withdraw, dismiss, history (docs/explanation/design.md#operations).

Each action is only stored; the reconciler carries it out. So a cancel survives the controller that accepted it.
"""

from __future__ import annotations

from datetime import datetime, timedelta

import msgspec
from msgspec.structs import replace

from corral.contract.admin import OperationHistory, OperationView
from corral.contract.labels import parse_selector
from corral.contract.loads import LoadState
from corral.controller.backends.world import PAUSED
from corral.controller.operations.accept import AcceptedOperation, OperationAcceptor
from corral.controller.operations.corral_operations import open_corral_upgrade
from corral.controller.operations.file_operations import open_fetch, open_stage, scope_of
from corral.controller.operations.progress import ProgressCollector, finish_or_reopen
from corral.controller.operations.requests import OperationKind, OperationRequest
from corral.controller.operations.state import error_text, settle
from corral.controller.operations.uploads import how_to_continue
from corral.controller.operations.views import (
    CORRAL_UPGRADE,
    FETCH,
    FILE_KINDS,
    KINDS_WITHOUT_RULE,
    ROLLOUT,
    STAGE,
    UPLOAD,
    operation_view,
    record_view,
    staging_view,
)
from corral.controller.operations.withdrawal import describe_restored_rules
from corral.controller.runtime.change_feed import RULES, ChangeFeed
from corral.kit.clock import Clock
from corral.kit.errors import Invalid, NotFound
from corral.kit.humanize import did_you_mean
from corral.kit.log import get_log
from corral.store.engine.transactions import Store, Transaction
from corral.store.records import ENDED, IntentStage, OperationNode, OperationNodeStatus, Scope, ScopeKind, UploadRequest
from corral.store.tables import (
    backend_intents,
    backend_rules,
    backend_targets,
    load_jobs,
    models,
    nodes,
    operation_nodes,
    operations,
    releases,
    revisions,
    rollouts,
)
from corral.store.tables.operations import Operation

log = get_log(__name__)

_SHOWN = 200


class Operations:
    def __init__(
        self, store: Store, acceptor: OperationAcceptor, progress: ProgressCollector, feed: ChangeFeed, clock: Clock
    ) -> None:
        self._store = store
        self._acceptor = acceptor
        self._progress = progress
        self._feed = feed
        self._clock = clock
        self.plan = acceptor.plan

    async def accept(self, request: OperationRequest) -> AcceptedOperation:
        return await self._acceptor.accept(request)

    async def scope(self, *, node: str = "", selector: str = "") -> Scope:
        async with self._store.read() as tx:
            return await _find_scope(tx, node=node, selector=selector)

    async def list_views(
        self,
        *,
        everything: bool = False,
        limit: int = _SHOWN,
        after: str = "",
        rows: bool = True,
        loads: bool = False,
        ended_since: datetime | None = None,
    ) -> list[OperationView]:
        """The operations that were not dismissed and have not ended, or ended after `ended_since`, in LocalAI's order.
        With `everything` all of them, the newest first, from the one that follows `after`. Without `rows` only the
        summary of each, which is quick for those that have ended. With `loads` also the loads whose files are on their
        way to a node, as LocalAI lists them, unless an operation moves the files of the model."""
        async with self._store.read() as tx:
            if everything:
                last = await operations.get(tx, after) if after else None
                chosen = await operations.list_(tx, limit=limit, after=last)
            else:
                since = ended_since or await tx.now() + timedelta(days=1)
                chosen = await operations.list_shown(tx, finished_since=since, limit=limit)
            # The only row of an operation about one node contains the name of that node.
            whole = [row for row in chosen if rows or row.finished_at is None or row.scope_kind == ScopeKind.NODE]
            found = {operation.id: own for operation, own in await self._progress.read_rows(tx, whole)}
            counts = await operation_nodes.count_for(tx, [row.id for row in chosen if row.id not in found])
            moved = {row.backend for row in chosen if row.kind in FILE_KINDS and row.finished_at is None}
            jobs = await load_jobs.list_(tx) if loads and not everything else []
            now = await tx.now()
        views = [
            self._progress.view(operation, found[operation.id], with_nodes=rows)
            if operation.id in found
            else operation_view(operation, (), counts=counts.get(operation.id, {}))
            for operation in chosen
        ]
        staged = (job for job in jobs if job.state is LoadState.STAGING and job.node_id and job.model not in moved)
        views += [staging_view(job, now) if rows else replace(staging_view(job, now), nodes=()) for job in staged]
        return views if everything else sorted(views, key=lambda view: (view.progress, view.job_id))

    async def list_running(self, limit: int) -> tuple[list[OperationView], int]:
        """The newest that have neither ended nor been dismissed, without their rows, and how many there are. Rows are
        read of these few alone: fifty operations on a thousand nodes have 50,000."""
        async with self._store.read() as tx:
            running = await operations.list_shown(tx, finished_since=await tx.now() + timedelta(days=1))
            found = await self._progress.read_rows(tx, running[:limit])
        return [self._progress.view(operation, rows, with_nodes=False) for operation, rows in found], len(running)

    async def busy(self) -> dict[str, Operation]:
        """By backend: the newest operation that has not ended."""
        async with self._store.read() as tx:
            opened = await operations.list_open(tx)
        return {
            operation.backend: operation for operation in reversed(opened) if operation.kind not in KINDS_WITHOUT_RULE
        }

    async def view(self, operation_id: str) -> OperationView:
        found = await self.find_view(operation_id)
        if found is None:
            raise NotFound(f"there is no operation {operation_id}")
        return found

    async def find_view(self, operation_id: str) -> OperationView | None:
        async with self._store.read() as tx:
            operation = await operations.find(tx, operation_id)
            rows = await operation_nodes.list_(tx, operation_id) if operation is not None else []
        return self._progress.view(operation, rows) if operation is not None else None

    async def wait_settled(self, operation_id: str, *, timeout_s: float) -> OperationView:
        """Wait until the operation makes no more progress, or the timeout: for LocalAI routes that reply at the end."""
        return await self._feed.read_until(
            ["operations"], lambda: self.view(operation_id), lambda view: view.settled, timeout_s=timeout_s
        )

    async def cancel(self, operation_id: str, *, node: str = "") -> tuple[str, ...]:
        """Withdraw the rule and stop its orders; for one node, take that node out of the rule. Returns sentences about
        the earlier rules that hold again."""
        return await self._withdraw_rule(operation_id, OperationNodeStatus.CANCELLED, "cancelled", node=node)

    async def pause(self, operation_id: str, *, node: str = "") -> tuple[str, ...]:
        """The same, but nodes keep what they have downloaded: a later request continues from there."""
        return await self._withdraw_rule(operation_id, OperationNodeStatus.CANCELLED, PAUSED, node=node)

    async def withdraw(self, operation_id: str) -> tuple[str, ...]:
        """Withdraw the rule; running orders may finish."""
        return await self._withdraw_rule(operation_id, OperationNodeStatus.WITHDRAWN, "the rule was withdrawn")

    async def retry(self, operation_id: str, *, node: str = "", by: str = "") -> AcceptedOperation:
        """Retry the failing nodes now. A cancelled or withdrawn operation is requested again."""
        async with self._store.write() as tx:
            await revisions.hold(tx, RULES)
            intents = await backend_intents.lock_operation(tx, operation_id)
            operation = await operations.get(tx, operation_id)
            withdrawn = operation.cancelled_at is not None or operation.withdrawn_at is not None
            if operation.kind == UPLOAD:
                raise await _cannot_retry(tx, operation)
            if operation.kind == ROLLOUT:
                name = operation.backend
                raise Invalid(f"a trial is not repeated: `corral models edit {name} … --soak 5m` begins another")
            if withdrawn and operation.kind == FETCH:
                request = None
                operation_id = (await open_fetch(tx, await models.get(tx, operation.backend), by)).id
            elif withdrawn and operation.kind == STAGE:
                request = None
                model = await models.get(tx, operation.backend)
                operation_id = (await open_stage(tx, model, scope_of(operation), by)).id
            elif withdrawn and operation.kind == CORRAL_UPGRADE:
                request = None
                release = await releases.get(tx, operation.request.release)
                parallel = operation.request.max_parallel
                settings = operation.request.rollout
                former = await rollouts.find(tx, operation_id)
                again = await open_corral_upgrade(
                    tx,
                    release,
                    scope_of(operation),
                    parallel,
                    by,
                    settings=settings,
                    before=former.nodes if former is not None else None,
                )
                operation_id = again.id
            elif withdrawn:
                request = _request_again(operation, by)
            else:
                request = None
                rows = await self._rows(tx, operation_id, node)
                waiting = [row for row in intents if row.stage in (IntentStage.WAITING, IntentStage.PARKED)]
                # A rule that holds again after a withdrawal can fail on a node whose row ended long ago.
                stuck = {row.node_id for row in waiting if row.failures}
                failing = {
                    row.node_id for row in rows if row.status is OperationNodeStatus.ERROR or row.node_id in stuck
                }
                if not failing:
                    raise Invalid("no node of the operation is failing")
                now = await tx.now()
                due = [row for row in waiting if row.node_id in failing]
                await backend_intents.put(
                    tx, [msgspec.structs.replace(row, stage=IntentStage.WAITING, next_try_at=None) for row in due]
                )
                await _forget_missing(tx, operation)
                await self._write(tx, operation, _waiting_again(rows, failing), now)
        if request is not None:
            return await self.accept(request)
        self._notify(operation_id)
        return AcceptedOperation(operation_id)

    async def dismiss(self, operation_id: str) -> None:
        """Hide the operation; its work goes on. An unknown operation is ignored."""
        async with self._store.write() as tx:
            await revisions.hold(tx, RULES)  # or the reconciler could overwrite the change
            operation = await operations.find(tx, operation_id)
            if operation is None or operation.dismissed:
                return
            rows = await operation_nodes.list_(tx, operation_id)
            outcome = operation.outcome or "failed"
            changed = msgspec.structs.replace(operation, dismissed=True, outcome=outcome, error=error_text(rows))
            await operations.replace(tx, changed)
            await revisions.bump(tx, "operations")
        self._feed.notify("operations", operation_id)

    async def history(self) -> OperationHistory:
        async with self._store.read() as tx:
            return OperationHistory(tuple(record_view(row) for row in await operations.list_history(tx)))

    async def clear_history(self) -> None:
        async with self._store.write() as tx:
            await operations.clear_history(tx)
            await revisions.bump(tx, "operations")
        self._feed.notify("operations")

    async def _withdraw_rule(
        self, operation_id: str, status: OperationNodeStatus, reason: str, *, node: str = ""
    ) -> tuple[str, ...]:
        async with self._store.write() as tx:
            await revisions.hold(tx, RULES)
            operation = await operations.get(tx, operation_id)
            if operation.finished_at is not None:
                raise Invalid(f"the operation has already ended: {operation.outcome}")
            now = await tx.now()
            rows = [row for row in await self._rows(tx, operation_id, node) if row.status not in ENDED]
            if node and not rows:
                raise Invalid(f"nothing is left to do on {node}")
            has_rule = operation.kind not in KINDS_WITHOUT_RULE
            before = await backend_rules.list_live(tx, operation.backend) if has_rule else []
            if node and has_rule:
                await backend_rules.exclude(tx, operation.generation, rows[0].node_id)
            elif not node or operation.kind in (FETCH, ROLLOUT, UPLOAD):
                if has_rule:
                    await backend_rules.withdraw(tx, operation.generation)
                field = "cancelled_at" if status is OperationNodeStatus.CANCELLED else "withdrawn_at"
                operation = msgspec.structs.replace(operation, **{field: now})
                await operations.replace(tx, operation)
            await self._write(tx, operation, [settle(row, status, reason) for row in rows], now)
            notes = await describe_restored_rules(tx, operation, before) if before else ()
        log.info(
            "operation withdrawn", operation=operation_id, how=status.value, node=rows[0].node_name if node else ""
        )
        self._notify(operation_id)
        return notes

    async def _rows(self, tx: Transaction, operation_id: str, node: str) -> list[OperationNode]:
        """The stored rows merged with later progress; of one node if it is named."""
        rows = self._progress.merge(operation_id, await operation_nodes.list_(tx, operation_id))
        if not node:
            return rows
        chosen = [row for row in rows if node in (row.node_id, row.node_name)]
        if not chosen:
            names = [row.node_name for row in rows]
            raise NotFound(f"there is no node {node!r} in this operation{did_you_mean(node, names)}")
        return chosen

    async def _write(self, tx: Transaction, operation: Operation, rows: list[OperationNode], now: datetime) -> None:
        await operation_nodes.put(tx, [replace(row, updated_at=now) for row in rows])
        await finish_or_reopen(tx, [operation], now)
        await revisions.bump(tx, "operations")
        await revisions.bump(tx, RULES)

    def _notify(self, operation_id: str) -> None:
        self._feed.notify("rules", operation_id)
        self._feed.notify("operations", operation_id)


async def _find_scope(tx: Transaction, *, node: str = "", selector: str = "") -> Scope:
    """One node by id or name, nodes by label, or every node."""
    if node and selector:
        raise Invalid("give a node or a selector, not both")
    if selector:
        try:
            terms = parse_selector(selector).terms
        except ValueError as error:
            raise Invalid(str(error)) from error
        if not terms:  # an empty shell variable, perhaps: a request for a few nodes must not reach all
            raise Invalid(f"the selector {selector!r} names no label; leave it out to select every node")
        return Scope(ScopeKind.SELECTOR, selector)
    if not node:
        return Scope(ScopeKind.ALL)
    found = await nodes.find(tx, node) or await nodes.find_by_name(tx, node)
    if found is None:
        names = [outline.name for outline in await nodes.list_outlines(tx)]
        raise NotFound(f"there is no node {node!r}{did_you_mean(node, names)}")
    if found.node_type not in ("", "backend"):
        raise Invalid(f"{found.name} is of type {found.node_type}: it takes no backends")
    return Scope(ScopeKind.NODE, found.id)


async def _cannot_retry(tx: Transaction, operation: Operation) -> Invalid:
    rows = await operation_nodes.list_(tx, operation.id)
    if operation.outcome == "completed":
        return Invalid("everything was uploaded")
    step = how_to_continue(operation.request.upload or UploadRequest(), sum(row.current_bytes for row in rows))
    return Invalid(f"only the sender has the file, so the controller cannot retry alone: {step}")


def _request_again(operation: Operation, by: str) -> OperationRequest:
    request = operation.request
    return OperationRequest(
        kind=OperationKind(operation.kind),
        backend_request=request.backend,
        scope=Scope(ScopeKind(operation.scope_kind), operation.scope_value),
        force=request.force,
        max_parallel=request.max_parallel,
        by=by,
        rollout=request.rollout,
    )


async def _forget_missing(tx: Transaction, operation: Operation) -> None:
    """Forget that there was no build: there may be one now."""
    rule = await backend_rules.find_for_operation(tx, operation.id)
    if rule is not None and rule.target:
        await backend_targets.forget_missing(tx, rule.target)


def _waiting_again(rows: list[OperationNode], failing: set[str]) -> list[OperationNode]:
    return [
        replace(row, status=OperationNodeStatus.QUEUED, reason="will be retried now", next_try_at=None)
        for row in rows
        if row.node_id in failing and row.status not in ENDED
    ]
