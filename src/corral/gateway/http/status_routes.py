"""The status routes: `/healthz` and `/readyz` without a key, `/metrics` for keys with the role viewer or admin."""

from __future__ import annotations

from typing import Protocol

from corral.contract.http import Request, Responder
from corral.gateway import responses
from corral.gateway.http.auth import authenticate_fresh
from corral.gateway.receipts.metrics import CONTENT_TYPE, Metrics, render
from corral.gateway.responses import TEXT, Response
from corral.gateway.view.fleet import FleetSource
from corral.kit.clock import Clock

STATUS_PATHS = frozenset({b"/healthz", b"/readyz", b"/metrics"})


class GatewayProcesses(Protocol):
    """All processes of a gateway with several."""

    def are_ready(self) -> bool:
        """Whether every process that accepts connections has a view."""

    async def render(self, now: float) -> bytes:
        """`metrics.render` for all processes together."""


class StatusRoutes:
    def __init__(
        self,
        fleets: FleetSource,
        metrics: Metrics,
        clock: Clock,
        *,
        retry_after_s: float,
        processes: GatewayProcesses | None = None,
    ) -> None:
        """`processes`: set in a gateway with several processes."""
        self._fleets = fleets
        self._metrics = metrics
        self._clock = clock
        self._retry_after_s = retry_after_s
        self._processes = processes

    async def serve(self, request: Request, responder: Responder) -> int:
        return await responses.send(responder, await self._answer(request))

    async def _answer(self, request: Request) -> Response:
        if request.method not in (b"GET", b"HEAD"):
            return responses.wrong_method(request.method, b"GET")
        route = request.route
        if route == b"/healthz":
            return Response(200, b"ok\n", (TEXT,))
        if route == b"/readyz":
            return self._readyz()
        return await self._metrics_text(request)

    def _readyz(self) -> Response:
        # A view of any age is enough: a gateway serves without its controller. The reason is general, because no key is
        # needed here; the log has the details.
        if self._fleets.fleet is not None and (self._processes is None or self._processes.are_ready()):
            return Response(200, b"ready\n", (TEXT,))
        why = b"not ready: no view of the fleet yet, the controller has not answered\n"
        return Response(503, why, (TEXT, responses.retry_after(self._retry_after_s)))

    async def _metrics_text(self, request: Request) -> Response:
        found = await authenticate_fresh(self._fleets, request.headers, retry_after_s=self._retry_after_s)
        if isinstance(found, Response):
            return found
        _, client = found
        if not client.may_watch:
            return responses.forbidden(client.role, "read metrics")
        now = self._clock.monotonic()
        text = render(self._metrics, now=now) if self._processes is None else await self._processes.render(now)
        return Response(200, text, ((b"content-type", CONTENT_TYPE),))
