"""The gateway's part of the fast path: chooses the replica of a request that needs no wait, without a coroutine.

It never refuses a request and never waits. It leaves every request that is not plainly authorized and plainly routable
(an unknown or restricted key, an unusual body, a model without a ready replica) to `handler.py` and `inference_api.py`,
which send the errors. It evaluates each head (route, key, permissions) once per view of the fleet, and reads each body.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, runtime_checkable

from corral.contract.http import KnownHead, Patience, PreparedForward, Request, Responder, Tap
from corral.gateway.http.auth import authenticate
from corral.gateway.http.forward import ForwardTag, TracedTag
from corral.gateway.http.headers import HIDDEN_FROM_REPLICA, HIDDEN_WITHOUT_PARENT, for_replica
from corral.gateway.http.inference_api import INFERENCE_PATHS
from corral.gateway.http.model_field import read_fast
from corral.gateway.http.rate_limits import KeyLimiter, Limiters
from corral.gateway.receipts.metrics import MAX_UNCOUNTED, RouteCounts
from corral.gateway.receipts.spans import RequestSpans, RequestTrace
from corral.gateway.receipts.usage import NOT_SEEN, TAIL_BYTES, UsageTap, both_ends, read_usage, summarize
from corral.gateway.responses import Response
from corral.gateway.routing.replicas import Route
from corral.gateway.routing.request import RouteRequest
from corral.gateway.view.fleet import Client, Fleet, FleetSource
from corral.kit.tracing.context import TRACEPARENT, TRACESTATE

MAX_POLICIES = 1024
MAX_FORWARDS = 64  # per head; with more replicas of one model some forwards are prepared again

_handler_log = logging.getLogger("corral.gateway.http.handler")

HandlePrepared = Callable[[PreparedForward, Request, Responder, float], Coroutine[Any, Any, None]]


@runtime_checkable
class ImmediateRouter(Protocol):
    """A `Router` that can often choose without waiting."""

    def route_now(self, request: RouteRequest) -> Route | None:
        """A replica with a slot taken, if one can be chosen without waiting; None leaves the request to `route`."""


class HeadPolicy:
    """What one head may do in the present view of the fleet. Without a client, it may not use the fast path."""

    __slots__ = ("client", "expires", "forward", "forwards", "limiter", "route")

    def __init__(self, client: Client | None, limiter: KeyLimiter | None) -> None:
        self.client = client
        self.limiter = limiter
        self.expires = client is not None and client.expires_at != math.inf
        self.forwards: dict[Route, PreparedForward] = {}
        self.route: Route | None = None  # the last route, and its forward
        self.forward: PreparedForward | None = None


class InferenceFastPath:
    """Implements the relay's `FastPath`."""

    def __init__(
        self,
        fleets: FleetSource,
        router: ImmediateRouter,
        counts: RouteCounts,
        handle_prepared: HandlePrepared,
        limiters: Limiters,
        monotonic: Callable[[], float],
        *,
        patience: Patience,
        body_limit_bytes: int,
        spans: RequestSpans | None = None,
    ) -> None:
        self._spans = spans
        self._skip = 0.0 if spans is None else spans.next_skip()  # requests until the next that is traced
        self._handle_prepared = handle_prepared
        self._fleets = fleets
        self._route_now = router.route_now
        self._counts = counts
        self._limiters = limiters
        self._monotonic = monotonic
        self._patience = patience
        self._body_limit_bytes = body_limit_bytes
        self._fleet: Fleet | None = None  # the view for which the policies are valid
        self._policies: dict[KnownHead, HeadPolicy] = {}

    def decide(self, head: KnownHead, body: bytes, traceparent: bytes) -> PreparedForward | None:
        fleet = self._fleets.fleet
        if fleet is not self._fleet:
            self._policies.clear()
            self._fleet = fleet
        if fleet is None:
            return None
        policy = self._policies.get(head) or self._authorize(head, fleet)
        client = policy.client
        if client is None or len(body) > self._body_limit_bytes:
            return None
        if policy.expires and client.expires_at <= self._fleets.server_now():
            return None
        model = read_fast(body)
        if model is None or (client.models is not None and model not in client.models):
            return None
        limiter = policy.limiter
        if limiter is not None and limiter.check(self._monotonic()) is not None:
            return None
        route = self._route_now(RouteRequest(head, fleet, client, model, body))
        if route is None:
            return None
        if limiter is not None and not limiter.begin():
            route.counter.end()
            return None
        if route is not policy.route:
            policy.forward = self._prepare(policy, client, head, route)
            policy.route = route
        self._counts.in_flight += 1
        if self._spans is not None:
            if self._skip and not traceparent:
                self._skip -= 1
            elif policy.forward is not None:
                return self._with_trace(policy.forward, traceparent, self._spans)
        return policy.forward

    def on_response(
        self,
        forward: PreparedForward,
        request_id: bytes,
        status: int,
        started: float,
        ended: float,
        bytes_sent: int,
        response: bytes,
    ) -> None:
        tag: ForwardTag = forward.tag  # type: ignore[assignment]  # set by `_prepare`
        tag.counter.end()
        counts = self._counts
        counts.in_flight -= 1
        uncounted = counts.uncounted
        if len(response) > TAIL_BYTES:
            response = both_ends(response)
        uncounted.append((tag, request_id, status, started, ended, response))
        if forward.traceparent and self._spans is not None:
            self._spans.on_finished(uncounted[-1])
        if len(uncounted) >= MAX_UNCOUNTED:
            counts.count_finished()
        if tag.limiter is not None:
            usage = read_usage(response)
            tag.limiter.end(0 if usage is None else usage.prompt + usage.completion)

    def new_tap(self, forward: PreparedForward) -> UsageTap:
        return UsageTap()

    def on_stream_end(
        self,
        forward: PreparedForward,
        request_id: bytes,
        status: int,
        started: float,
        ended: float,
        bytes_sent: int,
        tap: Tap | None,
    ) -> None:
        tag: ForwardTag = forward.tag  # type: ignore[assignment]  # set by `_prepare`
        tag.counter.end()
        counts = self._counts
        counts.in_flight -= 1
        summary = summarize(tap, started) if isinstance(tap, UsageTap) else NOT_SEEN
        if summary.first_s is not None:
            counts.first_byte.observe(summary.first_s)
        counts.uncounted.append((tag, request_id, status, started, ended, summary))
        if forward.traceparent and self._spans is not None:
            self._spans.on_finished(counts.uncounted[-1])
        if len(counts.uncounted) >= MAX_UNCOUNTED:
            counts.count_finished()
        if tag.limiter is not None:
            tag.limiter.end(summary.usage.prompt + summary.usage.completion)

    def handle_prepared(
        self, forward: PreparedForward, request: Request, responder: Responder, elapsed_s: float
    ) -> Coroutine[Any, Any, None]:
        policy = self._policies.get(forward.head)
        if policy is not None and policy.client is not None:
            request.extra["key"] = policy.client.key_id  # for the log line
        return self._handle_prepared(forward, request, responder, elapsed_s)

    def _authorize(self, head: KnownHead, fleet: Fleet) -> HeadPolicy:
        if len(self._policies) >= MAX_POLICIES:
            self._policies.clear()
        client = self._find_client(head, fleet)
        limiter = None if client is None else self._limiters.of(client.key_id, client.limits, self._monotonic())
        policy = self._policies[head] = HeadPolicy(client, limiter)
        return policy

    def _find_client(self, head: KnownHead, fleet: Fleet) -> Client | None:
        """The client, for exactly the heads that `InferenceApi.inference` would accept; None while every request is
        logged."""
        if head.method != b"POST" or head.path.partition(b"?")[0] not in INFERENCE_PATHS:
            return None
        if any(name == TRACEPARENT for name, _ in head.headers):
            return None  # an unusual one, or a second one
        kinds = [value for name, value in head.headers if name == b"content-type"]
        if (kinds and kinds[0].lower().startswith(b"multipart/")) or _handler_log.isEnabledFor(logging.DEBUG):
            return None
        client = authenticate(fleet, head.headers, self._fleets.server_now)
        return None if isinstance(client, Response) or not client.may_infer else client

    def _with_trace(self, forward: PreparedForward, traceparent: bytes, spans: RequestSpans) -> PreparedForward:
        """The forward of one request that is traced, or whose client says that it is."""
        if traceparent:
            return _forward_below(forward, traceparent, spans)
        self._skip = spans.next_skip()
        return _forward_first(forward, spans)

    def _prepare(self, policy: HeadPolicy, client: Client, head: KnownHead, route: Route) -> PreparedForward:
        forward = policy.forwards.get(route)
        if forward is None:
            forward = head.prepare_forward(
                route.target,
                path=route.path,
                strip=HIDDEN_FROM_REPLICA,
                add=for_replica(route.ingress_token),
                patience=self._patience,
            )
            forward.tag = ForwardTag(client, route, head.path.partition(b"?")[0], policy.limiter)
            if len(policy.forwards) >= MAX_FORWARDS:
                policy.forwards.clear()
            policy.forwards[route] = forward
        return forward


def _forward_below(forward: PreparedForward, traceparent: bytes, spans: RequestSpans) -> PreparedForward:
    """Of a request with this `traceparent`."""
    trace = spans.start_below(traceparent)
    if trace is not None:
        return _traced(forward, trace)
    declined = spans.decline_below(traceparent)
    return forward.with_traceparent(declined, forward.tag) if declined else forward


def _forward_first(forward: PreparedForward, spans: RequestSpans) -> PreparedForward:
    """Of a request that begins a trace: a client's `tracestate` belongs to another one."""
    head = forward.head
    if any(name == TRACESTATE for name, _ in head.headers):
        alone = head.prepare_forward(
            forward.target,
            path=forward.path,
            strip=HIDDEN_WITHOUT_PARENT,
            add=forward.add,
            patience=forward.patience,
        )
        alone.tag = forward.tag
        forward = alone
    return _traced(forward, spans.start_new())


def _traced(forward: PreparedForward, trace: RequestTrace) -> PreparedForward:
    tag: ForwardTag = forward.tag  # type: ignore[assignment]  # set by `_prepare`
    return forward.with_traceparent(trace.client.traceparent(), TracedTag(tag, trace))
