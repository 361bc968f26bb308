"""Keeps the latest hardware report. A daemon thread measures: neither a slow command nor a driver that hangs inside a
call ever delays a heartbeat, or the end of the process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from corral.contract.hardware import HardwareReport
from corral.kit.clock import Clock
from corral.kit.log import get_log
from corral.kit.threads import in_daemon_thread
from corral.worker.hardware.probe import HardwareProbe

log = get_log(__name__)


class HardwareMonitor:
    def __init__(
        self,
        probe: HardwareProbe,
        clock: Clock,
        *,
        refresh_every_s: float,
        full_every_s: float = 300.0,
        timeout_s: float = 20.0,
    ) -> None:
        self.report = HardwareReport()
        self._probe = probe
        self._clock = clock
        self._refresh_every_s = refresh_every_s
        self._full_every_s = full_every_s
        self._timeout_s = timeout_s

    async def measure_all(self) -> None:
        """Measure everything, before the first registration. The second try leaves out a driver that hung in the
        first."""
        if not await self._measure(self._probe.full):
            await self._measure(self._probe.full)

    async def run(self) -> None:
        measured_at = self._clock.monotonic()
        while True:
            await self._clock.sleep(self._refresh_every_s)
            if self._clock.monotonic() - measured_at >= self._full_every_s:
                measured_at = self._clock.monotonic()
                await self._measure(self._probe.full)
            else:
                await self._measure(lambda: self._probe.refresh(self.report))

    async def _measure(self, measure: Callable[[], HardwareReport]) -> bool:
        try:
            async with asyncio.timeout(self._timeout_s):
                self.report = await in_daemon_thread(measure, name="hardware probe")
            return True
        except TimeoutError:
            log.warning("hardware probe does not answer", waited_s=self._timeout_s)
        except Exception:
            log.exception("hardware probe failed")
        return False
