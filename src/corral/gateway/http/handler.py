"""The gateway's HTTP handler: finds the route of each request, counts it and logs it. The main flow starts here.

`inference_api.py` serves `/v1/…`, `status_routes.py` serves `/healthz`, `/readyz` and `/metrics`, and
`controller_relay.py` passes all other paths to the controller. Sockets and bytes belong to the relay.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from corral.contract.http import ClientGone, FastPath, PreparedForward, Request, Responder
from corral.contract.receipts import CLIENT_GONE
from corral.gateway.http.controller_relay import ControllerRelay
from corral.gateway.http.forward import Forwarder
from corral.gateway.http.inference_api import INFERENCE_PATHS, MODELS_PATH, InferenceApi, suggest_path
from corral.gateway.http.status_routes import STATUS_PATHS, StatusRoutes
from corral.gateway.receipts.metrics import Metrics, RouteClass, RouteCounts
from corral.kit.clock import Clock
from corral.kit.log import get_log

log = get_log(__name__)
_stdlib = logging.getLogger(__name__)
_LOG_FIELDS = ("key", "model", "node", "error")  # of `Request.extra`, set while the request is served

Serve = Callable[[Request, Responder], Awaitable[int]]  # sends a response and returns its status


@dataclass(frozen=True, slots=True)
class _RouteEntry:
    serve: Serve
    counts: RouteCounts
    error_level: int = logging.INFO


class GatewayHandler:
    """Implements the relay's `Handler`."""

    def __init__(
        self,
        api: InferenceApi,
        forwarder: Forwarder,
        status: StatusRoutes,
        controller: ControllerRelay,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self.fast_path: FastPath | None = None  # set where the router can choose without waiting
        self._clock = clock
        self._forwarder = forwarder
        counts = metrics.routes
        models = _RouteEntry(api.models, counts[RouteClass.MODELS])
        self._exact = {
            **dict.fromkeys(INFERENCE_PATHS, _RouteEntry(api.inference, counts[RouteClass.INFERENCE])),
            # Scripts that start a fleet poll readiness many times a second: a 503 there is not worth a log line.
            **dict.fromkeys(STATUS_PATHS, _RouteEntry(status.serve, counts[RouteClass.STATUS], logging.DEBUG)),
            MODELS_PATH: models,
        }
        self._model = models
        self._misspelt = _RouteEntry(api.misspelt_path, counts[RouteClass.OTHER])
        self._other = _RouteEntry(api.other_path, counts[RouteClass.OTHER])
        self._controller = _RouteEntry(controller.serve, counts[RouteClass.CONTROLLER])

    async def handle(self, request: Request, responder: Responder) -> None:
        entry = self._find_entry(request.route)
        entry.counts.in_flight += 1
        await self._count(entry, request, entry.serve(request, responder), self._clock.monotonic())

    async def handle_prepared(
        self, prepared: PreparedForward, request: Request, responder: Responder, elapsed_s: float
    ) -> None:
        """`handle` for a request that fell back from the fast path, which has counted its start."""
        started = self._clock.monotonic() - elapsed_s
        serving = self._forwarder.forward_prepared(prepared, request, responder, elapsed_s)
        await self._count(self._find_entry(request.route), request, serving, started)

    async def _count(self, entry: _RouteEntry, request: Request, serving: Awaitable[int], started: float) -> None:
        status = 500  # the relay's response when a handler fails
        try:
            status = await serving
        except ClientGone:
            status = CLIENT_GONE
        except asyncio.CancelledError:  # how the relay stops a handler whose client has left
            status = CLIENT_GONE
            raise
        finally:
            seconds = self._clock.monotonic() - started
            entry.counts.end(status, seconds)
            level = entry.error_level if status >= 400 else logging.DEBUG
            # Checked before anything is built: at level `info` a successful request must cost nothing here.
            if _stdlib.isEnabledFor(level):
                self._log(level, request, status, seconds)

    def _find_entry(self, route: bytes) -> _RouteEntry:
        exact = self._exact.get(route)
        if exact is not None:
            return exact
        if route.startswith(b"/v1/models/"):
            return self._model
        if suggest_path(route):
            return self._misspelt
        if route.startswith(b"/v1/") or route == b"/v1":
            return self._other
        return self._controller

    def _log(self, level: int, request: Request, status: int, seconds: float) -> None:
        log.log(
            level,
            "request",
            request_id=request.request_id,
            method=request.method.decode("latin-1"),
            route=request.route[:200].decode("latin-1"),  # never the query: clients put keys there
            status=status,
            seconds=round(seconds, 4),
            client=request.peer[0] if request.peer else "",
            **{name: request.extra[name] for name in _LOG_FIELDS if name in request.extra},
        )
