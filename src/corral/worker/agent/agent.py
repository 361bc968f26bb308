"""The worker's life with its controller: join, live, join again when told so, leave.

Read `run` first. A session is what lies between one registration and the next: a bus connection with its orders, and
heartbeats. Nothing of it is carried over to the next, so there is no half-renewed state to reason about.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TypeVar

from corral.bus.api import Bus, CredentialSource
from corral.contract.messages.nodes import NodeRegistered
from corral.kit.backoff import Backoff
from corral.kit.clock import Clock
from corral.kit.errors import CorralError, Unavailable
from corral.kit.log import get_log
from corral.kit.sockets import report_ready
from corral.kit.tasks import run_every
from corral.worker.agent.answers import Deleted, RegisterAgain
from corral.worker.agent.controller import ControllerApi
from corral.worker.agent.credentials import NodeCredentials
from corral.worker.agent.heartbeats import Heartbeats
from corral.worker.agent.joining import Joining
from corral.worker.agent.leaving import Leaving, at_most, stop_backends
from corral.worker.agent.machine import Machine
from corral.worker.agent.peer import Peer
from corral.worker.agent.server_clock import ServerClock
from corral.worker.agent.standing import Standing
from corral.worker.agent.stop import CannotGoOn
from corral.worker.agent.waiting import alongside, unless_set
from corral.worker.backends import Backends
from corral.worker.ingress.load import LoadReports
from corral.worker.ingress.server import Ingress
from corral.worker.metrics import WorkerMetrics
from corral.worker.settings import WorkerSettings
from corral.worker.supervisor.supervisor import Supervisor

log = get_log(__name__)
T = TypeVar("T")

OpenBus = Callable[[NodeRegistered, CredentialSource], AbstractAsyncContextManager[Bus]]


@dataclass
class Agent:
    settings: WorkerSettings
    api: ControllerApi
    joining: Joining
    machine: Machine
    standing: Standing
    server_clock: ServerClock
    metrics: WorkerMetrics
    open_bus: OpenBus
    ingress: Ingress
    supervisor: Supervisor
    load: LoadReports
    backends: Backends
    peer_of: Callable[[NodeRegistered], Peer]
    clock: Clock

    async def run(self, stopped: asyncio.Event, hurry: asyncio.Event) -> None:
        """Until `stopped` is set, by a signal or by an order over the bus. Raises `CannotGoOn`; the node's requests
        have ended by then, and no backend runs on."""
        try:
            await self._join_and_live(stopped, hurry)
        except CannotGoOn:
            self.standing.leaving = True
            drain_s = min(self.settings.drain_timeout_s, self.settings.leave_timeout_s)
            await at_most(drain_s, hurry, self.ingress.wait_idle())
            await stop_backends(self.supervisor, hurry, self.settings.leave_timeout_s)
            raise

    async def _join_and_live(self, stopped: asyncio.Event, hurry: asyncio.Event) -> None:
        pause = Backoff(self.settings.retry_first_s, self.settings.retry_cap_s)
        while True:
            reply = await unless_set(stopped, self.joining.join())
            if reply is None and self.standing.handing_over:
                return
            if reply is None:
                # It never came to be part of the fleet, so there is nobody to say goodbye to.
                await stop_backends(self.supervisor, hurry, self.settings.leave_timeout_s)
                return
            began = self.clock.monotonic()
            try:
                await self.ingress.welcome(reply)
                report_ready(os.environ)  # whatever ends it from here on, its start has not failed
                lost = await self._live(reply, stopped, hurry)
            except CannotGoOn:
                raise
            except CorralError as error:
                log.error("the worker's session failed, joining again", reason=error.message, code=error.code)
            except Exception:
                log.exception("the worker's session failed, joining again")
            else:
                if lost is None:
                    return
                log.warning("the controller ended this registration", reason=lost.why)
                if isinstance(lost, Deleted):
                    await unless_set(stopped, self.joining.start_anew())
            if self.clock.monotonic() - began > self.settings.retry_cap_s:
                pause.reset()
            # A controller that takes every registration and knows nobody a moment later must not be hammered.
            await unless_set(stopped, self.clock.sleep(pause.next_s()))

    async def _live(
        self, reply: NodeRegistered, stopped: asyncio.Event, hurry: asyncio.Event
    ) -> RegisterAgain | Deleted | None:
        """One session. None when the worker has left in order, else why the controller has to be asked again."""
        losing: asyncio.Future[RegisterAgain | Deleted] = asyncio.get_running_loop().create_future()

        def lost(meaning: RegisterAgain | Deleted) -> None:
            if not losing.done():
                losing.set_result(meaning)

        async def renew() -> NodeRegistered:
            renewed = await self.joining.renew()
            if not self.settings.bus_urls and _bus_urls(renewed) != _bus_urls(reply):
                lost(RegisterAgain("the bus has moved"))
            return renewed

        source = NodeCredentials(reply, renew=renew, lost=lost, clock=self.clock)
        self.backends.work_for(self.peer_of(reply))
        self.backends.news.start_over()
        async with self.open_bus(reply, source) as bus:
            self.standing.bus_connected = lambda: bus.connected
            try:
                with self.backends.voice.over(bus, reply.id):
                    await self.backends.orders(stopped.set).listen(bus, reply.id)
                    with contextlib.suppress(Unavailable):  # else the first heartbeat says that the bus is down
                        await bus.wait_connected(min(self.settings.heartbeat_interval_s, 2.0))
                    async with alongside(self._tell_load(bus, reply)):  # the controller counts while we drain, too
                        async with alongside(self._heartbeats(bus, reply, lost).run(), self._keep_certificate()):
                            why = await unless_set(stopped, _result_of(losing))
                        if why is None and not self.standing.handing_over:
                            self.standing.leaving = True
                            await self._leaving(reply).leave(hurry)
                return why
            finally:
                self.standing.bus_connected = lambda: False

    async def _tell_load(self, bus: Bus, reply: NodeRegistered) -> None:
        if reply.protocol > 0:  # nobody else listens
            await self.load.run(bus, reply.id)

    async def _keep_certificate(self) -> None:
        async def renew_if_due() -> None:
            if csr := self.ingress.csr_if_due():
                await self.ingress.take_certificate(await self.joining.renew(csr=csr))

        await run_every("ingress certificate", self.settings.heartbeat_interval_s, renew_if_due, clock=self.clock)

    def _heartbeats(
        self, bus: Bus, reply: NodeRegistered, lost: Callable[[RegisterAgain | Deleted], None]
    ) -> Heartbeats:
        return Heartbeats(
            bus,
            self.api,
            self.machine,
            self.standing,
            self.server_clock,
            self.metrics,
            self.backends.news,
            token=self.joining.api_token,
            on_bus=reply.protocol > 0,
            interval_s=self.settings.heartbeat_interval_s,
            http_every=self.settings.http_heartbeat_every,
            lost=lost,
            clock=self.clock,
        )

    def _leaving(self, reply: NodeRegistered) -> Leaving:
        return Leaving(
            self.api,
            node_id=reply.id,
            token=self.joining.api_token,
            in_flight=lambda: self.ingress.in_flight,
            stop_backends=lambda hurry, within_s: stop_backends(self.supervisor, hurry, within_s),
            drain_timeout_s=self.settings.drain_timeout_s,
            leave_timeout_s=self.settings.leave_timeout_s,
            clock=self.clock,
        )


async def _result_of(future: asyncio.Future[T]) -> T:
    return await asyncio.shield(future)


def _bus_urls(reply: NodeRegistered) -> tuple[str, ...]:
    return reply.bus.urls if reply.bus is not None else ()
