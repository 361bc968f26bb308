"""The ingress's part of the fast path: passes a request for a serving process on at once (`relay/fast_path.py`).

It never refuses a request. It leaves every request that is not plainly acceptable (an invalid token, a process that is
gone or speaks gRPC, `/v1/responses`, another route) to `routes.py`, which sends the errors. It evaluates each head
once, the validity of the head's token once a second, and the state of the process for every request.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Coroutine
from typing import Any

from corral.contract.access import Scope
from corral.contract.http import KnownHead, PreparedForward, Request, Responder, Tap, UpstreamFailed
from corral.contract.manifest import GRPC
from corral.inference.engine_errors import may_be_explained
from corral.inference.responses import ROUTE as RESPONSES
from corral.kit.tracing.tracer import Tracer
from corral.worker.ingress.in_flight import InFlight
from corral.worker.ingress.replicas import OURS, PREFIX, ReplicaRelay
from corral.worker.ingress.tokens import TokenVerifier
from corral.worker.supervisor.table import Running

_monotonic = time.monotonic
MAX_POLICIES = 1024
_routes_log = logging.getLogger("corral.worker.ingress.routes")
_RECHECK_S = 1.0  # of a valid token: within this time a change of the cluster is noticed


class HeadPolicy:
    """What one head may do. Without a process id, it may not use the fast path."""

    __slots__ = ("authorization", "forward", "path", "process_id", "running", "valid_until")

    def __init__(self, process_id: str, path: bytes, authorization: bytes) -> None:
        self.process_id = process_id
        self.path = path  # as the process sees it
        self.authorization = authorization
        self.valid_until = 0.0  # on the monotonic clock
        self.running: Running | None = None
        self.forward: PreparedForward | None = None


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

    def decide(self, head: KnownHead, body: bytes) -> PreparedForward | None:
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
        self._in_flight.begin(running.process_id)
        self.running += 1
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

    def _end(self, forward: PreparedForward, status: int) -> None:
        self._in_flight.end(forward.tag.process_id)  # type: ignore[attr-defined]  # set by `decide`
        self.running -= 1
        self.ended[status] += 1

    def handle_prepared(
        self, forward: PreparedForward, request: Request, responder: Responder, elapsed_s: float
    ) -> Coroutine[Any, Any, None]:
        return self._relay(forward, responder)

    async def _relay(self, forward: PreparedForward, responder: Responder) -> None:
        running, status = forward.tag, 500
        assert isinstance(running, Running)
        try:
            result = await responder.relay(
                forward.target,
                path=forward.path,
                strip=forward.strip,
                add=forward.add,
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

    def _is_valid(self, policy: HeadPolicy) -> bool:
        left_s = self._tokens.valid_for_s(policy.authorization, Scope.REPLICAS)
        policy.valid_until = _monotonic() + min(left_s, _RECHECK_S)
        return left_s > 0

    def _authorize(self, head: KnownHead) -> HeadPolicy:
        if len(self._policies) >= MAX_POLICIES:
            self._policies.clear()
        is_traced = self._tracer is not None and self._tracer.join(head.headers) is not None
        policy = self._policies[head] = _NO_FAST_PATH if is_traced else _read(head)
        return policy


_NO_FAST_PATH = HeadPolicy("", b"", b"")


def _read(head: KnownHead) -> HeadPolicy:
    path = head.path
    shown = [value for name, value in head.headers if name == b"authorization"]
    # While every request is logged, none takes the fast path.
    if not path.startswith(PREFIX) or len(shown) != 1 or _routes_log.isEnabledFor(logging.DEBUG):
        return _NO_FAST_PATH
    named, slash, rest = path[len(PREFIX) :].partition(b"/")
    if not slash or b"?" in named or path.partition(b"?")[0].endswith(RESPONSES):
        return _NO_FAST_PATH
    return HeadPolicy(named.decode(errors="replace"), slash + rest, shown[0])
