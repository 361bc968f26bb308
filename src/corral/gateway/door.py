"""The public door: sorts requests by route, counts them, logs them. The main flow of the gateway starts here.

`/v1/…` is `v1.py`, `/healthz`, `/readyz` and `/metrics` are `own.py`, everything else is the controller's
(`controller_relay.py`). Sockets and bytes are the relay's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from corral.contract.http import ClientGone, Errand, Request, Responder, Shortcut
from corral.gateway.controller_relay import ControllerRelay
from corral.gateway.metrics import CLIENT_GONE, Metrics, RouteClass, RouteCounts
from corral.gateway.own import OWN, OwnRoutes
from corral.gateway.v1 import INFERENCE, MODELS, V1, meant_by
from corral.kit.clock import Clock
from corral.kit.log import get_log

log = get_log(__name__)
_stdlib = logging.getLogger(__name__)
_LOGGED = ("key", "model", "node", "error")  # what the parts note down about a request for its line in the log

Serve = Callable[[Request, Responder], Awaitable[int]]  # answers, and returns the status it gave


@dataclass(frozen=True, slots=True)
class _Way:
    serve: Serve
    counts: RouteCounts
    error_level: int = logging.INFO


class Door:
    """A `Handler` for the relay."""

    def __init__(self, v1: V1, own: OwnRoutes, controller: ControllerRelay, metrics: Metrics, clock: Clock) -> None:
        self.shortcut: Shortcut | None = None  # set by whoever has a router that can tell at once
        self._clock = clock
        self._v1 = v1
        counts = metrics.routes
        models = _Way(v1.models, counts[RouteClass.MODELS])
        self._exact = {
            **dict.fromkeys(INFERENCE, _Way(v1.inference, counts[RouteClass.INFERENCE])),
            # Whoever starts a fleet asks for readiness many times a second until it is there: no news for the log.
            **dict.fromkeys(OWN, _Way(own.serve, counts[RouteClass.OWN], error_level=logging.DEBUG)),
            MODELS: models,
        }
        self._model = models
        self._misplaced = _Way(v1.misplaced, counts[RouteClass.OTHER])
        self._other = _Way(v1.other, counts[RouteClass.OTHER])
        self._controller = _Way(controller.serve, counts[RouteClass.CONTROLLER])

    async def handle(self, request: Request, responder: Responder) -> None:
        way = self._way(request.route)
        way.counts.in_flight += 1
        await self._count(way, request, way.serve(request, responder), self._clock.monotonic())

    async def carry_on(self, errand: Errand, request: Request, responder: Responder, waited_s: float) -> None:
        """`handle` for a request that was decided, and counted as begun, on the short way."""
        started = self._clock.monotonic() - waited_s
        serving = self._v1.carry_on(errand, request, responder, waited_s)
        await self._count(self._way(request.route), request, serving, started)

    async def _count(self, way: _Way, request: Request, serving: Awaitable[int], started: float) -> None:
        status = 500  # what the relay answers when a handler fails
        try:
            status = await serving
        except ClientGone:
            status = CLIENT_GONE
        except asyncio.CancelledError:  # how the relay stops a handler whose client has left
            status = CLIENT_GONE
            raise
        finally:
            seconds = self._clock.monotonic() - started
            way.counts.end(status, seconds)
            level = way.error_level if status >= 400 else logging.DEBUG
            # Asked before anything is built: at `info` a good request must cost nothing here.
            if _stdlib.isEnabledFor(level):
                self._log(level, request, status, seconds)

    def _way(self, route: bytes) -> _Way:
        exact = self._exact.get(route)
        if exact is not None:
            return exact
        if route.startswith(b"/v1/models/"):
            return self._model
        if meant_by(route):
            return self._misplaced
        if route.startswith(b"/v1/") or route == b"/v1":
            return self._other
        return self._controller

    def _log(self, level: int, request: Request, status: int, seconds: float) -> None:
        log.log(
            level,
            "request",
            request_id=request.request_id,
            method=request.method.decode("latin-1"),
            route=request.route[:200].decode("latin-1"),  # never the query: people put keys there
            status=status,
            seconds=round(seconds, 4),
            client=request.peer[0] if request.peer else "",
            **{name: request.extra[name] for name in _LOGGED if name in request.extra},
        )
