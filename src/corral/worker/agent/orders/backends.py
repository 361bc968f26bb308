"""Handlers of the orders for backends, one for each subject (docs/reference/wire/backends.md).

An order with `accept` and an operation id is answered at once, and its result is reported later. An order without them
is answered when the work is done: only LocalAI controllers send such orders, and `worker/localai` carries them out. The
work itself is `backend_changes.py`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol

import msgspec

from corral.blobs.errors import is_final
from corral.bus.api import Tokens
from corral.contract.messages.backends import (
    INSTALL_PROGRESS,
    BackendList,
    BackendResult,
    CancelBackend,
    CancelReply,
    DeleteBackend,
    InstallBackend,
    InstallProgress,
    InstallReply,
    ListBackends,
    OrderReport,
    StoppedReply,
    UpgradeBackend,
    VerifyBackend,
    VerifyReply,
)
from corral.kit.clock import Clock
from corral.kit.errors import CorralError, Denied, NotFound, reason_of
from corral.kit.log import get_log
from corral.worker.agent.orders.backend_changes import BackendChanges
from corral.worker.agent.orders.runner import (
    BACKEND_ORDERS,
    EventPublisher,
    OrderKey,
    OrderKind,
    OrderRun,
    OrderRunner,
    Outcome,
    Outcomes,
)
from corral.worker.installer.installer import Installer
from corral.worker.installer.inventory import InstalledBackend
from corral.worker.installer.progress import ProgressPublisher, ProgressSubject
from corral.worker.installer.resolver import NotResolved
from corral.worker.system.libraries import MissingLibraries, SystemLibraries
from corral.worker.system.packages import PackageManager

log = get_log(__name__)

MAX_REPORTED_ORDERS = 64  # ended orders in one heartbeat
MAX_REPORTED_ERROR_LENGTH = 1000
MAX_DAMAGED_FILES = 20  # named in one reply
ACCEPT_IS_REQUIRED = "this worker has no LocalAI support: send the order with accept and op_id"

Order = InstallBackend | UpgradeBackend | DeleteBackend


class DirectOrders(Protocol):
    """Carries out orders without `accept`. Implemented by `worker/localai`, which a worker may lack."""

    async def install(self, order: InstallBackend, progress: ProgressPublisher) -> InstallReply: ...

    async def upgrade(self, order: UpgradeBackend, progress: ProgressPublisher) -> StoppedReply: ...

    async def delete(self, order: DeleteBackend) -> StoppedReply: ...


class BackendOrders:
    def __init__(
        self,
        changes: BackendChanges,
        installer: Installer,
        runner: OrderRunner,
        outcomes: Outcomes,
        publisher: EventPublisher,
        clock: Clock,
        *,
        libraries: SystemLibraries | None = None,
        direct: DirectOrders | None = None,
    ) -> None:
        """`direct` is None in a worker without LocalAI support."""
        self._libraries = libraries or SystemLibraries(PackageManager())
        self._changes = changes
        self._installer = installer
        self._runner = runner
        self._outcomes = outcomes
        self._publisher = publisher
        self._clock = clock
        self._direct = direct

    # One handler for each subject

    async def install(self, order: InstallBackend, _tokens: Tokens) -> InstallReply:
        if _is_accepted(order):
            self._accept(OrderKind.INSTALL, order, partial(self._carry_out_install, order))
            return InstallReply(success=True, accepted=True)
        if self._direct is None:
            return InstallReply(success=False, error=ACCEPT_IS_REQUIRED)
        return await self._runner.run_detached(self._install_directly(order, self._direct))

    async def upgrade(self, order: UpgradeBackend, _tokens: Tokens) -> StoppedReply:
        if _is_accepted(order):
            self._accept(OrderKind.UPGRADE, order, partial(self._carry_out_upgrade, order))
            return StoppedReply(success=True, accepted=True)
        if self._direct is None:
            return StoppedReply(success=False, error=ACCEPT_IS_REQUIRED)
        return await self._runner.run_detached(self._upgrade_directly(order, self._direct))

    async def delete(self, order: DeleteBackend, _tokens: Tokens) -> StoppedReply:
        if _is_accepted(order):
            self._accept(OrderKind.DELETE, order, partial(self._carry_out_delete, order))
            return StoppedReply(success=True, accepted=True)
        if self._direct is None:
            return StoppedReply(success=False, error=ACCEPT_IS_REQUIRED)
        return await self._runner.run_detached(self._direct.delete(order))

    async def cancel(self, order: CancelBackend, _tokens: Tokens) -> CancelReply:
        if order.keep:
            self._installer.keep_download(order.backend)
        running = self._runner.cancel(order.op_id, order.backend)
        log.info("order cancelled", op=order.op_id, backend=order.backend, running=running, keep=order.keep)
        return CancelReply(success=True, running=running)

    async def list_backends(self, _request: ListBackends, _tokens: Tokens) -> BackendList:
        seq = self._installer.sequence  # read before the list: a change in the meantime gets a later number
        try:
            return BackendList(backends=await self._installer.list_backends(), seq=seq)
        except OSError as error:
            return BackendList(error=f"cannot read the installed backends: {reason_of(error)}")

    async def verify(self, request: VerifyBackend, _tokens: Tokens) -> VerifyReply:
        try:
            build = await self._installer.find(request.backend)
            found = await self._installer.check(request.backend)
        except CorralError as error:
            return VerifyReply(error=error.message)
        except OSError as error:
            return VerifyReply(error=f"cannot read the installed backends: {reason_of(error)}")
        return VerifyReply(
            success=True,
            version=build.metadata.version if build is not None else "",
            digest=build.digest if build is not None else "",
            missing=found.missing[:MAX_DAMAGED_FILES],
            changed=found.changed[:MAX_DAMAGED_FILES],
            damaged=len(found.missing) + len(found.changed),
        )

    def reports(self) -> tuple[OrderReport, ...]:
        """For the heartbeat: running orders, recent outcomes, and orders that failed for lack of a library. Those are
        reported until another order concerns their backend, so that the controller learns when the library is there."""
        running = [
            OrderReport(op_id=key.op_id, attempt=key.attempt, kind=key.kind, backend=key.about)
            for key in self._runner.running()
            if key.kind in BACKEND_ORDERS
        ]
        known = {outcome.key: outcome for outcome in self._outcomes.recent()}
        for outcome in self._outcomes.refused_for_libraries():
            known.pop(outcome.key, None)
            known[outcome.key] = outcome
        ended = [self._report(outcome, outcome.backend) for outcome in known.values() if outcome.backend is not None]
        return (*running, *ended[-MAX_REPORTED_ORDERS:])

    def _report(self, outcome: Outcome, result: BackendResult) -> OrderReport:
        return OrderReport(
            op_id=result.op_id,
            attempt=result.attempt,
            kind=outcome.kind,
            backend=outcome.about,
            result=_shortened(result),
            cured=bool(result.missing) and self._libraries.has(result.missing),
        )

    # Orders with `accept`: answered first, reported later

    def _accept(self, kind: OrderKind, order: Order, work: Callable[[OrderRun], Awaitable[BackendResult]]) -> None:
        cancelled = partial(self._result, order, success=False, cancelled=True, error="cancelled")
        self._runner.accept(OrderKey(kind, order.op_id, order.attempt, order.backend), work, cancelled=cancelled)

    async def _carry_out_install(self, order: InstallBackend, run: OrderRun) -> BackendResult:
        return await self._carry_out(order, lambda tell: self._changes.install(order, tell, run.commit))

    async def _carry_out_upgrade(self, order: UpgradeBackend, run: OrderRun) -> BackendResult:
        return await self._carry_out(
            order, lambda tell: self._changes.upgrade(order, tell, run.commit), fetched=order.fetch_only
        )

    async def _carry_out(
        self,
        order: InstallBackend | UpgradeBackend,
        work: Callable[..., Awaitable[InstalledBackend]],
        *,
        fetched: bool = False,
    ) -> BackendResult:
        async with self._progress(order) as progress:
            try:
                build = await work(progress.tell)
            except Exception as error:
                return self._failure(order, error, phase=progress.phase)
        return self._result(
            order,
            success=True,
            variant=build.name,
            version=build.metadata.version,
            digest=build.digest,
            fetched=fetched,
        )

    async def _carry_out_delete(self, order: DeleteBackend, run: OrderRun) -> BackendResult:
        run.commit()  # deleting takes a moment: a cancellation would come too late
        stopped: list[str] = []
        try:
            await self._changes.delete(order.backend, stopped)
        except NotFound:
            log.info("nothing to delete", backend=order.backend)
        except Exception as error:
            return self._failure(order, error, permanent=isinstance(error, Denied), stopped=stopped)
        return self._result(order, success=True, stopped=stopped)

    # Orders without `accept`: answered when they are done

    async def _install_directly(self, order: InstallBackend, direct: DirectOrders) -> InstallReply:
        async with self._progress(order) as progress:
            return await direct.install(order, progress)

    async def _upgrade_directly(self, order: UpgradeBackend, direct: DirectOrders) -> StoppedReply:
        async with self._progress(order) as progress:
            return await direct.upgrade(order, progress)

    # Progress and results

    def _progress(self, order: InstallBackend | UpgradeBackend) -> ProgressPublisher:
        async def publish(event: InstallProgress) -> None:
            await self._publisher.publish(INSTALL_PROGRESS, event, op=order.op_id)

        name = ProgressSubject(order.op_id, self._publisher.node_id, order.backend, order.attempt)
        # Numbers start at the clock's milliseconds: with at most four events a second they never reach the clock, so a
        # worker that restarts goes on with higher ones.
        return ProgressPublisher(name, publish, self._clock, after_seq=int(self._clock.now().timestamp() * 1000))

    def _failure(
        self,
        order: Order,
        error: Exception,
        *,
        phase: str = "",
        permanent: bool = False,
        stopped: list[str] | None = None,
    ) -> BackendResult:
        if not isinstance(error, CorralError):
            log.exception("order failed", backend=order.backend, op=order.op_id)
            return self._result(
                order, success=False, error=f"the worker failed: {error!r}", phase=phase, stopped=stopped
            )
        log.warning("order failed", backend=order.backend, op=order.op_id, error=error.message)
        final = error.permanent if isinstance(error, NotResolved | MissingLibraries) else is_final(error)
        return self._result(
            order,
            success=False,
            error=error.message,
            code=error.code,
            permanent=permanent or final,
            phase=phase,
            missing=error.libraries if isinstance(error, MissingLibraries) else (),
            stopped=stopped,
        )

    def _result(
        self,
        order: Order,
        *,
        success: bool,
        error: str = "",
        code: str = "",
        permanent: bool = False,
        cancelled: bool = False,
        phase: str = "",
        variant: str = "",
        version: str = "",
        digest: str = "",
        fetched: bool = False,
        missing: tuple[str, ...] = (),
        stopped: list[str] | None = None,
    ) -> BackendResult:
        return BackendResult(
            op_id=order.op_id,
            attempt=order.attempt,
            node_id=self._publisher.node_id,
            backend=order.backend,
            success=success,
            error=error,
            code=code,
            permanent=permanent,
            cancelled=cancelled,
            phase=phase,
            variant=variant,
            version=version,
            digest=digest,
            fetched=fetched,
            missing=missing,
            stopped_process_keys=tuple(stopped or ()),
        )


def _is_accepted(order: Order) -> bool:
    return order.accept and bool(order.op_id)


def _shortened(result: BackendResult) -> BackendResult:
    if len(result.error) <= MAX_REPORTED_ERROR_LENGTH:
        return result
    return msgspec.structs.replace(result, error=result.error[:MAX_REPORTED_ERROR_LENGTH] + " …")
