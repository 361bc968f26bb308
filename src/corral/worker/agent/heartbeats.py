"""Saying "I live" (docs/reference/wire/nodes.md#http-heartbeat, #bus-heartbeat).

Over the bus at every interval, because that is cheap. Over HTTP while the bus is down, saying so, and now and then
anyway: only there can the controller answer that it does not know this node, and what time it is.
A LocalAI controller gets HTTP heartbeats only, and none while the bus is down, as its contract wants.
"""

from __future__ import annotations

from collections.abc import Callable

from corral.bus.api import Bus
from corral.contract.messages.nodes import NODE_HEARTBEAT, BusHeartbeat, HttpHeartbeat
from corral.kit.clock import Clock
from corral.kit.errors import CorralError
from corral.kit.log import get_log
from corral.worker.agent.answers import Deleted, RegisterAgain, read_call
from corral.worker.agent.controller import Answered, ControllerApi, ControllerAway
from corral.worker.agent.machine import Machine
from corral.worker.agent.news import News
from corral.worker.agent.server_clock import ServerClock
from corral.worker.agent.standing import Standing
from corral.worker.metrics import WorkerMetrics

log = get_log(__name__)
GAP_S = 0.25  # between two heartbeats, however much there is to tell


class Heartbeats:
    def __init__(
        self,
        bus: Bus,
        api: ControllerApi,
        machine: Machine,
        standing: Standing,
        server_clock: ServerClock,
        metrics: WorkerMetrics,
        news: News,
        *,
        token: str,
        on_bus: bool,
        interval_s: float,
        http_every: int,
        lost: Callable[[RegisterAgain | Deleted], None],
        clock: Clock,
    ) -> None:
        """`on_bus` False: the controller is LocalAI's. `lost` is told when the controller does not know the node."""
        self._bus = bus
        self._api = api
        self._machine = machine
        self._standing = standing
        self._server_clock = server_clock
        self._metrics = metrics
        self._news = news
        self._token = token
        self._on_bus = on_bus
        self._interval_s = interval_s
        self._http_every = http_every
        self._lost = lost
        self._clock = clock
        self._beats = 0
        self._bus_was_up: bool | None = None

    async def run(self) -> None:
        wake = self._news.wake
        stop_watching = self._bus.on_change(lambda _: wake.set())
        due = self._clock.monotonic()
        try:
            while True:
                now = self._clock.monotonic()
                regular = now >= due
                if regular:
                    due = now + self._interval_s
                try:
                    await self.beat(regular=regular)
                except Exception:
                    log.exception("heartbeat failed")
                # Much may happen at once: what changed within the gap goes with one beat.
                await self._clock.sleep(min(GAP_S, self._interval_s))
                await wake.wait(max(0.0, due - self._clock.monotonic()))
        finally:
            stop_watching()

    async def beat(self, *, regular: bool = True) -> None:
        """One that is not `regular` is there for the news in it, or because the bus came or went."""
        up = self._bus.connected
        changed, self._bus_was_up = up is not self._bus_was_up, up
        self._metrics.bus_connected.set(up)
        if not self._on_bus:
            if up and (regular or changed):
                await self._over_http(up)
            return
        told = up and await self._over_bus()
        if not (regular or changed):
            return
        if not told or changed or self._beats % self._http_every == 0:
            await self._over_http(up)
        self._beats += 1

    async def _over_bus(self) -> bool:
        report = self._machine.report
        news, was_told = await self._news.gather()
        beat = BusHeartbeat(
            boot_id=self._standing.boot_id,
            status_seen=self._standing.status,
            available_vram=report.available_vram,
            total_vram=report.total_vram,
            available_ram=report.available_ram,
            total_ram=report.total_ram,
            available_disk=report.available_disk,
            total_disk=report.total_disk,
            gpu_vendor=report.gpu_vendor,
            devices=report.devices,
            inventory=news.inventory,
            inventory_seq=news.inventory_seq,
            orders=news.orders,
            processes=news.processes,
        )
        try:
            await self._bus.publish(NODE_HEARTBEAT, beat, node=self._standing.node_id)
        except CorralError as error:
            self._count("bus", "failed")
            log.warning("heartbeat not sent over the bus", reason=error.message)
            return False
        was_told()
        self._count("bus", "sent")
        return True

    async def _over_http(self, up: bool) -> None:
        report = self._machine.report
        beat = HttpHeartbeat(
            available_vram=report.available_vram,
            total_vram=report.total_vram,
            available_ram=report.available_ram,
            available_disk=report.available_disk,
            total_disk=report.total_disk,
            gpu_vendor=report.gpu_vendor,
            bus=None if up else "down",
            boot_id=self._standing.boot_id,
        )
        try:
            received = await self._api.heartbeat(self._standing.node_id, self._token, beat)
        except ControllerAway as away:
            self._count("http", "failed")
            log.warning("heartbeat not received", reason=away.message)
            return
        except Answered as answer:
            self._count("http", "refused")
            meaning = read_call(answer.status, answer.message)
            log.warning("heartbeat refused", reason=meaning.why)
            if isinstance(meaning, RegisterAgain | Deleted):
                self._lost(meaning)
            return
        self._count("http", "sent")
        self._server_clock.learn(received.server_time)
        self._metrics.clock_skew.set(self._server_clock.skew_s)
        self._see(received.status)

    def _see(self, status: str) -> None:
        if status and status != self._standing.status:
            log.info("the controller sees this node otherwise now", before=self._standing.status, now=status)
            self._standing.status = status

    def _count(self, way: str, outcome: str) -> None:
        self._metrics.heartbeats.labels(way=way, outcome=outcome).inc()
