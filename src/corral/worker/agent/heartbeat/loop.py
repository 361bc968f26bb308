"""Sends heartbeats (docs/reference/wire/nodes.md#http-heartbeat, #bus-heartbeat).

The bus carries one at every interval, because that is cheap. HTTP carries them while the bus is down, and every few
intervals: only an HTTP response can say that the controller does not know this node, and what time it is. A LocalAI
controller gets HTTP heartbeats only, and none while the bus is down, as its protocol requires.
"""

from __future__ import annotations

from collections.abc import Callable

from corral.bus.api import Bus
from corral.contract.messages.nodes import NODE_HEARTBEAT, BusHeartbeat, HttpHeartbeat
from corral.kit.clock import Clock
from corral.kit.errors import CorralError
from corral.kit.log import get_log
from corral.worker.agent.controller import ControllerApi, ControllerUnreachable, ErrorResponse
from corral.worker.agent.heartbeat.reporter import HeartbeatReporter
from corral.worker.agent.join.responses import Deleted, RegisterAgain, read_call
from corral.worker.agent.server_clock import ServerClock
from corral.worker.hardware.monitor import HardwareMonitor
from corral.worker.metrics import WorkerMetrics
from corral.worker.settings.node import HeartbeatSettings
from corral.worker.status import WorkerStatus

log = get_log(__name__)
MIN_INTERVAL_S = 0.25  # between two heartbeats, however much changes


class HeartbeatLoop:
    def __init__(
        self,
        bus: Bus,
        api: ControllerApi,
        hardware: HardwareMonitor,
        status: WorkerStatus,
        server_clock: ServerClock,
        metrics: WorkerMetrics,
        reporter: HeartbeatReporter,
        settings: HeartbeatSettings,
        *,
        token: str,
        uses_bus: bool,
        on_lost: Callable[[RegisterAgain | Deleted], None],
        clock: Clock,
    ) -> None:
        """`uses_bus` False: the controller is LocalAI's. `on_lost` is called when the controller rejects the node."""
        self._bus = bus
        self._api = api
        self._hardware = hardware
        self._status = status
        self._server_clock = server_clock
        self._metrics = metrics
        self._reporter = reporter
        self._settings = settings
        self._token = token
        self._uses_bus = uses_bus
        self._on_lost = on_lost
        self._clock = clock
        self._beats = 0
        self._bus_was_up: bool | None = None

    async def run(self) -> None:
        wake = self._reporter.wake
        stop_watching = self._bus.on_change(lambda _: wake.set())
        due = self._clock.monotonic()
        try:
            while True:
                now = self._clock.monotonic()
                regular = now >= due
                if regular:
                    due = now + self._settings.heartbeat_interval_s
                try:
                    await self.send_once(regular=regular)
                except Exception:
                    log.exception("heartbeat failed")
                # One heartbeat reports all changes of this interval.
                await self._clock.sleep(min(MIN_INTERVAL_S, self._settings.heartbeat_interval_s))
                await wake.wait(max(0.0, due - self._clock.monotonic()))
        finally:
            stop_watching()

    async def send_once(self, *, regular: bool = True) -> None:
        """A heartbeat that is not `regular` reports a change, of this node or of the bus connection."""
        up = self._bus.connected
        changed, self._bus_was_up = up is not self._bus_was_up, up
        self._metrics.bus_connected.set(up)
        if not self._uses_bus:
            if up and (regular or changed):
                await self._send_over_http(up)
            return
        is_sent = up and await self._send_over_bus()
        if not (regular or changed):
            return
        # A person may be waiting for the result of the check of the ingress.
        is_due = self._beats % self._settings.http_heartbeat_every == 0 or self._is_ingress_open()
        if not is_sent or changed or is_due:
            await self._send_over_http(up)
        self._beats += 1

    async def _send_over_bus(self) -> bool:
        report = self._hardware.report
        content, on_sent = await self._reporter.collect()
        beat = BusHeartbeat(
            boot_id=self._status.boot_id,
            status_seen=self._status.status,
            available_vram=report.available_vram,
            total_vram=report.total_vram,
            available_ram=report.available_ram,
            total_ram=report.total_ram,
            available_disk=report.available_disk,
            total_disk=report.total_disk,
            gpu_vendor=report.gpu_vendor,
            devices=report.devices,
            inventory=content.inventory,
            inventory_seq=content.inventory_seq,
            orders=content.orders,
            processes=content.processes,
        )
        try:
            await self._bus.publish(NODE_HEARTBEAT, beat, node=self._status.node_id)
        except CorralError as error:
            self._count("bus", "failed")
            log.warning("heartbeat not sent over the bus", reason=error.message)
            return False
        on_sent()
        self._count("bus", "sent")
        return True

    async def _send_over_http(self, up: bool) -> None:
        report = self._hardware.report
        beat = HttpHeartbeat(
            available_vram=report.available_vram,
            total_vram=report.total_vram,
            available_ram=report.available_ram,
            available_disk=report.available_disk,
            total_disk=report.total_disk,
            gpu_vendor=report.gpu_vendor,
            bus=None if up else "down",
            boot_id=self._status.boot_id,
        )
        try:
            received = await self._api.heartbeat(self._status.node_id, self._token, beat)
        except ControllerUnreachable as away:
            self._count("http", "failed")
            log.warning("heartbeat not received", reason=away.message)
            return
        except ErrorResponse as answer:
            self._count("http", "refused")
            meaning = read_call(answer.status, answer.message)
            log.warning("heartbeat refused", reason=meaning.why)
            if isinstance(meaning, RegisterAgain | Deleted):
                self._on_lost(meaning)
            return
        self._count("http", "sent")
        self._server_clock.learn(received.server_time)
        self._metrics.clock_skew.set(self._server_clock.skew_s)
        self._note_status(received.status)
        self._status.ingress_url = received.ingress_url
        self._status.is_ingress_ok = received.ingress_ok
        self._status.ingress_error = received.ingress_error

    def _is_ingress_open(self) -> bool:
        """Whether the controller checks the ingress and has not reached it yet."""
        return bool(self._status.ingress_url) and not self._status.is_ingress_ok

    def _note_status(self, status: str) -> None:
        if status and status != self._status.status:
            log.info("node status changed", before=self._status.status, now=status)
            self._status.status = status

    def _count(self, transport: str, outcome: str) -> None:
        self._metrics.heartbeats.labels(way=transport, outcome=outcome).inc()
