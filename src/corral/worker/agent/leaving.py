"""Leaving in order (docs/reference/wire/nodes.md#leaving): no new work, let requests end, stop backends, say goodbye.

Every step is bounded and none is essential: a controller that cannot be told notices by the silence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from corral.kit.clock import Clock
from corral.kit.log import get_log
from corral.worker.agent.controller import Answered, ControllerApi, ControllerAway

log = get_log(__name__)
GOODBYE_S = 10.0
HURRIED_S = 2.0
StopBackends = Callable[[asyncio.Event, float], Awaitable[None]]  # within so many seconds, sooner once told to hurry


class Leaving:
    def __init__(
        self,
        api: ControllerApi,
        *,
        node_id: str,
        token: str,
        in_flight: Callable[[], int],
        stop_backends: StopBackends,
        drain_timeout_s: float,
        leave_timeout_s: float,
        clock: Clock,
        poll_s: float = 1.0,
    ) -> None:
        """`in_flight` is the ingress's own count."""
        self._api = api
        self._node_id = node_id
        self._token = token
        self._in_flight = in_flight
        self._stop_backends = stop_backends
        self._drain_timeout_s = drain_timeout_s
        self._leave_timeout_s = leave_timeout_s
        self._clock = clock
        self._poll_s = min(poll_s, drain_timeout_s)

    async def leave(self, hurry: asyncio.Event) -> None:
        """Heartbeats must have ended. `hurry` (a second signal) cuts the waiting short; goodbye is still tried."""
        goodbye_s = min(GOODBYE_S, self._leave_timeout_s / 3)
        until = self._clock.monotonic() + self._leave_timeout_s - goodbye_s
        await at_most(self._leave_timeout_s - goodbye_s, hurry, self._drain())
        await self._stop_backends(hurry, max(HURRIED_S, until - self._clock.monotonic()))
        await self._goodbye(min(HURRIED_S, goodbye_s) if hurry.is_set() else goodbye_s)

    async def _drain(self) -> None:
        await self._tell("drain", self._api.drain)
        try:
            async with asyncio.timeout(self._drain_timeout_s):
                while in_flight := max(self._in_flight(), await self._controllers_count()):
                    log.info("leaving when requests under way have ended", in_flight=in_flight)
                    await self._clock.sleep(self._poll_s)
        except TimeoutError:
            log.warning("leaving with requests under way", waited_s=self._drain_timeout_s)

    async def _controllers_count(self) -> int:
        try:
            return await self._api.in_flight(self._node_id, self._token)
        except (Answered, ControllerAway) as error:
            log.debug("the controller does not tell its count", reason=error.message)
            return 0  # ours is the one that sees the connections

    async def _goodbye(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._tell("deregister", self._api.deregister)
        except TimeoutError:
            log.warning("the controller did not take our goodbye in time")

    async def _tell(self, what: str, call: Callable[[str, str], Awaitable[None]]) -> None:
        try:
            await call(self._node_id, self._token)
        except (Answered, ControllerAway) as error:
            log.warning("the controller could not be told", what=what, reason=error.message)


class Stoppable(Protocol):
    """The part of the supervisor that leaving needs."""

    async def stop_all(self, *, grace_s: float | None = None, force: bool = False, closing: bool = False) -> object: ...


async def stop_backends(processes: Stoppable, hurry: asyncio.Event, within_s: float) -> None:
    """Nothing of ours runs on. Each is asked first, for as long as there is time; who is still there then is killed."""

    async def stop(**how: Any) -> None:
        await processes.stop_all(closing=True, **how)

    await at_most(max(0.0, within_s - HURRIED_S), hurry, stop())
    await at_most(HURRIED_S, asyncio.Event(), stop(grace_s=0.0, force=True))


async def at_most(seconds: float, hurry: asyncio.Event, work: Awaitable[None]) -> None:
    """Do the work, but no longer than this, and not beyond `hurry`."""
    task = asyncio.ensure_future(work)
    hurried = asyncio.ensure_future(hurry.wait())
    try:
        await asyncio.wait((task, hurried), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        hurried.cancel()
        if not task.done():
            task.cancel()
        await asyncio.gather(task, hurried, return_exceptions=True)
