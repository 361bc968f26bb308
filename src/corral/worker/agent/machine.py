"""The latest hardware report. It is measured in a thread of its own, so that neither a slow command nor a driver that
hangs inside a call ever delays a heartbeat, or the end of the process."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import Protocol, TypeVar

from corral.contract.hardware import HardwareReport
from corral.kit.clock import Clock
from corral.kit.log import get_log

log = get_log(__name__)
T = TypeVar("T")


class Probe(Protocol):
    def full(self) -> HardwareReport: ...

    def refresh(self, report: HardwareReport) -> HardwareReport: ...


class Machine:
    def __init__(
        self,
        probe: Probe,
        clock: Clock,
        *,
        refresh_every_s: float,
        full_every_s: float = 300.0,
        patience_s: float = 20.0,
    ) -> None:
        self.report = HardwareReport()
        self._probe = probe
        self._clock = clock
        self._refresh_every_s = refresh_every_s
        self._full_every_s = full_every_s
        self._patience_s = patience_s

    async def look(self) -> None:
        """Everything, before the first registration. A second look leaves out the driver that held up the first."""
        if not await self._measure(self._probe.full):
            await self._measure(self._probe.full)

    async def run(self) -> None:
        looked_at = self._clock.monotonic()
        while True:
            await self._clock.sleep(self._refresh_every_s)
            if self._clock.monotonic() - looked_at >= self._full_every_s:
                looked_at = self._clock.monotonic()
                await self._measure(self._probe.full)
            else:
                await self._measure(lambda: self._probe.refresh(self.report))

    async def _measure(self, look: Callable[[], HardwareReport]) -> bool:
        try:
            async with asyncio.timeout(self._patience_s):
                self.report = await in_daemon_thread(look)
            return True
        except TimeoutError:
            log.warning("hardware probe does not answer", waited_s=self._patience_s)
        except Exception:
            log.exception("hardware probe failed")
        return False


async def in_daemon_thread(work: Callable[[], T]) -> T:
    """`asyncio.to_thread` keeps the process from ending while a call hangs; a daemon thread does not."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.done():  # whoever waited has left
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as failure:  # handed to whoever waits, whatever it is
            error = failure
        with contextlib.suppress(RuntimeError):  # the loop is closed, perhaps since a moment ago: nobody waits any more
            loop.call_soon_threadsafe(settle, result, error)

    context = contextvars.copy_context()  # so that its log lines carry what ours do
    threading.Thread(target=context.run, args=(run,), name="hardware probe", daemon=True).start()
    return await done
