"""What gateways lack: requests that wait, and prompts that could not go where their beginning is known.

A gateway tells the controller it talks to, with its receipts; that one tells the others, since only one of them decides
how many replicas there should be. Whatever is lost on the way is report again a second later, as long as it is so.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter, deque
from collections.abc import Mapping

from corral.bus.api import Bus, Tokens
from corral.contract.messages.hints import GATEWAY_DEMAND, GatewayDemand
from corral.contract.receipts import Receipts
from corral.kit.clock import Clock
from corral.kit.errors import CorralError
from corral.kit.log import get_log

log = get_log(__name__)

_SILENT_AFTER_S = 5.0  # a gateway with requests that wait tells of them every second
_PRESSURE_S = 60.0  # docs/reference/wire/routing.md#prefix-cache
MAX_PRESSURE_REPORTS = 256  # the last ones of a model: gateways report once a second


class Demand:
    name = "demand"

    def __init__(self, bus: Bus, clock: Clock) -> None:
        self._bus = bus
        self._clock = clock
        self._own = uuid.uuid4().hex  # others' words count; our own come back, and were heard before
        self._waiting: dict[str, tuple[float, Mapping[str, int]]] = {}  # by gateway: when it reported, and what
        self._pressure: dict[str, deque[tuple[float, int]]] = {}  # by model: when it was reported, and how much

    async def run(self) -> None:
        await self._bus.subscribe(GATEWAY_DEMAND, self._on_other_controller)
        await asyncio.Event().wait()

    async def take(self, batch: Receipts) -> None:
        """What came with receipts to this controller."""
        has_changed = bool(batch.waiting or batch.pressure or batch.gateway in self._waiting)
        self._hear(batch.gateway, batch.waiting, batch.pressure)
        if has_changed:
            report = GatewayDemand(self._own, batch.gateway, batch.waiting, batch.pressure)
            try:
                await self._bus.publish(GATEWAY_DEMAND, report)
            except CorralError as error:
                log.debug("demand not report", reason=error.message)

    def waiting(self) -> dict[str, int]:
        """Requests that wait at gateways, by model."""
        fresh = self._clock.monotonic() - _SILENT_AFTER_S
        total: Counter[str] = Counter()
        for reported_at, waiting in self._waiting.values():
            if reported_at >= fresh:
                total.update(waiting)
        return dict(total)

    def pressure(self, model: str, within_s: float) -> int:
        """How often within so many seconds a prompt could not go to the replica that knows its beginning. It remembers
        a minute."""
        since = self._clock.monotonic() - min(within_s, _PRESSURE_S)
        return sum(count for at, count in self._pressure.get(model, ()) if at >= since)

    async def _on_other_controller(self, report: GatewayDemand, _tokens: Tokens) -> None:
        if report.controller != self._own:
            self._hear(report.gateway, report.waiting, report.pressure)

    def _hear(self, gateway: str, waiting: Mapping[str, int], pressure: Mapping[str, int]) -> None:
        now = self._clock.monotonic()
        if waiting:
            self._waiting[gateway] = (now, waiting)
        else:
            self._waiting.pop(gateway, None)
        for model, count in pressure.items():
            self._pressure.setdefault(model, deque(maxlen=MAX_PRESSURE_REPORTS)).append((now, count))
        self._forget(now)

    def _forget(self, now: float) -> None:
        for gateway in [each for each, (at, _) in self._waiting.items() if at < now - _SILENT_AFTER_S]:
            del self._waiting[gateway]
        for model in [each for each, report in self._pressure.items() if report[-1][0] < now - _PRESSURE_S]:
            del self._pressure[model]
