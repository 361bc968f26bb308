"""The ingress's part of the fast path: passes a request for a serving process on at once (`relay/fast_path.py`).

It never refuses a request. It leaves every request that is not plainly acceptable (an invalid token, a process that is
gone or speaks gRPC, `/v1/responses`, another route) to `routes.py`, which sends the errors. It evaluates each head
once, the validity of the head's token once a second, and the state of the process for every request.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import NamedTuple

from corral.contract.access import Scope
from corral.contract.http import (
    Headers,
    KnownHead,
    PreparedForward,
    Request,
    Responder,
    Strip,
    Tap,
    UpstreamFailed,
)
from corral.contract.manifest import GRPC
from corral.inference.engine_errors import may_be_explained
from corral.inference.responses import ROUTE as RESPONSES
from corral.kit.tracing.context import TRACEPARENT, TraceContext
from corral.kit.tracing.otlp import SpanTemplate
from corral.kit.tracing.tracer import Tracer
from corral.worker.ingress.in_flight import InFlight
from corral.worker.ingress.replicas import OURS, OURS_AND_PARENT, PREFIX, ReplicaRelay
from corral.worker.ingress.spans import add_finished, new_template, record_request
from corral.worker.ingress.tokens import TokenVerifier
from corral.worker.supervisor.table import Running

_monotonic = time.monotonic
MAX_POLICIES = 1024
_routes_log = logging.getLogger("corral.worker.ingress.routes")
_RECHECK_S = 1.0  # of a valid token: within this time a change of the cluster is noticed


class HeadPolicy:
    """What one head may do. Without a process id, it may not use the fast path."""

    __slots__ = ("authorization", "forward", "path", "process_id", "running", "span_template", "valid_until")

    def __init__(self, process_id: str, path: bytes, authorization: bytes) -> None:
        self.process_id = process_id
        self.path = path  # as the process sees it
        self.authorization = authorization
        self.valid_until = 0.0  # on the monotonic clock
        self.running: Running | None = None
        self.forward: PreparedForward | None = None
        self.span_template: SpanTemplate | None = None  # of this head and `running`, from its first traced request on


class TracedRequest(NamedTuple):
    """The tag of the forward of a single, traced request. Of other forwards the tag is the process."""

    process_id: str
    running: Running
    context: TraceContext
    span_template: SpanTemplate


class IngressFastPath:
    """Implements the relay's `FastPath`."""

    def __init__(
        self, replicas: ReplicaRelay, tokens: TokenVerifier, in_flight: InFlight, tracer: Tracer | None = None
    ) -> None:
        self._tracer = tracer
        self._replicas = replicas
        self._tokens = tokens
        self._in_flight = in_flight
        self.running = 0  # requests in flight
        self.ended: Counter[int] = Counter()  # by status, since the metrics were last updated
        self._policies: dict[KnownHead, HeadPolicy] = {}

    def decide(self, head: KnownHead, body: bytes, traceparent: bytes) -> PreparedForward | None:
        policy = self._policies.get(head) or self._authorize(head)
        process_id = policy.process_id
        if not process_id:
            return None
        if _monotonic() >= policy.valid_until and not self._is_valid(policy):
            return None
        running = self._replicas.serving(process_id)
        if running is None or running.protocol == GRPC:
            return None
        if running is not policy.running:
            route = self._replicas.route_to(running)
            policy.running = running
            policy.forward = head.prepare_forward(route.target, path=policy.path, strip=OURS, add=route.add)
            policy.forward.tag = running
            policy.span_template = None
        self._in_flight.begin(running.process_id)
        self.running += 1
        if traceparent and self._tracer is not None:
            return self._trace(policy, head, running, traceparent, self._tracer)
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
        self._end(forward, status)
        if forward.traceparent:
            self._add_span(forward, request_id, status, started, ended)

    def new_tap(self, forward: PreparedForward) -> None:
        """The ingress needs no tap."""

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
        self._end(forward, status)
        if forward.traceparent:
            self._add_span(forward, request_id, status, started, ended)

    def _end(self, forward: PreparedForward, status: int) -> None:
        self._in_flight.end(forward.tag.process_id)  # type: ignore[attr-defined]  # set by `decide`
        self.running -= 1
        self.ended[status] += 1

    async def handle_prepared(
        self, forward: PreparedForward, request: Request, responder: Responder, elapsed_s: float
    ) -> None:
        tag = forward.tag
        if isinstance(tag, TracedRequest):
            await self._relay_traced(forward, tag, request, responder, elapsed_s)
        else:
            assert isinstance(tag, Running)
            await self._relay(forward, tag, responder, OURS, forward.add)

    async def _relay_traced(
        self, forward: PreparedForward, tag: TracedRequest, request: Request, responder: Responder, elapsed_s: float
    ) -> None:
        assert self._tracer is not None
        add = (*forward.add, (TRACEPARENT, forward.traceparent))
        with record_request(
            self._tracer, tag.context, request.method, forward.path, tag.running, request.request_id
        ) as span:
            span.started_at -= elapsed_s
            status = await self._relay(forward, tag.running, responder, OURS_AND_PARENT, add)
            span.on_status(status)

    async def _relay(
        self, forward: PreparedForward, running: Running, responder: Responder, strip: Strip, add: Headers
    ) -> int:
        status = 500
        try:
            result = await responder.relay(
                forward.target,
                path=forward.path,
                strip=strip,
                add=add,
                unwanted=may_be_explained,
                reads_unwanted=True,
            )
            status = result.status
        except UpstreamFailed as failure:
            status = await self._replicas.send_failure(responder, running, failure)
        finally:
            self._in_flight.end(running.process_id)
            self.running -= 1
            self.ended[status] += 1
        return status

    def _trace(
        self, policy: HeadPolicy, head: KnownHead, running: Running, traceparent: bytes, tracer: Tracer
    ) -> PreparedForward | None:
        context, forward = tracer.join_one(traceparent), policy.forward
        if context is None or forward is None:
            return forward
        if policy.span_template is None:
            policy.span_template = new_template(head.method, policy.path, running)
        tag = TracedRequest(running.process_id, running, context, policy.span_template)
        return forward.with_traceparent(context.traceparent(), tag)

    def _add_span(self, forward: PreparedForward, request_id: bytes, status: int, started: float, ended: float) -> None:
        tag = forward.tag
        if isinstance(tag, TracedRequest) and self._tracer is not None:
            add_finished(self._tracer, tag.span_template, tag.context, (started, ended), status, request_id)

    def _is_valid(self, policy: HeadPolicy) -> bool:
        left_s = self._tokens.valid_for_s(policy.authorization, Scope.REPLICAS)
        policy.valid_until = _monotonic() + min(left_s, _RECHECK_S)
        return left_s > 0

    def _authorize(self, head: KnownHead) -> HeadPolicy:
        if len(self._policies) >= MAX_POLICIES:
            self._policies.clear()
        policy = self._policies[head] = _read(head)
        return policy


_NO_FAST_PATH = HeadPolicy("", b"", b"")


def _read(head: KnownHead) -> HeadPolicy:
    path = head.path
    shown = [value for name, value in head.headers if name == b"authorization"]
    # While every request is logged, none takes the fast path.
    if not path.startswith(PREFIX) or len(shown) != 1 or _routes_log.isEnabledFor(logging.DEBUG):
        return _NO_FAST_PATH
    if any(name == TRACEPARENT for name, _ in head.headers):  # an unusual one, or a second one
        return _NO_FAST_PATH
    named, slash, rest = path[len(PREFIX) :].partition(b"/")
    if not slash or b"?" in named or path.partition(b"?")[0].endswith(RESPONSES):
        return _NO_FAST_PATH
    return HeadPolicy(named.decode(errors="replace"), slash + rest, shown[0])
