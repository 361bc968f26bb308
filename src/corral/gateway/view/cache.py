"""Keeps the view up to date: reads it every second, whole now and then, and at once after a hint from the bus.

The read every second is conditional (`If-None-Match`, mostly answered with 304): hints may be lost without notice, and
a revoked key must be refused within 2 s all the same. The whole read covers changes that a revision does not show: a
database restored from a backup, a new ingress token, this machine's clock.

While the controller cannot be reached, the last view stays valid without limit.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from corral.contract.view import FleetView
from corral.gateway.view.controller_link import ControllerLink, ReadView
from corral.gateway.view.fleet import Fleet, prepare_fleet
from corral.kit.clock import Clock
from corral.kit.errors import CorralError
from corral.kit.log import get_log
from corral.kit.tasks import Wake, run_every

log = get_log(__name__)

_REFRESH_TIMEOUT_S = 2.0


@dataclass(slots=True)
class ViewCounts:
    reads: int = 0  # of changed views
    unchanged: int = 0
    failures: int = 0
    hints: int = 0
    revision: int = 0
    keys: int = 0
    models: int = 0
    confirmed_at: float | None = None  # monotonic; when the controller last confirmed this view
    controller_reachable: bool = False
    bus_connected: bool = False


class ViewCache:
    def __init__(
        self,
        source: ControllerLink,
        counts: ViewCounts,
        clock: Clock,
        *,
        check_interval_s: float,
        full_interval_s: float,
        gap_s: float,
    ) -> None:
        self.fleet: Fleet | None = None
        self.on_view: Callable[[FleetView], None] = _ignore_view  # called with each new view
        self.last_error: str | None = "the view has not been read yet"
        self._last_error_code = ""
        self._source = source
        self._counts = counts
        self._clock = clock
        self._check_interval_s = check_interval_s
        self._full_interval_s = full_interval_s
        self._gap_s = gap_s
        self._etag: str | None = None
        self._full_read_at = 0.0
        self._clock_offset_s = 0.0
        self._wake = Wake()
        self._begun = self._ended = 0  # reads
        self._read_ended = asyncio.Condition()

    def hint(self) -> None:
        """The view may have changed: read it now. Any number of hints before a read count as one."""
        self._wake.set()

    async def refresh(self) -> None:
        """Wait a short time for a read that begins from now on: it contains all that the controller has confirmed so
        far. Concurrent calls share it."""
        after = self._begun
        self.hint()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REFRESH_TIMEOUT_S), self._read_ended:
                await self._read_ended.wait_for(lambda: self._ended > after)

    def server_now(self) -> float:
        """Seconds since the epoch on the controller's clock, which has set the expiry of keys."""
        return self._clock.now().timestamp() + self._clock_offset_s

    async def run(self) -> None:
        await run_every("view", self._check_interval_s, self._run_then_pause, clock=self._clock, wake=self._wake)

    async def _run_then_pause(self) -> None:
        self._begun += 1
        this = self._begun
        try:
            await self.run_once()
        finally:
            self._ended = this
            async with self._read_ended:
                self._read_ended.notify_all()
        await self._clock.sleep(self._gap_s)  # a thousand registrations at once must not cause a thousand reads

    async def run_once(self) -> None:
        full = self._etag is None or self._clock.monotonic() - self._full_read_at >= self._full_interval_s
        try:
            read = await self._source.read_view(None if full else self._etag)
        except CorralError as error:
            self._on_error(error)
            return
        self._on_reached()
        if read is None:
            self._counts.unchanged += 1
        else:
            self._apply(read)

    def _apply(self, read: ReadView) -> None:
        view = read.view
        first = self.fleet is None
        fleet = prepare_fleet(view)
        self.on_view(view)
        self.fleet = fleet
        self._etag = read.etag or None  # without an ETag every read is whole
        self._full_read_at = self._clock.monotonic()
        if view.server_time:
            self._clock_offset_s = view.server_time - self._clock.now().timestamp()
        self._count(view)
        if first:
            log.info("first view read", revision=view.revision, keys=len(view.keys), models=len(view.models))

    def _count(self, view: FleetView) -> None:
        self._counts.reads += 1
        self._counts.revision = view.revision
        self._counts.keys = len(view.keys)
        self._counts.models = len(view.models)

    def _on_reached(self) -> None:
        self._counts.confirmed_at = self._clock.monotonic()
        if not self._counts.controller_reachable:
            self._counts.controller_reachable = True
            log.info("controller reached")
        self.last_error = None
        self._last_error_code = ""

    def _on_error(self, error: CorralError) -> None:
        self._counts.failures += 1
        self._counts.controller_reachable = False
        if self._last_error_code != error.code:  # once per kind of error, not once a second
            log.warning(
                "cannot read the view; the last view stays valid" if self.fleet else "cannot read the view",
                error=error.message,
                code=error.code,
            )
        self.last_error = error.message
        self._last_error_code = error.code


def _ignore_view(_view: FleetView) -> None:
    pass
