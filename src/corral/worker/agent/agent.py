"""The worker's sessions with its controller: register, serve orders, register again when necessary, leave.

Read `run` first. A session is the time between one registration and the next: a bus connection with its orders, and
heartbeats. The next session takes nothing over, so there is no half-renewed state.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from corral.bus.api import Bus
from corral.contract.messages.nodes import NodeRegistered
from corral.kit.clock import Clock
from corral.kit.errors import CorralError, Unavailable
from corral.kit.log import get_log
from corral.kit.retry import Backoff
from corral.kit.sockets import report_ready
from corral.kit.tasks import background, run_every, run_until
from corral.worker.agent.controller import ControllerApi
from corral.worker.agent.heartbeat.loop import HeartbeatLoop
from corral.worker.agent.heartbeat.reporter import HeartbeatReporter
from corral.worker.agent.join.bus_access import BusOpener, NodeCredentials
from corral.worker.agent.join.registrar import Registrar
from corral.worker.agent.join.responses import Deleted, RegisterAgain
from corral.worker.agent.leave import HURRIED_S, Departure, at_most, stop_backends
from corral.worker.agent.orders.runner import EventPublisher
from corral.worker.agent.server_clock import ServerClock
from corral.worker.hardware.monitor import HardwareMonitor
from corral.worker.ingress.load_reports import LoadReports
from corral.worker.ingress.server import Ingress
from corral.worker.metrics import WorkerMetrics
from corral.worker.settings import WorkerSettings
from corral.worker.status import FatalError, WorkerStatus
from corral.worker.supervisor.supervisor import Supervisor

log = get_log(__name__)
T = TypeVar("T")

# Subscribes the handlers of orders, given what to call when the controller orders this node to leave.
Subscribe = Callable[[Bus, NodeRegistered, Callable[[], None]], Awaitable[None]]


@dataclass
class Agent:
    settings: WorkerSettings
    api: ControllerApi
    registrar: Registrar
    hardware: HardwareMonitor
    status: WorkerStatus
    server_clock: ServerClock
    metrics: WorkerMetrics
    open_bus: BusOpener
    ingress: Ingress
    supervisor: Supervisor
    load: LoadReports
    publisher: EventPublisher
    reporter: HeartbeatReporter
    subscribe: Subscribe
    clock: Clock

    async def run(self, stopped: asyncio.Event, hurry: asyncio.Event) -> None:
        """Run until `stopped` is set, by a signal or by an order of the controller. Raises `FatalError` after the
        node's requests have ended and its backends have stopped."""
        try:
            await self._run_sessions(stopped, hurry)
        except FatalError:
            self.status.leaving = True
            shutdown = self.settings.shutdown
            await at_most(min(shutdown.drain_timeout_s, shutdown.leave_timeout_s), hurry, self.ingress.wait_idle())
            await stop_backends(self.supervisor, hurry, shutdown.leave_timeout_s)
            raise

    async def _run_sessions(self, stopped: asyncio.Event, hurry: asyncio.Event) -> None:
        retry_cap_s = self.settings.registration.retry_cap_s
        pause = Backoff(self.settings.registration.retry_first_s, retry_cap_s)
        while True:
            reply = await run_until(stopped, self.registrar.join())
            if reply is None and self.status.handing_over:
                return
            if reply is None:
                await stop_backends(self.supervisor, hurry, self.settings.shutdown.leave_timeout_s)
                node_id = self.registrar.known_node_id
                if node_id and not self.status.status:  # else it waits for its approval
                    # A node of an earlier start, or of the worker that this one took over from, would seem silent.
                    await self._departure(node_id).deregister(HURRIED_S)
                return
            began = self.clock.monotonic()
            try:
                await self.ingress.apply_registration(reply)
                report_ready(os.environ)  # to systemd: the start has succeeded, however the worker ends later
                lost = await self._run_session(reply, stopped, hurry)
            except FatalError:
                raise
            except CorralError as error:
                log.error("the session failed, registering again", reason=error.message, code=error.code)
            except Exception:
                log.exception("the session failed, registering again")
            else:
                if lost is None:
                    return
                log.warning("the controller ended this registration", reason=lost.why)
                if isinstance(lost, Deleted):
                    await run_until(stopped, self.registrar.become_new_node())
            if self.clock.monotonic() - began > retry_cap_s:
                pause.reset()
            # A controller that accepts a registration and rejects the node a moment later must not be flooded.
            await run_until(stopped, self.clock.sleep(pause.next_s()))

    async def _run_session(
        self, reply: NodeRegistered, stopped: asyncio.Event, hurry: asyncio.Event
    ) -> RegisterAgain | Deleted | None:
        """One session. None when the worker has left in order, else why it has to register again."""
        losing: asyncio.Future[RegisterAgain | Deleted] = asyncio.get_running_loop().create_future()

        def on_lost(meaning: RegisterAgain | Deleted) -> None:
            if not losing.done():
                losing.set_result(meaning)

        async def renew() -> NodeRegistered:
            renewed = await self.registrar.renew()
            if not self.settings.bus.bus_urls and _bus_urls(renewed) != _bus_urls(reply):
                on_lost(RegisterAgain("the bus has moved"))
            if renewed.signing_key != reply.signing_key:  # the fleet was restored without its secrets
                on_lost(RegisterAgain("the fleet signs with another key"))
            return renewed

        source = NodeCredentials(reply, renew=renew, on_lost=on_lost, clock=self.clock)
        self.reporter.start_session()
        self.status.bus_urls = self.settings.bus.bus_urls or _bus_urls(reply)
        async with self.open_bus(reply, source) as bus:
            self.status.is_bus_connected = lambda: bus.connected
            try:
                with self.publisher.connected_to(bus, reply.id):
                    await self.subscribe(bus, reply, stopped.set)
                    with contextlib.suppress(Unavailable):  # else the first heartbeat reports that the bus is down
                        await bus.wait_connected(min(self.settings.heartbeat.heartbeat_interval_s, 2.0))
                    async with background(self._report_load(bus, reply)):  # also while the node drains
                        async with background(self._heartbeats(bus, reply, on_lost).run(), self._renew_certificate()):
                            why = await run_until(stopped, _result_of(losing))
                        if why is None and not self.status.handing_over:
                            self.status.leaving = True
                            await self._departure(reply.id).leave(hurry)
                return why
            finally:
                self.status.is_bus_connected = lambda: False

    async def _report_load(self, bus: Bus, reply: NodeRegistered) -> None:
        if reply.protocol > 0:  # a LocalAI controller does not subscribe to it
            await self.load.run(bus, reply.id)

    async def _renew_certificate(self) -> None:
        async def renew_if_due() -> None:
            if csr := self.ingress.csr_if_due():
                await self.ingress.take_certificate(await self.registrar.renew(csr=csr))

        interval_s = self.settings.heartbeat.heartbeat_interval_s
        await run_every("ingress certificate", interval_s, renew_if_due, clock=self.clock)

    def _heartbeats(
        self, bus: Bus, reply: NodeRegistered, on_lost: Callable[[RegisterAgain | Deleted], None]
    ) -> HeartbeatLoop:
        return HeartbeatLoop(
            bus,
            self.api,
            self.hardware,
            self.status,
            self.server_clock,
            self.metrics,
            self.reporter,
            self.settings.heartbeat,
            token=self.registrar.api_token,
            uses_bus=reply.protocol > 0,
            on_lost=on_lost,
            clock=self.clock,
        )

    def _departure(self, node_id: str) -> Departure:
        return Departure(
            self.api,
            node_id=node_id,
            token=self.registrar.api_token,
            in_flight=lambda: self.ingress.in_flight,
            supervisor=self.supervisor,
            settings=self.settings.shutdown,
            clock=self.clock,
        )


async def _result_of(future: asyncio.Future[T]) -> T:
    return await asyncio.shield(future)


def _bus_urls(reply: NodeRegistered) -> tuple[str, ...]:
    return reply.bus.urls if reply.bus is not None else ()
