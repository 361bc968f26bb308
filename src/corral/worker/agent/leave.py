"""Leaves the cluster in order (docs/reference/wire/nodes.md#leaving): drain, stop the backends, deregister.

Every step has a deadline and may fail: a controller that cannot be reached notices the missing heartbeats.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from corral.kit.clock import Clock
from corral.kit.log import get_log
from corral.worker.agent.controller import ControllerApi, ControllerUnreachable, ErrorResponse
from corral.worker.settings.node import ShutdownSettings
from corral.worker.supervisor.supervisor import Supervisor

log = get_log(__name__)
DEREGISTER_TIMEOUT_S = 10.0
HURRIED_S = 2.0
POLL_S = 1.0


class Departure:
    def __init__(
        self,
        api: ControllerApi,
        *,
        node_id: str,
        token: str,
        in_flight: Callable[[], int],
        supervisor: Supervisor,
        settings: ShutdownSettings,
        clock: Clock,
    ) -> None:
        """`in_flight` counts the requests at the ingress."""
        self._api = api
        self._node_id = node_id
        self._token = token
        self._in_flight = in_flight
        self._supervisor = supervisor
        self._settings = settings
        self._clock = clock

    async def leave(self, hurry: asyncio.Event) -> None:
        """Heartbeats must have ended. `hurry` (a second signal) ends all waiting; the worker still deregisters."""
        leave_s = self._settings.leave_timeout_s
        deregister_s = min(DEREGISTER_TIMEOUT_S, leave_s / 3)
        until = self._clock.monotonic() + leave_s - deregister_s
        await at_most(leave_s - deregister_s, hurry, self._drain())
        await stop_backends(self._supervisor, hurry, max(HURRIED_S, until - self._clock.monotonic()))
        await self.deregister(min(HURRIED_S, deregister_s) if hurry.is_set() else deregister_s)

    async def _drain(self) -> None:
        drain_s = self._settings.drain_timeout_s
        await self._call("drain", self._api.drain)
        try:
            async with asyncio.timeout(drain_s):
                while in_flight := max(self._in_flight(), await self._controllers_count()):
                    log.info("leaving when requests in flight have ended", in_flight=in_flight)
                    await self._clock.sleep(min(POLL_S, drain_s))
        except TimeoutError:
            log.warning("leaving with requests in flight", waited_s=drain_s)

    async def _controllers_count(self) -> int:
        try:
            return await self._api.in_flight(self._node_id, self._token)
        except (ErrorResponse, ControllerUnreachable) as error:
            log.debug("the controller does not report its count", reason=error.message)
            return 0  # the ingress sees the connections itself

    async def deregister(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._call("deregister", self._api.deregister)
        except TimeoutError:
            log.warning("the controller did not deregister this node in time")

    async def _call(self, what: str, call: Callable[[str, str], Awaitable[None]]) -> None:
        try:
            await call(self._node_id, self._token)
        except (ErrorResponse, ControllerUnreachable) as error:
            log.warning("call to the controller failed", what=what, reason=error.message)


async def stop_backends(supervisor: Supervisor, hurry: asyncio.Event, within_s: float) -> None:
    """Stop every backend process: with SIGTERM while there is time, then with SIGKILL."""

    async def stop(**how: Any) -> None:
        await supervisor.stop_all(closing=True, **how)

    await at_most(max(0.0, within_s - HURRIED_S), hurry, stop())
    await at_most(HURRIED_S, asyncio.Event(), stop(grace_s=0.0, force=True))


async def at_most(seconds: float, hurry: asyncio.Event, work: Awaitable[None]) -> None:
    """Do the work, but stop after so many seconds, or when `hurry` is set."""
    task = asyncio.ensure_future(work)
    hurried = asyncio.ensure_future(hurry.wait())
    try:
        await asyncio.wait((task, hurried), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        hurried.cancel()
        if not task.done():
            task.cancel()
        await asyncio.gather(task, hurried, return_exceptions=True)
