"""Completes a stream that a replica broke off: another replica continues it from the text that the client was sent
(ADR 50). The slow path of models with `resume_streams`; `resumption/` decides, this module routes and relays.

A stream is continued at most twice, on a replica of the same model and revision whose backend can continue a text. All
waits for such replicas together last at most as long as a request waits for a slot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from corral.contract.http import RelayResult, Responder, UpstreamFailed
from corral.gateway.resumption.request import read_resumable
from corral.gateway.resumption.stream import Next, ResumableStream
from corral.gateway.routing.in_flight import Ejection
from corral.gateway.routing.replicas import ReplicaTarget, Route
from corral.gateway.routing.request import Router, RouteRequest
from corral.gateway.routing.settings import RoutingSettings
from corral.kit.clock import Clock
from corral.kit.log import get_log

log = get_log(__name__)

MAX_RESUMPTIONS = 2
# Responses that say that no process has the request: by the ingress (401, 403, 410, 503), or by a busy engine (503).
_NOT_BEGUN = frozenset((0, 401, 403, 410, 503))
_PROCESS_ENDED = 502
_BROKEN = RelayResult(0, False, False, 0.0, 0.0, 0)

RelayContinuation = Callable[[Route, bytes, ResumableStream], Awaitable[RelayResult]]  # to a replica


class Resumed(NamedTuple):
    complete: bool  # the client received the whole stream
    client_gone: bool = False
    times: int = 0  # how often the stream broke off and went on
    replica: ReplicaTarget | None = None  # the last one; None: the first


def resumable_stream(route: Route, path: bytes, body: bytes) -> ResumableStream | None:
    """None: what this replica breaks off stays broken: its model does not ask for more, or its backend cannot, or the
    request is not for plain text."""
    replica = route.replica
    if replica is None or replica.continues is None or route.is_stand_in:
        return None
    request = read_resumable(path, body)
    return None if request is None or not request.can_continue_on(replica.continues) else ResumableStream(request)


class StreamResumer:
    def __init__(self, router: Router, ejection: Ejection, clock: Clock, settings: RoutingSettings) -> None:
        self._router = router
        self._ejection = ejection
        self._clock = clock
        self._settings = settings
        self.resumed = 0  # streams that were broken off and completed
        self.given_up = 0  # resumable streams that were broken off and cut

    async def complete(
        self,
        stream: ResumableStream,
        first: ReplicaTarget,
        result: RelayResult,
        request: RouteRequest,
        responder: Responder,
        relay: RelayContinuation,
    ) -> Resumed:
        """After the first replica has ended the stream or broken it off. `relay` sends a continuation to a replica."""
        times, deadline, replica = 0, 0.0, first
        while not result.client_gone:
            step = stream.next(complete=result.complete)
            if step is Next.END:
                break
            if step is Next.CLOSE:
                times += 1
                break
            if step is Next.CUT or times >= MAX_RESUMPTIONS:
                return self._give_up(stream, responder, times, replica)
            deadline = deadline or self._clock.monotonic() + self._settings.queue_wait_s
            self._ejection.eject_process(replica.seen.process_id)
            continued = await self._continue(stream, step, first, request, relay, deadline)
            if continued is None:
                return self._give_up(stream, responder, times, replica)
            replica, result = continued
            times += 1
        if result.client_gone:  # clients go when they have read `[DONE]`, before the body has ended
            self.resumed += stream.is_done and times > 0
            return Resumed(stream.is_done, not stream.is_done, times, replica)
        responder.end(stream.end(step), complete=True)
        self.resumed += times > 0
        if times:
            log.info("stream resumed", model=first.seen.model, node=replica.node_name, times=times)
        return Resumed(True, False, times, replica)

    def _give_up(self, stream: ResumableStream, responder: Responder, times: int, replica: ReplicaTarget) -> Resumed:
        self.given_up += 1
        responder.end(stream.end(Next.CUT), complete=False)
        return Resumed(False, False, times, replica)

    async def _continue(
        self,
        stream: ResumableStream,
        step: Next,
        first: ReplicaTarget,
        request: RouteRequest,
        relay: RelayContinuation,
        deadline: float,
    ) -> tuple[ReplicaTarget, RelayResult] | None:
        """The replica that continued the stream, and how that ended; None: no replica could."""
        only_counts = step is Next.COUNT
        sent = stream.begin_continuation(only_counts=only_counts)
        if sent is None:
            return None
        for _ in range(self._settings.tries):
            route = await self._route(request, first, deadline)
            if route is None:
                return None
            replica = route.replica
            assert replica is not None
            assert replica.continues is not None
            try:
                body = stream.request.continuation(replica.continues, replica.seen.model, sent, only_counts=only_counts)
                result = await relay(route, body, stream)
                self._ejection.on_reached(route.counter)
                return replica, result
            except UpstreamFailed as failure:
                log.debug("stream not continued", node=replica.node_name, reason=str(failure))
                if not failure.refused or failure.status == _PROCESS_ENDED:
                    return replica, _BROKEN  # it had the request, which counts: it may be what ends processes
                if failure.status not in _NOT_BEGUN:
                    return None  # the engine refuses it
                self._ejection.eject_process(replica.seen.process_id)
            except ValueError as error:
                log.debug("stream cannot be continued", model=first.seen.model, reason=str(error))
                return None
            finally:
                route.counter.end()
        return None

    async def _route(self, request: RouteRequest, first: ReplicaTarget, deadline: float) -> Route | None:
        """A route to a replica that can continue what `first` began. While a revision is on trial, some turns are those
        of the other revision."""
        for _ in range(self._settings.tries):
            try:
                async with asyncio.timeout(max(0.0, deadline - self._clock.monotonic())):
                    route = await self._router.route(request)
            except TimeoutError:
                return None
            if not isinstance(route, Route):
                return None
            if _can_continue(route, first):
                return route
            route.counter.end()
        return None


def _can_continue(route: Route, first: ReplicaTarget) -> bool:
    replica = route.replica
    return (
        replica is not None
        and replica.continues is not None
        and (replica.seen.model, replica.seen.revision) == (first.seen.model, first.seen.revision)
    )
