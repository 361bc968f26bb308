"""Keeps the view fresh: looks every second, takes the whole view now and then, and at once when the bus hints.

The look every second is a conditional read (`If-None-Match`, mostly answered 304): hints may be lost, also without
anybody here noticing, and a revoked key has to be refused within 2 s all the same. The whole read mends what a
revision cannot tell: a database restored from a copy, a fresh ingress token, this machine's clock.

While the controller is away the last view stays, without limit.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Protocol

from corral.contract.view import FleetView
from corral.gateway.link import ReadView
from corral.gateway.metrics import ViewCounts
from corral.gateway.view import Fleet, prepare_fleet
from corral.kit.clock import Clock
from corral.kit.errors import CorralError
from corral.kit.log import get_log
from corral.kit.tasks import Wake, run_every

log = get_log(__name__)

_LOOK_AGAIN_S = 2.0  # a controller that takes longer is as good as away


class ViewSource(Protocol):
    async def read_view(self, known_etag: str | None) -> ReadView | None: ...


class ViewKeeper:
    def __init__(
        self,
        source: ViewSource,
        counts: ViewCounts,
        clock: Clock,
        *,
        check_interval_s: float,
        full_interval_s: float,
        gap_s: float,
    ) -> None:
        self.fleet: Fleet | None = None
        self.on_view: Callable[[FleetView], None] = _nobody  # told of each view that is taken over, when it is
        self.trouble: str | None = "the controller has not been asked yet"
        self._trouble_code = ""
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
        self._begun = self._ended = 0  # looks
        self._end_of_look = asyncio.Condition()

    def hint(self) -> None:
        """Something changed, or may have: look now. Any number of hints before a look count as one."""
        self._wake.set()

    async def look_again(self) -> None:
        """Wait for a look that begins from now on, not for long: what somebody has just been told by the
        controller is in it. All who wait share it."""
        after = self._begun
        self.hint()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_AGAIN_S), self._end_of_look:
                await self._end_of_look.wait_for(lambda: self._ended > after)

    def server_now(self) -> float:
        """Seconds since the epoch on the controller's clock: expiry is judged by the clock that set it."""
        return self._clock.now().timestamp() + self._clock_offset_s

    async def run(self) -> None:
        await run_every("view", self._check_interval_s, self._look_then_rest, clock=self._clock, wake=self._wake)

    async def _look_then_rest(self) -> None:
        self._begun += 1
        this = self._begun
        try:
            await self.look()
        finally:
            self._ended = this
            async with self._end_of_look:
                self._end_of_look.notify_all()
        await self._clock.sleep(self._gap_s)  # a thousand nodes registering at once are not a thousand reads in a row

    async def look(self) -> None:
        full = self._etag is None or self._clock.monotonic() - self._full_read_at >= self._full_interval_s
        try:
            read = await self._source.read_view(None if full else self._etag)
        except CorralError as error:
            self._lost(error)
            return
        self._reached()
        if read is None:
            self._counts.unchanged += 1
        else:
            self._take(read)

    def _take(self, read: ReadView) -> None:
        view = read.view
        first = self.fleet is None
        fleet = prepare_fleet(view)
        self.on_view(view)
        self.fleet = fleet
        self._etag = read.etag or None  # without an ETag every read is a whole one
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

    def _reached(self) -> None:
        self._counts.confirmed_at = self._clock.monotonic()
        if not self._counts.controller_reachable:
            self._counts.controller_reachable = True
            log.info("controller reached")
        self.trouble = None
        self._trouble_code = ""

    def _lost(self, error: CorralError) -> None:
        self._counts.failures += 1
        self._counts.controller_reachable = False
        if self._trouble_code != error.code:  # once per kind of trouble, not once a second
            log.warning(
                "controller cannot be asked; the last view serves" if self.fleet else "controller cannot be asked",
                error=error.message,
                code=error.code,
            )
        self.trouble = error.message
        self._trouble_code = error.code


def _nobody(_view: FleetView) -> None:
    pass
