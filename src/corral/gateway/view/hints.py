"""Receives hints from the bus: the view has changed, how many requests nodes have in flight, and that somebody looks at
the requests under way. The gateway works
without them: a hint only causes an earlier read of the view, and without reports the gateway counts its own requests
only.

The controller tells the bus's address and credentials, at every renewal again. So a gateway needs no bus settings and
follows when the bus moves; only client certificates for the bus are settings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from corral.bus.api import BusCredentials, BusTls, Tokens
from corral.bus.nats import NatsBus
from corral.bus.permissions import INBOX
from corral.contract.messages.hints import RUNNING_WANTED, VIEW_CHANGED, RunningWanted, ViewChanged
from corral.contract.messages.nodes import BusAccess
from corral.contract.messages.replicas import NODE_LOAD, NodeLoad
from corral.contract.view import GatewayBus
from corral.gateway.view.cache import ViewCounts
from corral.gateway.view.controller_link import ControllerLink
from corral.kit.clock import Clock
from corral.kit.errors import CorralError, Unavailable
from corral.kit.log import get_log
from corral.kit.retry import Backoff

log = get_log(__name__)


class NodeLoads(Protocol):
    """Receives the reports of nodes."""

    def on_report(self, node_id: str, report: NodeLoad) -> None: ...

    def on_disconnect(self) -> None: ...


class _RenewedCredentials:
    """A `CredentialSource` that asks the controller, and detects that the bus has moved."""

    def __init__(self, client: ControllerLink, first: GatewayBus) -> None:
        self.moved = asyncio.Event()
        self._client = client
        self._first: GatewayBus | None = first
        self._address = _address(first.bus)

    async def current(self) -> BusCredentials:
        granted, self._first = self._first or await self._client.bus_credentials(), None
        if _address(granted.bus) != self._address:
            self.moved.set()
            raise Unavailable("the bus has moved")
        return _credentials(granted)


class HintListener:
    def __init__(
        self,
        client: ControllerLink,
        on_hint: Callable[[], None],
        counts: ViewCounts,
        clock: Clock,
        *,
        retry_first_s: float,
        retry_cap_s: float,
        tls: BusTls | None = None,
        loads: NodeLoads | None = None,
        on_running_wanted: Callable[[float], None] = lambda _for_s: None,
    ) -> None:
        """`tls`: the settings for the bus; the controller provides the rest. `on_running_wanted`: somebody looks at the
        requests under way, for so many seconds."""
        self._on_running_wanted = on_running_wanted
        self._client = client
        self._tls = tls or BusTls()
        self._loads = loads
        self._on_hint = on_hint
        self._counts = counts
        self._clock = clock
        self._backoff = Backoff(retry_first_s, retry_cap_s)
        self._last_warning = ""

    async def run(self) -> None:
        while True:
            try:
                granted = await self._client.bus_credentials()
                if granted.bus is None or not granted.bus.urls:
                    raise Unavailable("the controller has no bus")
                self._backoff.reset()
                await self._listen(granted, granted.bus)
            except CorralError as error:
                self._warn_once(error)
            except Exception:
                log.exception("receiving hints failed; retrying")
            await self._clock.sleep(self._backoff.next_s())

    async def _listen(self, granted: GatewayBus, access: BusAccess) -> None:
        """Runs until the bus moves. `NatsBus` restores lost connections."""
        source = _RenewedCredentials(self._client, granted)
        bus = NatsBus(
            access.urls,
            source,
            tls=self._tls_for(access),
            inbox_prefix=access.inbox or INBOX,
            name="corral-gateway",
            clock=self._clock,
        )
        async with bus:
            unsubscribe = bus.on_change(self._on_connection_change)
            try:
                await bus.subscribe(VIEW_CHANGED, self._on_hint_message)
                await bus.subscribe(RUNNING_WANTED, self._on_wanted)
                if self._loads is not None:
                    await bus.subscribe(NODE_LOAD, self._on_load_report)
                await source.moved.wait()
            finally:
                unsubscribe()
                self._counts.bus_connected = False

    def _tls_for(self, access: BusAccess) -> BusTls | None:
        own = self._tls
        if own.ca is None and own.certificate is None and not access.ca:
            return None  # the URL decides
        return BusTls(ca=own.ca, ca_pem="" if own.ca else access.ca, certificate=own.certificate, key=own.key)

    async def _on_hint_message(self, _hint: ViewChanged, _tokens: Tokens) -> None:
        self._counts.hints += 1
        self._on_hint()

    async def _on_wanted(self, wanted: RunningWanted, _tokens: Tokens) -> None:
        self._on_running_wanted(wanted.for_s)

    async def _on_load_report(self, report: NodeLoad, tokens: Tokens) -> None:
        assert self._loads is not None
        self._loads.on_report(tokens["node"], report)

    def _on_connection_change(self, connected: bool) -> None:
        self._counts.bus_connected = connected
        if not connected and self._loads is not None:
            self._loads.on_disconnect()
        if connected:
            self._last_warning = ""
            self._on_hint()  # hints may have been lost meanwhile

    def _warn_once(self, error: CorralError) -> None:
        if error.message != self._last_warning:
            self._last_warning = error.message
            log.warning("no hints from the bus for now; the view is polled", reason=error.message)


def _address(access: BusAccess | None) -> tuple[object, ...]:
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
