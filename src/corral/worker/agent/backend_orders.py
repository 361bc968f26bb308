"""Orders about backends: one function per subject (docs/reference/wire/backends.md).

With `accept` and an operation they are answered at once and reported later; without, when they are done. What they
come to is `backend_changes.py`'s.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import msgspec

from corral.blobs.errors import is_final
from corral.bus.api import Tokens
from corral.contract.messages.backends import (
    DELETE_RESULT,
    INSTALL_PROGRESS,
    INSTALL_RESULT,
    UPGRADE_RESULT,
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
    StopBackend,
    StoppedReply,
    UpgradeBackend,
    VerifyBackend,
    VerifyReply,
)
from corral.kit.clock import Clock
from corral.kit.errors import CorralError, Denied, NotFound, reason_of
from corral.kit.log import get_log
from corral.worker.addresses import HostPort
from corral.worker.agent.backend_changes import BackendChanges
from corral.worker.agent.order_runs import OrderRuns, Run
from corral.worker.agent.outcomes import OrderKey, Outcome, Outcomes
from corral.worker.agent.resolving import NotResolved
from corral.worker.agent.voice import Voice
from corral.worker.installer.installer import Installer
from corral.worker.installer.inventory import InstalledBackend
from corral.worker.installer.progress import OrderName, ProgressPublisher
from corral.worker.libraries import MissingLibraries, SystemLibraries
from corral.worker.supervisor.supervisor import Supervisor
from corral.worker.system_packages import PackageManager

log = get_log(__name__)

INSTALL, UPGRADE, DELETE = "install", "upgrade", "delete"
_RESULTS = {INSTALL: INSTALL_RESULT, UPGRADE: UPGRADE_RESULT, DELETE: DELETE_RESULT}
_MOST_TOLD = 64  # ended orders in one heartbeat
_LONGEST_TOLD = 1000
_MOST_DAMAGED = 20  # files named in one answer

Order = InstallBackend | UpgradeBackend | DeleteBackend


class BackendOrders:
    def __init__(
        self,
        changes: BackendChanges,
        installer: Installer,
        supervisor: Supervisor,
        runs: OrderRuns,
        outcomes: Outcomes,
        voice: Voice,
        clock: Clock,
        *,
        libraries: SystemLibraries | None = None,
    ) -> None:
        self._libraries = libraries or SystemLibraries(PackageManager())
        self._changes = changes
        self._installer = installer
        self._supervisor = supervisor
        self._runs = runs
        self._outcomes = outcomes
        self._voice = voice
        self._clock = clock

    # One per subject

    async def install(self, order: InstallBackend, _tokens: Tokens) -> InstallReply:
        if self._takes(order):
            self._accept(INSTALL, order, self._carry_out_install)
            return InstallReply(success=True, accepted=True)
        return await self._runs.see_through(self._serve_install(order))

    async def upgrade(self, order: UpgradeBackend, _tokens: Tokens) -> StoppedReply:
        if self._takes(order):
            self._accept(UPGRADE, order, self._carry_out_upgrade)
            return StoppedReply(success=True, accepted=True)
        return await self._runs.see_through(self._serve_upgrade(order))

    async def delete(self, order: DeleteBackend, _tokens: Tokens) -> StoppedReply:
        if self._takes(order):
            self._accept(DELETE, order, self._carry_out_delete)
            return StoppedReply(success=True, accepted=True)
        return await self._runs.see_through(self._serve_delete(order))

    async def cancel(self, order: CancelBackend, _tokens: Tokens) -> CancelReply:
        if order.keep:
            self._installer.keep_what_came(order.backend)
        running = self._runs.cancel(order.op_id, order.backend)
        log.info("told to stop an order", op=order.op_id, backend=order.backend, running=running, keep=order.keep)
        return CancelReply(success=True, running=running)

    async def list_backends(self, _asked: ListBackends, _tokens: Tokens) -> BackendList:
        seq = self._installer.sequence  # before the look: what changes meanwhile makes a later one
        try:
            return BackendList(backends=await self._installer.list_backends(), seq=seq)
        except OSError as error:
            return BackendList(error=f"cannot read what is installed: {reason_of(error)}")

    async def verify(self, asked: VerifyBackend, _tokens: Tokens) -> VerifyReply:
        try:
            build = await self._installer.find(asked.backend)
            found = await self._installer.check(asked.backend)
        except CorralError as error:
            return VerifyReply(error=error.message)
        except OSError as error:
            return VerifyReply(error=f"cannot read what is installed: {reason_of(error)}")
        return VerifyReply(
            success=True,
            version=build.metadata.version if build is not None else "",
            digest=build.digest if build is not None else "",
            missing=found.missing[:_MOST_DAMAGED],
            changed=found.changed[:_MOST_DAMAGED],
            damaged=len(found.missing) + len(found.changed),
        )

    async def stop(self, order: StopBackend, _tokens: Tokens) -> None:
        """An empty name means all; a payload nobody can read never gets here."""
        if order.backend:
            names = await self._installer.identity(order.backend)
            stopped = await self._supervisor.stop_named(order.backend, names, force=order.force)
        else:
            stopped = await self._supervisor.stop_all(force=order.force)
        log.info("told to stop", backend=order.backend or "all", stopped=len(stopped))

    def reports(self) -> tuple[OrderReport, ...]:
        """For the heartbeat: what is under way, what ended lately, and what was refused for want of a library: that is
        told until something else is said about its backend, so that the controller hears when the library is there."""
        under_way = [
            OrderReport(op_id=key.op_id, attempt=key.attempt, kind=key.kind, backend=key.about)
            for key in self._runs.running()
            if key.kind in _RESULTS
        ]
        known = {outcome.key: outcome for outcome in self._outcomes.recent()}
        for outcome in self._outcomes.refused_for_libraries():
            known.pop(outcome.key, None)
            known[outcome.key] = outcome
        ended = [self._ended(outcome, outcome.backend) for outcome in known.values() if outcome.backend is not None]
        return (*under_way, *ended[-_MOST_TOLD:])

    def _ended(self, outcome: Outcome, result: BackendResult) -> OrderReport:
        return OrderReport(
            op_id=result.op_id,
            attempt=result.attempt,
            kind=outcome.kind,
            backend=outcome.about,
            result=_shortened(result),
            cured=bool(result.missing) and self._libraries.has(result.missing),
        )

    # Accepted first, reported later

    def _takes(self, order: Order) -> bool:
        return order.accept and bool(order.op_id)

    def _accept(self, kind: str, order: Order, work: Callable[[Run, Order], Awaitable[BackendResult]]) -> None:
        key = OrderKey(kind, order.op_id, order.attempt, order.backend)
        cancelled = partial(self._result, order, success=False, cancelled=True, error="cancelled")
        self._runs.accept(key, partial(_flipped, work, order), self._tell, given_up=cancelled)

    async def _tell(self, outcome: Outcome) -> None:
        if outcome.backend is not None:
            await self._voice.try_to_say(_RESULTS[outcome.kind], outcome.backend, op=outcome.backend.op_id)

    async def _carry_out_install(self, run: Run, order: Order) -> BackendResult:
        assert isinstance(order, InstallBackend)
        return await self._carry_out(order, lambda tell: self._changes.install(order, tell, run.hold_on))

    async def _carry_out_upgrade(self, run: Run, order: Order) -> BackendResult:
        assert isinstance(order, UpgradeBackend)
        return await self._carry_out(
            order, lambda tell: self._changes.upgrade(order, tell, run.hold_on), fetched=order.fetch_only
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
            except CorralError as error:
                log.warning("order failed", backend=order.backend, op=order.op_id, error=error.message)
                return self._failure(order, error, phase=progress.phase)
            except Exception as error:
                log.exception("order failed", backend=order.backend, op=order.op_id)
                return self._result(order, success=False, error=f"the worker failed: {error!r}", phase=progress.phase)
        return self._result(
            order,
            success=True,
            variant=build.name,
            version=build.metadata.version,
            digest=build.digest,
            fetched=fetched,
        )

    async def _carry_out_delete(self, run: Run, order: Order) -> BackendResult:
        run.hold_on()  # it is over before anybody could change their mind
        stopped: list[str] = []
        try:
            await self._changes.delete(order.backend, stopped)
        except NotFound:
            log.info("nothing to delete", backend=order.backend)  # it is as it should be
        except CorralError as error:
            return self._failure(order, error, permanent=isinstance(error, Denied), stopped=stopped)
        except Exception as error:
            log.exception("order failed", backend=order.backend, op=order.op_id)
            return self._result(order, success=False, error=f"the worker failed: {error!r}", stopped=stopped)
        return self._result(order, success=True, stopped=stopped)

    # Answered when they are done

    async def _serve_install(self, order: InstallBackend) -> InstallReply:
        async with self._progress(order) as progress:
            try:
                running = await self._changes.serve_install(order, progress.tell)
            except CorralError as error:
                log.warning("install failed", backend=order.backend, error=error.message)
                return InstallReply(success=False, error=error.message)
        address = str(HostPort(self._changes.peer.host, running.port)) if running is not None else ""
        return InstallReply(success=True, address=address)

    async def _serve_upgrade(self, order: UpgradeBackend) -> StoppedReply:
        stopped: list[str] = []
        error = ""
        async with self._progress(order) as progress:
            try:
                await self._changes.serve_upgrade(order, progress.tell, stopped)
            except CorralError as failure:
                log.warning("upgrade failed", backend=order.backend, error=failure.message)
                error = failure.message
        return _stopped_reply(error, stopped)

    async def _serve_delete(self, order: DeleteBackend) -> StoppedReply:
        stopped: list[str] = []
        try:
            await self._changes.delete(order.backend, stopped)
        except CorralError as failure:
            log.warning("delete failed", backend=order.backend, error=failure.message)
            return _stopped_reply(failure.message, stopped)
        return _stopped_reply("", stopped)

    # Small things

    def _progress(self, order: InstallBackend | UpgradeBackend) -> ProgressPublisher:
        async def publish(event: InstallProgress) -> None:
            await self._voice.say(INSTALL_PROGRESS, event, op=order.op_id)

        name = OrderName(order.op_id, self._voice.node_id, order.backend, order.attempt)
        # At most four events a second: what is counted from milliseconds never catches up with the clock.
        return ProgressPublisher(name, publish, self._clock, after_seq=int(self._clock.now().timestamp() * 1000))

    def _failure(
        self,
        order: Order,
        error: CorralError,
        *,
        phase: str = "",
        permanent: bool = False,
        stopped: list[str] | None = None,
    ) -> BackendResult:
        final = error.permanent if isinstance(error, NotResolved | MissingLibraries) else is_final(error)
        return self._result(
            order,
            success=False,
            error=error.message,
            code=error.code,
            permanent=permanent or final,
            phase=phase,
            missing=error.libraries if isinstance(error, MissingLibraries) else (),
            stopped=stopped or [],
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
            node_id=self._voice.node_id,
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


async def _flipped(work: Callable[[Run, Order], Awaitable[BackendResult]], order: Order, run: Run) -> BackendResult:
    return await work(run, order)


def _stopped_reply(error: str, stopped: list[str]) -> StoppedReply:
    return StoppedReply(
        success=not error, error=error, stopped_process_keys=tuple(stopped), reports_stopped_processes=True
    )


def _shortened(result: BackendResult) -> BackendResult:
    if len(result.error) <= _LONGEST_TOLD:
        return result
    return msgspec.structs.replace(result, error=result.error[:_LONGEST_TOLD] + " …")
