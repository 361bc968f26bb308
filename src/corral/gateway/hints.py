"""Hears on the bus that the view changed, and how busy nodes are. Everything works without it: hints only make a look
come sooner, and without the nodes' word a gateway goes by its own requests.

Where the bus is and what to show it is asked of the controller, again for every renewal, so a gateway needs no bus
settings of its own and follows when the bus moves; only a bus that wants to see certificates needs one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from corral.bus.api import BusCredentials, BusTls, Tokens
from corral.bus.nats import NatsBus
from corral.bus.permissions import INBOX
from corral.contract.messages.hints import VIEW_CHANGED, ViewChanged
from corral.contract.messages.nodes import BusAccess
from corral.contract.messages.replicas import NODE_LOAD, NodeLoad
from corral.contract.view import GatewayBus
from corral.gateway.metrics import ViewCounts
from corral.kit.backoff import Backoff
from corral.kit.clock import Clock
from corral.kit.errors import CorralError, Unavailable
from corral.kit.log import get_log

log = get_log(__name__)


class CredentialDesk(Protocol):
    async def bus_credentials(self) -> GatewayBus: ...


class NodeLoads(Protocol):
    """Whoever wants to know how busy nodes are."""

    def heard(self, node_id: str, report: NodeLoad) -> None: ...

    def deaf(self) -> None: ...


class _Renewing:
    """A `CredentialSource` that asks the controller, and notices when the bus is elsewhere by now."""

    def __init__(self, desk: CredentialDesk, first: GatewayBus) -> None:
        self.moved = asyncio.Event()
        self._desk = desk
        self._first: GatewayBus | None = first
        self._where = _where(first.bus)

    async def current(self) -> BusCredentials:
        granted, self._first = self._first or await self._desk.bus_credentials(), None
        if _where(granted.bus) != self._where:
            self.moved.set()
            raise Unavailable("the bus has moved")
        return _credentials(granted)


class HintListener:
    def __init__(
        self,
        desk: CredentialDesk,
        on_hint: Callable[[], None],
        counts: ViewCounts,
        clock: Clock,
        *,
        retry_first_s: float,
        retry_cap_s: float,
        tls: BusTls | None = None,
        loads: NodeLoads | None = None,
    ) -> None:
        """`tls`: what a person has said about the bus; the controller's word fills in the rest."""
        self._desk = desk
        self._tls = tls or BusTls()
        self._loads = loads
        self._on_hint = on_hint
        self._counts = counts
        self._clock = clock
        self._backoff = Backoff(retry_first_s, retry_cap_s)
        self._told = ""

    async def run(self) -> None:
        while True:
            try:
                granted = await self._desk.bus_credentials()
                if granted.bus is None or not granted.bus.urls:
                    raise Unavailable("the controller has no bus")
                self._backoff.reset()
                await self._listen(granted, granted.bus)
            except CorralError as error:
                self._tell_once(error)
            except Exception:
                log.exception("hearing hints failed and will be tried again")
            await self._clock.sleep(self._backoff.next_s())

    async def _listen(self, granted: GatewayBus, access: BusAccess) -> None:
        """Until the bus moves. A connection that is lost is the bus's own business."""
        source = _Renewing(self._desk, granted)
        bus = NatsBus(
            access.urls,
            source,
            tls=self._tls_for(access),
            inbox_prefix=access.inbox or INBOX,
            name="corral-gateway",
            clock=self._clock,
        )
        async with bus:
            forget = bus.on_change(self._changed)
            try:
                await bus.subscribe(VIEW_CHANGED, self._took_hint)
                if self._loads is not None:
                    await bus.subscribe(NODE_LOAD, self._took_load)
                await source.moved.wait()
            finally:
                forget()
                self._counts.bus_connected = False

    def _tls_for(self, access: BusAccess) -> BusTls | None:
        own = self._tls
        if own.ca is None and own.certificate is None and not access.ca:
            return None  # as the URL says
        return BusTls(ca=own.ca, ca_pem="" if own.ca else access.ca, certificate=own.certificate, key=own.key)

    async def _took_hint(self, _hint: ViewChanged, _tokens: Tokens) -> None:
        self._counts.hints += 1
        self._on_hint()

    async def _took_load(self, report: NodeLoad, tokens: Tokens) -> None:
        assert self._loads is not None
        self._loads.heard(tokens["node"], report)

    def _changed(self, connected: bool) -> None:
        self._counts.bus_connected = connected
        if not connected and self._loads is not None:
            self._loads.deaf()
        if connected:
            self._told = ""
            self._on_hint()  # whatever was said while nobody listened

    def _tell_once(self, error: CorralError) -> None:
        if error.message != self._told:
            self._told = error.message
            log.warning("no hints from the bus for now; changes are seen by looking", reason=error.message)


def _where(access: BusAccess | None) -> tuple[object, ...]:
    return () if access is None else (access.urls, access.ca, access.inbox)


def _credentials(granted: GatewayBus) -> BusCredentials:
    access = granted.bus or BusAccess()
    return BusCredentials(
        jwt=granted.nats_jwt,
        seed=granted.nats_user_seed,
        expires_in_s=granted.expires_in_s or None,
        user=access.user,
        password=access.password,
    )
