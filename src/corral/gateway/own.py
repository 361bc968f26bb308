"""The gateway's own three routes: `/healthz` and `/readyz` for anybody, `/metrics` for keys that may watch."""

from __future__ import annotations

from typing import Protocol

from corral.contract.http import Request, Responder
from corral.gateway import answers
from corral.gateway.admission import FleetSource, admit_lately
from corral.gateway.answers import TEXT, Answer
from corral.gateway.metrics import CONTENT_TYPE, Metrics, render
from corral.gateway.relaying import send
from corral.kit.clock import Clock

OWN = frozenset({b"/healthz", b"/readyz", b"/metrics"})


class Siblings(Protocol):
    """All processes of a gateway that runs in several."""

    def are_ready(self) -> bool:
        """Whether every process that accepts connections has a view."""

    async def render(self, now: float) -> bytes:
        """`metrics.render` of all of them together."""


class OwnRoutes:
    def __init__(
        self,
        fleets: FleetSource,
        metrics: Metrics,
        clock: Clock,
        *,
        retry_after_s: float,
        siblings: Siblings | None = None,
    ) -> None:
        """`siblings`: the other processes of this gateway, where there are any."""
        self._fleets = fleets
        self._metrics = metrics
        self._clock = clock
        self._retry_after_s = retry_after_s
        self._siblings = siblings

    async def serve(self, request: Request, responder: Responder) -> int:
        return await send(responder, await self._answer(request))

    async def _answer(self, request: Request) -> Answer:
        if request.method not in (b"GET", b"HEAD"):
            return answers.wrong_method(request.method, b"GET")
        route = request.route
        if route == b"/healthz":
            return Answer(200, b"ok\n", (TEXT,))
        if route == b"/readyz":
            return self._readiness()
        return await self._numbers(request)

    def _readiness(self) -> Answer:
        # The view counts however old it is: without its controller a gateway is still of use. The reason stays
        # general, since anybody may ask; the log has the details.
        if self._fleets.fleet is not None and (self._siblings is None or self._siblings.are_ready()):
            return Answer(200, b"ready\n", (TEXT,))
        why = b"not ready: no view of the fleet yet, the controller has not answered\n"
        return Answer(503, why, (TEXT, answers.retry_after(self._retry_after_s)))

    async def _numbers(self, request: Request) -> Answer:
        fleet = self._fleets.fleet
        if fleet is None:
            return answers.not_ready(self._retry_after_s)
        _, client = await admit_lately(self._fleets, fleet, request.headers)
        if isinstance(client, Answer):
            return client
        if not client.may_watch:
            return answers.forbidden(client.role, "read metrics")
        now = self._clock.monotonic()
        text = render(self._metrics, now=now) if self._siblings is None else await self._siblings.render(now)
        return Answer(200, text, ((b"content-type", CONTENT_TYPE),))
