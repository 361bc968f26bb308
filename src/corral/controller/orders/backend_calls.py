"""One order on its way to one worker, and what its answer means (docs/reference/wire/backends.md,
docs/reference/wire/subjects.md#call-errors).

Corral workers answer at once whether they accept, and report later. LocalAI workers answer when they are done: their
call may take as long as an install, and no answer in that time is no failure.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from corral.bus.api import Bus
from corral.contract.messages.backends import (
    CANCEL_BACKEND,
    DELETE_BACKEND,
    INSTALL_BACKEND,
    LIST_BACKENDS,
    UPGRADE_BACKEND,
    VERIFY_BACKEND,
    BackendList,
    CancelBackend,
    DeleteBackend,
    InstallBackend,
    InstallReply,
    ListBackends,
    Phase,
    StoppedReply,
    UpgradeBackend,
    VerifyBackend,
    VerifyReply,
)
from corral.controller.orders.observations import (
    Observation,
    OrderAccepted,
    OrderEnded,
    OrderId,
    OrderNotRunning,
    OrderNotSent,
    OrderStillRunning,
    OrderUnconfirmed,
    WorkerUnreachable,
)
from corral.controller.orders.order import NO_GALLERY_FOR_LOCALAI, OrderKind, Send
from corral.kit.clock import Clock
from corral.kit.errors import CorralError, Denied, Failed, Invalid, OutcomeUnknown, Unavailable, Unreachable
from corral.store.tables.backend_rules import Asked
from corral.store.tables.backend_targets import TargetBuild

T = TypeVar("T")
Aliases = Callable[[Collection[str]], Awaitable[Mapping[str, str]]]
GalleriesWith = Callable[[Asked], Awaitable[Sequence[dict[str, Any]]]]
Reply = InstallReply | StoppedReply


@dataclass(frozen=True)
class CallTimes:
    install_s: float = 900.0
    upgrade_s: float = 900.0
    delete_s: float = 120.0
    accept_s: float = 10.0
    list_s: float = 30.0
    verify_s: float = 110.0  # tens of gigabytes are read; whoever asked through the gateway waits two minutes
    second_try_s: float = 0.25  # "nobody listens" counts only when it is so twice


@dataclass(frozen=True)
class Order:
    node_id: str
    accepts: bool
    boot_id: str
    send: Send
    asked: Asked
    build: TargetBuild | None
    in_place: bool = False  # what runs has to end before its successor starts

    @property
    def id(self) -> OrderId:
        return OrderId(self.node_id, self.send.operation, self.send.attempt, self.send.backend)


class WorkerCalls:
    def __init__(
        self, bus: Bus, clock: Clock, times: CallTimes, *, aliases: Aliases, galleries_with: GalleriesWith
    ) -> None:
        """`aliases`: what galleries know of builds by name. `galleries_with`: where a LocalAI worker finds an entry."""
        self._bus = bus
        self._clock = clock
        self._aliases = aliases
        self._galleries_with = galleries_with
        self.times = times

    def answer_within_s(self, kind: OrderKind) -> float:
        """How long a worker that answers when it is done may take."""
        match kind:
            case OrderKind.INSTALL:
                return self.times.install_s
            case OrderKind.FETCH | OrderKind.UPGRADE:
                return self.times.upgrade_s
            case OrderKind.DELETE:
                return self.times.delete_s

    async def order(self, order: Order) -> Observation:
        """Never raises for what the other side or the bus does."""
        timeout_s = self.times.accept_s if order.accepts else self.answer_within_s(order.send.kind)
        try:
            reply = await self._sent(order, timeout_s)
        except Unreachable:
            return WorkerUnreachable(order.id)
        except OutcomeUnknown as error:
            if order.accepts:
                return OrderUnconfirmed(order.id)
            if order.send.kind is OrderKind.DELETE:
                return _refused(order, error.message)
            return OrderStillRunning(order.id, timeout_s)
        except Failed as error:  # an answer that cannot be read: it did answer, and it is not what we know
            return _refused(order, error.message)
        except (Unavailable, Denied) as error:
            return OrderNotSent(order.id, error.message)
        except Invalid as error:
            return _refused(order, error.message, permanent=True)
        if reply.accepted and order.accepts:
            return OrderAccepted(order.id, order.boot_id)
        return _finished(order, reply)

    async def cancel(self, order: OrderId, *, keep: bool = False) -> OrderNotRunning | None:
        """None: it is being stopped, or nobody could say. Its outcome comes as that of any other order."""
        asked = CancelBackend(op_id=order.operation, backend=order.backend, keep=keep)
        try:
            reply = await self._bus.call(CANCEL_BACKEND, asked, timeout_s=self.times.accept_s, node=order.node_id)
        except CorralError:
            return None
        return OrderNotRunning(order) if reply.success and not reply.running else None

    async def list_backends(self, node_id: str, *, accepts: bool) -> BackendList:
        """Raises Unreachable only when nobody listens twice; Failed when the node says that it cannot tell.

        A LocalAI worker lists only the build of what was installed by a name that builds share, and does not tell that
        name (docs/reference/wire/backends.md#list): it is the gallery's."""

        async def ask() -> BackendList:
            return await self._bus.call(LIST_BACKENDS, ListBackends(), timeout_s=self.times.list_s, node=node_id)

        listed = await self._twice(ask)
        if listed.error:
            raise Failed(f"the node cannot list its backends: {listed.error}")
        if accepts:
            return listed
        aliases = await self._aliases([row.name for row in listed.backends if not row.is_meta])
        named = [msgspec.structs.replace(row, alias=aliases.get(row.name, row.alias)) for row in listed.backends]
        return msgspec.structs.replace(listed, backends=tuple(named))

    async def verify(self, node_id: str, backend: str) -> VerifyReply:
        """Raises what a call raises."""
        asked = VerifyBackend(backend=backend)
        return await self._bus.call(VERIFY_BACKEND, asked, timeout_s=self.times.verify_s, node=node_id)

    async def _sent(self, order: Order, timeout_s: float) -> Reply:
        match order.send.kind:
            case OrderKind.INSTALL:
                return await self._twice(lambda: self._install(order, timeout_s, force=order.send.force))
            case OrderKind.FETCH:
                return await self._twice(lambda: self._upgrade(order, timeout_s, fetch_only=True))
            case OrderKind.UPGRADE if order.accepts:
                return await self._twice(lambda: self._upgrade(order, timeout_s))
            case OrderKind.UPGRADE:
                return await self._upgrade_or_install(order, timeout_s)
            case OrderKind.DELETE:
                return await self._twice(lambda: self._delete(order, timeout_s))

    async def _upgrade_or_install(self, order: Order, timeout_s: float) -> Reply:
        """A worker from before there was an upgrade subject reinstalls by force. Any other failure is its answer."""
        try:
            return await self._upgrade(order, timeout_s)
        except Unreachable:
            return await self._twice(lambda: self._install(order, timeout_s, force=True))

    async def _install(self, order: Order, timeout_s: float, *, force: bool) -> Reply:
        request = InstallBackend(**await self._request(order), force=force)
        return await self._bus.call(INSTALL_BACKEND, request, timeout_s=timeout_s, node=order.node_id)

    async def _upgrade(self, order: Order, timeout_s: float, *, fetch_only: bool = False) -> Reply:
        in_place = order.in_place and not fetch_only
        request = UpgradeBackend(**await self._request(order), fetch_only=fetch_only, in_place=in_place)
        return await self._bus.call(UPGRADE_BACKEND, request, timeout_s=timeout_s, node=order.node_id)

    async def _delete(self, order: Order, timeout_s: float) -> Reply:
        request = DeleteBackend(backend=order.send.backend, **(_acceptance(order) if order.accepts else {}))
        return await self._bus.call(DELETE_BACKEND, request, timeout_s=timeout_s, node=order.node_id)

    async def _request(self, order: Order) -> dict[str, Any]:
        """Our workers are told the build itself; LocalAI workers look it up, so they are told where. Only there: a
        LocalAI worker reads every gallery it is sent, and fails if one of them cannot be read."""
        asked, build, fields = order.asked, order.build, _named(order)
        if not order.accepts:
            if asked.uri:
                return fields
            galleries = await self._galleries_with(asked)
            if not galleries:
                raise Invalid(NO_GALLERY_FOR_LOCALAI)
            return fields | {"backend_galleries": msgspec.json.encode(list(galleries)).decode()}
        fields |= _acceptance(order)
        if build is not None:
            fields |= {
                "alias": asked.alias or build.alias,
                "variant": build.variant,
                "digest": build.digest,
                "version": build.version,
                "gallery_url": build.gallery_url,
                "sources": build.sources,
                "manifest": build.manifest,
            }
        return fields

    async def _twice(self, ask: Callable[[], Awaitable[T]]) -> T:
        try:
            return await ask()
        except Unreachable:
            await self._clock.sleep(self.times.second_try_s)
            return await ask()


def _named(order: Order) -> dict[str, Any]:
    """What installs and upgrades have in common, whoever is asked."""
    asked = order.asked
    return {
        "backend": order.send.backend,
        "uri": asked.uri,
        "name": order.send.backend if asked.uri else "",
        "alias": asked.alias,
        "op_id": order.send.operation,
    }


def _acceptance(order: Order) -> dict[str, Any]:
    return {"op_id": order.send.operation, "accept": True, "attempt": order.send.attempt}


def _finished(order: Order, reply: Reply) -> OrderEnded:
    """The order is over already: a worker that answers when it has finished, or one that had carried it out before."""
    return OrderEnded(order.id, reply.success, "" if reply.success else reply.error)


def _refused(order: Order, reason: str, *, permanent: bool = False) -> OrderEnded:
    # An order that was not understood has switched nothing.
    return OrderEnded(order.id, success=False, error=reason, permanent=permanent, phase=Phase.RESOLVING)
