"""Sends orders about backends to workers, concurrently, and hands an observation of each to the reconciler
(docs/reference/wire/backends.md).

`BackendCalls` makes the calls and translates the replies. A Corral worker replies at once whether it accepts an order,
and reports the outcome later, so few open calls serve many nodes. A LocalAI worker replies when it has finished: the
call may take as long as an install, and a call that times out has not failed.

`Dispatch` owns the open calls. A success counts only with the inventory that the node lists after it; the dispatcher
reads it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from corral.bus.api import Bus, Tokens
from corral.contract.messages.backends import (
    CANCEL_BACKEND,
    DELETE_BACKEND,
    INSTALL_BACKEND,
    LIST_BACKENDS,
    UPGRADE_BACKEND,
    VERIFY_BACKEND,
    BackendList,
    BackendResult,
    CancelBackend,
    DeleteBackend,
    InstallBackend,
    InstallReply,
    ListBackends,
    StoppedReply,
    UpgradeBackend,
    VerifyBackend,
    VerifyReply,
)
from corral.contract.sources import public_source
from corral.controller.orders.observations import (
    InventoryRead,
    Observation,
    OrderAccepted,
    OrderEnded,
    OrderNotRunning,
    OrderNotSent,
    OrderStillRunning,
    WorkerUnreachable,
    observe_error,
    refused,
)
from corral.controller.orders.order import NO_GALLERY_FOR_LOCALAI, BackendOrder, OrderId
from corral.controller.settings.backends import BackendSettings
from corral.kit.clock import Clock
from corral.kit.errors import CorralError, Failed, Invalid, OutcomeUnknown, Unreachable
from corral.kit.log import get_log
from corral.kit.redact import remove_logins
from corral.kit.retry import retry_unreachable
from corral.kit.tasks import BackgroundTasks
from corral.store.records import BackendRequest, OrderKind

log = get_log(__name__)
T = TypeVar("T")
Aliases = Callable[[Collection[str]], Awaitable[Mapping[str, str]]]
GalleriesWith = Callable[[BackendRequest], Awaitable[Sequence[dict[str, Any]]]]
Reply = InstallReply | StoppedReply
# A worker reads tens of gigabytes; a client that asks through the gateway waits two minutes.
VERIFY_TIMEOUT_S = 110.0


class BackendCalls:
    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        settings: BackendSettings,
        *,
        aliases: Aliases,
        galleries_with: GalleriesWith,
        second_try_s: float = 0.25,
    ) -> None:
        """`aliases`: the aliases that galleries have for builds, by name. `galleries_with`: the galleries in which a
        LocalAI worker finds an entry. `second_try_s`: the pause after a call that no worker listened to."""
        self._bus = bus
        self._clock = clock
        self._aliases = aliases
        self._galleries_with = galleries_with
        self._settings = settings
        self._second_try_s = second_try_s

    def answer_within_s(self, kind: OrderKind) -> float:
        """How long a LocalAI worker may take to carry an order of this kind out."""
        match kind:
            case OrderKind.INSTALL:
                return self._settings.backend_install_timeout_s
            case OrderKind.FETCH | OrderKind.UPGRADE:
                return self._settings.backend_upgrade_timeout_s
            case OrderKind.DELETE:
                return self._settings.backend_delete_timeout_s

    async def order(self, order: BackendOrder) -> Observation:
        """Send it. An error of the worker or of the bus becomes an observation."""
        timeout_s = self._settings.backend_accept_timeout_s if order.accepts else self.answer_within_s(order.send.kind)
        try:
            reply = await self._send(order, timeout_s)
        except CorralError as error:
            if not isinstance(error, OutcomeUnknown) or order.accepts:
                return observe_error(order.id, error)
            if order.send.kind is OrderKind.DELETE:  # which takes seconds: no LocalAI worker still works on it
                return refused(order.id, error.message)
            return OrderStillRunning(order.id, timeout_s)
        if reply.accepted and order.accepts:
            return OrderAccepted(order.id, order.boot_id)
        # A LocalAI worker replies when it has finished; a Corral worker so when it carried the same order out before.
        return OrderEnded(order.id, reply.success, "" if reply.success else reply.error)

    async def cancel(self, order: OrderId, *, keep: bool = False) -> OrderNotRunning | None:
        """None: the worker is stopping the order, or did not reply. The outcome is reported like that of any order."""
        request = CancelBackend(op_id=order.operation, backend=order.backend, keep=keep)
        try:
            reply = await self._bus.call(
                CANCEL_BACKEND, request, timeout_s=self._settings.backend_accept_timeout_s, node=order.node_id
            )
        except CorralError:
            return None
        return OrderNotRunning(order) if reply.success and not reply.running else None

    async def list_backends(self, node_id: str, *, accepts: bool) -> BackendList:
        """Raises Unreachable when no worker listens, Failed when the node cannot list its backends.

        Several builds may share one alias. Of a backend installed by such an alias, a LocalAI worker lists only the
        build (docs/reference/wire/backends.md#list); the alias is then read from the galleries."""
        listed = await self._retried(
            lambda: self._bus.call(
                LIST_BACKENDS, ListBackends(), timeout_s=self._settings.backend_list_timeout_s, node=node_id
            )
        )
        if listed.error:
            raise Failed(f"the node cannot list its backends: {listed.error}")
        if accepts:
            return listed
        aliases = await self._aliases([row.name for row in listed.backends if not row.is_meta])
        named = [msgspec.structs.replace(row, alias=aliases.get(row.name, row.alias)) for row in listed.backends]
        return msgspec.structs.replace(listed, backends=tuple(named))

    async def verify(self, node_id: str, backend: str) -> VerifyReply:
        """Raises what a call raises."""
        request = VerifyBackend(backend=backend)
        return await self._bus.call(VERIFY_BACKEND, request, timeout_s=VERIFY_TIMEOUT_S, node=node_id)

    async def _send(self, order: BackendOrder, timeout_s: float) -> Reply:
        match order.send.kind:
            case OrderKind.INSTALL:
                return await self._retried(lambda: self._install(order, timeout_s, force=order.send.force))
            case OrderKind.FETCH:
                return await self._retried(lambda: self._upgrade(order, timeout_s, fetch_only=True))
            case OrderKind.UPGRADE if order.accepts:
                return await self._retried(lambda: self._upgrade(order, timeout_s))
            case OrderKind.UPGRADE:
                return await self._upgrade_or_install(order, timeout_s)
            case OrderKind.DELETE:
                return await self._retried(lambda: self._delete(order, timeout_s))

    async def _upgrade_or_install(self, order: BackendOrder, timeout_s: float) -> Reply:
        """An old LocalAI worker does not listen on the upgrade subject: it reinstalls by force."""
        try:
            return await self._upgrade(order, timeout_s)
        except Unreachable:
            return await self._retried(lambda: self._install(order, timeout_s, force=True))

    async def _install(self, order: BackendOrder, timeout_s: float, *, force: bool) -> Reply:
        request = InstallBackend(**await self._request(order), force=force)
        return await self._bus.call(INSTALL_BACKEND, request, timeout_s=timeout_s, node=order.node_id)

    async def _upgrade(self, order: BackendOrder, timeout_s: float, *, fetch_only: bool = False) -> Reply:
        in_place = order.in_place and not fetch_only
        request = UpgradeBackend(**await self._request(order), fetch_only=fetch_only, in_place=in_place)
        return await self._bus.call(UPGRADE_BACKEND, request, timeout_s=timeout_s, node=order.node_id)

    async def _delete(self, order: BackendOrder, timeout_s: float) -> Reply:
        request = DeleteBackend(backend=order.send.backend, **(_acceptance(order) if order.accepts else {}))
        return await self._bus.call(DELETE_BACKEND, request, timeout_s=timeout_s, node=order.node_id)

    async def _request(self, order: BackendOrder) -> dict[str, Any]:
        """A Corral worker receives the build itself. A LocalAI worker looks the build up, and so receives only the
        galleries that have it: it reads every gallery it receives, and fails if it cannot read one of them."""
        request, build, fields = order.request, order.build, _named(order)
        if not order.accepts:
            if request.uri:
                return fields
            galleries = await self._galleries_with(request)
            if not galleries:
                raise Invalid(NO_GALLERY_FOR_LOCALAI)
            return fields | {"backend_galleries": msgspec.json.encode(list(galleries)).decode()}
        # Logins in URLs stay here: the worker fetches through the controller what needs them.
        fields |= _acceptance(order) | {"uri": remove_logins(request.uri)}
        if build is not None:
            fields |= {
                "alias": request.alias or build.alias,
                "variant": build.variant,
                "digest": build.digest,
                "version": build.version,
                "gallery_url": build.gallery_url,
                "sources": tuple(map(public_source, build.sources)),
                "manifest": build.manifest,
            }
        return fields

    async def _retried(self, call: Callable[[], Awaitable[T]]) -> T:
        return await retry_unreachable(call, clock=self._clock, after_s=self._second_try_s)


def _named(order: BackendOrder) -> dict[str, Any]:
    """The fields of an install and of an upgrade that every kind of worker receives."""
    request = order.request
    return {
        "backend": order.send.backend,
        "uri": request.uri,
        "name": order.send.backend if request.uri else "",
        "alias": request.alias,
        "op_id": order.send.operation,
    }


def _acceptance(order: BackendOrder) -> dict[str, Any]:
    return {"op_id": order.send.operation, "accept": True, "attempt": order.send.attempt}


@dataclass(frozen=True)
class CallLimits:
    """How many calls may be open at the same time."""

    quick: int = 64  # to workers that reply at once
    slow: int = 256  # to workers that reply when they have finished


class Dispatch:
    """`async with` it: leaving the block abandons the open calls. The next leader sends those orders again."""

    def __init__(
        self,
        calls: BackendCalls,
        *,
        on_observation: Callable[[Observation, InventoryRead | None], None],
        on_unreachable: Callable[[str], Awaitable[None]],
        limits: CallLimits | None = None,
    ) -> None:
        """`on_unreachable` is called with the id of a node on which no worker listens."""
        self._calls = calls
        self._on_observation = on_observation
        self._on_unreachable = on_unreachable
        self._limits = limits or CallLimits()
        self._quick = asyncio.Semaphore(self._limits.quick)
        self._listing = asyncio.Semaphore(self._limits.quick)
        self._slow_open = 0
        self._stopping: set[OrderId] = set()
        self._tasks = BackgroundTasks()

    async def __aenter__(self) -> Dispatch:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._tasks.__aexit__(kind, error, trace)

    @property
    def free_slow_calls(self) -> int:
        """How many more calls may be opened to workers that reply when they have finished."""
        return max(0, self._limits.slow - self._slow_open)

    @property
    def open_calls(self) -> int:
        return len(self._tasks)

    def send(self, order: BackendOrder) -> None:
        if not order.accepts:
            self._slow_open += 1
        self._tasks.start(self._send(order), name=f"order {order.send.kind} {order.send.backend}")

    def stop(self, order: OrderId, *, keep: bool = False) -> None:
        """Has no effect while the worker is being asked already."""
        if order not in self._stopping:
            self._stopping.add(order)
            self._tasks.start(self._stop(order, keep), name=f"stop {order.backend}")

    async def on_result(self, result: BackendResult, tokens: Tokens) -> None:
        """Handles the event with which a worker reports how an accepted order ended."""
        # Only this node may publish on the subject; a node id inside the message would prove nothing.
        order = OrderId(tokens["node"], result.op_id, result.attempt, result.backend)
        ended = OrderEnded.from_result(order, result)
        if result.success:
            self._tasks.start(self._confirm(ended), name=f"confirm {order.backend}")
        else:
            self._on_observation(ended, None)

    async def _send(self, order: BackendOrder) -> None:
        observed = await self._call(order)
        # The reconciler logs one line for all orders of a pass: an accepted order is not worth another.
        write = log.debug if isinstance(observed, OrderAccepted) else log.info
        write(
            "order",
            node=order.node_id,
            kind=order.send.kind,
            backend=order.send.backend,
            answer=type(observed).__name__,
        )
        if isinstance(observed, WorkerUnreachable):
            await self._on_unreachable(order.node_id)
        if isinstance(observed, OrderEnded) and observed.success:
            late = None if order.accepts else OrderStillRunning(order.id, self._calls.answer_within_s(order.send.kind))
            await self._confirm(observed, late, accepts=order.accepts)
        else:
            self._on_observation(observed, None)

    async def _call(self, order: BackendOrder) -> Observation:
        try:
            if not order.accepts:
                return await self._calls.order(order)
            async with self._quick:
                return await self._calls.order(order)
        except Exception:
            log.exception("order not sent", node_id=order.node_id, backend=order.send.backend)
            return OrderNotSent(order.id, "the controller failed; its log has the details")
        finally:
            if not order.accepts:
                self._slow_open -= 1

    async def _confirm(
        self, ended: OrderEnded | OrderNotRunning, otherwise: Observation | None = None, *, accepts: bool = True
    ) -> None:
        """Hand the observation on, together with the node's inventory. If the node cannot list its backends now, hand
        `otherwise` on; a later heartbeat or listing shows the result."""
        node_id = ended.order.node_id
        try:
            async with self._listing:
                listed = await self._calls.list_backends(node_id, accepts=accepts)
        except CorralError as error:
            log.warning("inventory could not be read after an order", node_id=node_id, error=error.message)
            if isinstance(error, Unreachable):
                await self._on_unreachable(node_id)
            if otherwise is not None:
                self._on_observation(otherwise, None)
            return
        self._on_observation(ended, InventoryRead(node_id, listed.backends, listed.seq))

    async def _stop(self, order: OrderId, keep: bool) -> None:
        try:
            async with self._quick:
                observed = await self._calls.cancel(order, keep=keep)
        finally:
            self._stopping.discard(order)
        log.info("order cancelled", node_id=order.node_id, backend=order.backend, operation=order.operation)
        if observed is not None:  # the order may have ended before: the stored inventory is out of date
            await self._confirm(observed)
