"""Forwards one authorized request for a model: chooses a replica, relays, retries where that is safe, writes the
receipt.

A retry is safe as long as no process has started to work on the request: the ingress refused the connection or the
gateway's own token, or reported that the process is not there. Once per request the gateway also retries where no
response can follow any more: the ingress stopped responding (`routing/ingress_monitor.py`), or reported that the
process ended. Any other failure goes to the client, except that of a stream which another replica may continue
(`stream_resumer.py`). The gateway never retries because a response takes long.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import msgspec

from corral.contract.http import (
    NOT_REACHED,
    PROCESS_ENDED,
    ClientGone,
    Headers,
    Patience,
    PreparedForward,
    RelayResult,
    Request,
    Responder,
    UpstreamFailed,
)
from corral.contract.models import LONGEST_NAME
from corral.contract.receipts import CLIENT_GONE
from corral.gateway import responses
from corral.gateway.http.bodies import BudgetExceeded
from corral.gateway.http.cors import Cors
from corral.gateway.http.headers import HIDDEN_FROM_REPLICA, for_replica, hidden_from_replica
from corral.gateway.http.model_field import FieldReader
from corral.gateway.http.multipart import SpooledBody
from corral.gateway.http.rate_limits import KeyLimiter
from corral.gateway.http.stream_resumer import StreamResumer, resumable_stream
from corral.gateway.receipts.buffer import ReceiptBuffer, ReceiptTemplate, served_by
from corral.gateway.receipts.metrics import RouteCounts
from corral.gateway.receipts.running import RunningRequests
from corral.gateway.receipts.spans import RequestSpans, RequestTrace
from corral.gateway.receipts.usage import NO_USAGE, Usage, UsageTap
from corral.gateway.responses import NO_ERROR, ReceiptError, Response, receipt_error
from corral.gateway.resumption.stream import ResumableStream
from corral.gateway.routing.in_flight import Ejection
from corral.gateway.routing.replicas import ReplicaTarget, Route
from corral.gateway.routing.request import Router, RouteRequest, WaitTimes
from corral.gateway.routing.settings import RoutingSettings
from corral.gateway.view.fleet import Client, FleetSource
from corral.kit.clock import Clock
from corral.kit.log import get_log

log = get_log(__name__)

# Responses of an ingress that are not for the client, by status: the header that marks them.
_INTERNAL_RESPONSES = {status: NOT_REACHED for status in (401, 403, 410, 503)} | {502: PROCESS_ENDED}
_PROCESS_ENDED_STATUS = 502
_LARGE_BODY_BYTES = 256 * 1024  # from here on two writes cost less than one write and a copy
_FAILURE_MESSAGES = {
    503: "No replica of the model could be reached. Try again shortly.",
    504: "The replica did not begin to answer in time.",
    502: "The replica broke off before it answered.",
}


class InferenceRequest(RouteRequest, frozen=True, gc=False):
    """A request for a model that has passed all checks."""

    spooled: SpooledBody | None = None  # the body, where it is kept on disk
    limiter: KeyLimiter | None = None  # counts this request already; the forwarder ends it


class ForwardTag(ReceiptTemplate):
    """The tag of a `PreparedForward`: what the end of a request on the fast path needs."""

    __slots__ = ("limiter",)

    def __init__(self, client: Client, route: Route, path: bytes, limiter: KeyLimiter | None) -> None:
        super().__init__(client, route, path)
        self.limiter = limiter


class TracedTag(ForwardTag):
    """The tag of a forward that is made for a single, traced request."""

    __slots__ = ("shared", "trace")

    def __init__(self, tag: ForwardTag, trace: RequestTrace) -> None:
        super().__init__(tag.client, tag.route, tag.path, tag.limiter)
        self.shared = tag
        self.trace: RequestTrace | None = trace


@dataclass(slots=True)
class _RequestOutcome:
    """What happened to one request over all attempts, for its receipt."""

    client: Client
    model: str
    started: float
    wait_times: WaitTimes
    limiter: KeyLimiter | None
    tap: UsageTap
    trace: RequestTrace | None = None
    traceparent: bytes = b""  # in place of the client's; empty: the client's is passed on
    attempts: int = 0
    is_repeated: bool = False  # sent again although the first process may have started to work on it
    status: int = 500
    replica: ReplicaTarget | None = None
    result: RelayResult | None = None
    ending: str = ""
    error: ReceiptError = NO_ERROR
    resumed: int = 0  # times that the stream broke off and went on
    usage: Usage | None = None  # of a stream that several replicas generated

    def first_s(self) -> float | None:
        """Until the first event with generated content; None where there was none, or the response is not a stream."""
        return None if self.tap.first_at is None else max(0.0, self.tap.first_at - self.started)


class Forwarder:
    def __init__(
        self,
        fleets: FleetSource,
        router: Router,
        counts: RouteCounts,
        receipts: ReceiptBuffer,
        ejection: Ejection,
        clock: Clock,
        cors: Cors,
        settings: RoutingSettings,
        patience: Patience,
        spans: RequestSpans | None = None,
        running: RunningRequests | None = None,
    ) -> None:
        """`spans` None: no request is traced. `running` knows the requests under way."""
        self._running = running or RunningRequests()
        self._spans = spans
        self._fleets = fleets
        self._router = router
        self._counts = counts
        self._receipts = receipts
        self._ejection = ejection
        self._clock = clock
        self._cors = cors
        self._settings = settings
        self._patience = patience
        self._reader = FieldReader()
        self.resumer = StreamResumer(router, ejection, clock, settings)
        self.retries = 0

    async def forward(self, request: Request, responder: Responder, inference: InferenceRequest) -> int:
        """Returns the status that was sent."""
        trace, traceparent = self._start_trace(request)
        outcome = _RequestOutcome(
            inference.client,
            inference.model,
            self._clock.monotonic(),
            inference.wait_times or WaitTimes(),
            inference.limiter,
            UsageTap(),
            trace,
            traceparent,
        )
        return await self._run(request, responder, outcome, inference, None)

    def _start_trace(self, request: Request) -> tuple[RequestTrace | None, bytes]:
        """The trace of a request, and the `traceparent` for its replica in place of the client's."""
        if self._spans is None:
            return None, b""
        trace = self._spans.start(request.headers, request.method)
        return trace, self._spans.decline(request.headers) if trace is None else trace.client.traceparent()

    async def forward_prepared(
        self, prepared: PreparedForward, request: Request, responder: Responder, elapsed_s: float
    ) -> int:
        """`forward` for a request that fell back from the fast path: its slot is taken and its limits are counted."""
        tag = prepared.tag
        assert isinstance(tag, ForwardTag)
        tap = request.extra.get("tap")  # of a stream that has begun
        outcome = _RequestOutcome(
            tag.client,
            tag.route.requested_model,
            self._clock.monotonic() - elapsed_s,
            WaitTimes(),
            tag.limiter,
            tap if isinstance(tap, UsageTap) else UsageTap(),
            tag.trace,
            b"" if self._spans is None else prepared.traceparent,
        )
        return await self._run(request, responder, outcome, None, tag.route)

    async def _run(
        self,
        request: Request,
        responder: Responder,
        outcome: _RequestOutcome,
        inference: InferenceRequest | None,
        route: Route | None,
    ) -> int:
        request.extra["model"] = outcome.model  # for the log line
        self._running.begin(request, outcome)
        try:
            outcome.status = await self._forward(request, responder, outcome, inference, route)
            return outcome.status
        except (asyncio.CancelledError, ClientGone):  # how the relay stops a handler whose client has left
            outcome.status, outcome.ending = CLIENT_GONE, "client_left"
            raise
        finally:
            self._running.end(outcome)
            usage = outcome.usage or (outcome.tap.usage() if outcome.result is not None else NO_USAGE)
            if outcome.limiter is not None:
                outcome.limiter.end(usage.prompt + usage.completion)
            self._write_receipt(request, outcome, usage)

    async def _forward(
        self,
        request: Request,
        responder: Responder,
        outcome: _RequestOutcome,
        inference: InferenceRequest | None,
        route: Route | None,
    ) -> int:
        """One attempt after another. `route` is given for the first attempt of a prepared forward."""
        while True:
            if route is None:
                inference = inference or await self._read_again(request, outcome)
                routed = await self._router.route(inference)
                if isinstance(routed, Response):
                    outcome.replica = None
                    return await self._refuse(request, responder, outcome, routed)
                route = routed
            outcome.attempts += 1
            outcome.replica = route.replica
            if route.replica is not None:
                request.extra["node"] = route.replica.node_name  # for the log line
            stream = None if inference is None else resumable_stream(route, request.route, inference.body)
            try:
                outcome.result = await self._relay(request, responder, outcome, inference, route, stream)
            except (BudgetExceeded, OSError) as error:
                log.error("a request body could not be written to disk", reason=str(error))
                response = responses.no_space("disk", self._settings.retry_after_s)
                return await self._refuse(request, responder, outcome, response)
            except UpstreamFailed as failure:
                if not self._can_retry(route, failure, outcome):
                    request.extra["error"] = str(failure)  # for the log line; the client gets a general message
                    response = self._failure_response(failure)
                    return await self._refuse(request, responder, outcome, response, str(failure))
                self.retries += 1
            else:
                if inference is None or stream is None or not stream.is_edited:
                    return self._on_relayed(outcome, route, outcome.result)
            finally:
                route.counter.end()
            if outcome.result is not None:  # the slot is free: a continuation takes one of its own
                assert inference is not None
                assert stream is not None
                return await self._complete_stream(responder, outcome, inference, route, stream, outcome.result)
            route = None

    async def _relay(
        self,
        request: Request,
        responder: Responder,
        outcome: _RequestOutcome,
        inference: InferenceRequest | None,
        route: Route,
        stream: ResumableStream | None,
    ) -> RelayResult:
        return await responder.relay(
            route.target,
            path=route.path,
            strip=hidden_from_replica(request.headers) if outcome.traceparent else HIDDEN_FROM_REPLICA,
            add=for_replica(route.ingress_token, outcome.traceparent),
            body=None if inference is None else await _body_for(route, inference),
            tap=outcome.tap,
            response_headers=(*self._cors.headers(request), *self._route_headers(route)),
            upgrade=bool(request.upgrade),
            patience=self._patience,
            unwanted=_is_internal,
            editor=stream,
        )

    async def _complete_stream(
        self,
        responder: Responder,
        outcome: _RequestOutcome,
        inference: InferenceRequest,
        route: Route,
        stream: ResumableStream,
        result: RelayResult,
    ) -> int:
        """End a stream that may be continued, or continue it where the replica broke it off."""
        assert route.replica is not None
        self._ejection.on_reached(route.counter)

        async def relay(route: Route, body: bytes, stream: ResumableStream) -> RelayResult:
            outcome.attempts += 1
            return await responder.relay(
                route.target,
                path=route.path,
                strip=hidden_from_replica(inference.request.headers) if outcome.traceparent else HIDDEN_FROM_REPLICA,
                add=for_replica(route.ingress_token, outcome.traceparent),
                body=body,
                tap=outcome.tap,
                patience=self._patience,
                unwanted=_is_error,
                editor=stream,
            )

        resumed = await self.resumer.complete(stream, route.replica, result, inference, responder, relay)
        outcome.resumed = resumed.times
        outcome.replica = resumed.replica or route.replica
        if stream.is_continued:
            outcome.usage = stream.usage()
        if resumed.client_gone:
            outcome.ending = "client_left"
        elif not resumed.complete:
            outcome.ending = "upstream_broke"
        result = result._replace(client_gone=resumed.client_gone)
        return self._counts.count_relayed(result, outcome.first_s())

    def _can_retry(self, route: Route, failure: UpstreamFailed, outcome: _RequestOutcome) -> bool:
        """Whether another replica may get the request. Ejects the replica or node that could not be reached."""
        if not (failure.refused or failure.unresponsive) or route.replica is None:
            return False
        seen = route.replica.seen
        if failure.status:
            self._ejection.eject_process(seen.process_id)
        else:
            self._ejection.eject_node(seen.node_id)
        if failure.unresponsive or failure.status == _PROCESS_ENDED_STATUS:
            if outcome.is_repeated:  # a request that makes processes end must not end all of them
                return False
            outcome.is_repeated = True
        return failure.resendable and outcome.attempts < self._settings.tries

    def _on_relayed(self, outcome: _RequestOutcome, route: Route, result: RelayResult) -> int:
        if route.replica is not None:
            self._ejection.on_reached(route.counter)
        if result.client_gone:
            outcome.ending = "client_left"
        elif not result.complete:
            outcome.ending = "upstream_broke"
        return self._counts.count_relayed(result, outcome.first_s())

    async def _read_again(self, request: Request, outcome: _RequestOutcome) -> InferenceRequest:
        """The request for the router, for a prepared forward whose first attempt failed."""
        fleet = self._fleets.fleet
        assert fleet is not None  # the fast path decided by one, and a view is never removed
        body = await request.body.read(2**62)  # it is complete, and its size was checked when it arrived
        model = self._reader.read(body)
        return InferenceRequest(request, fleet, outcome.client, model, body, outcome.wait_times)

    def _route_headers(self, route: Route) -> Headers:
        headers: list[tuple[bytes, bytes]] = []
        if route.replica is not None:
            if self._settings.expose_node_header:
                node = route.replica.node_name.encode("latin-1", "replace")
                headers += [(b"x-corral-node", node), (b"x-localai-node", node)]
            if route.is_stand_in:
                headers.append((b"x-corral-model", route.replica.seen.model.encode("ascii", "backslashreplace")))
        return headers

    def _failure_response(self, failure: UpstreamFailed) -> Response:
        is_ended = failure.status == _PROCESS_ENDED_STATUS
        status = _PROCESS_ENDED_STATUS if is_ended else responses.status_for(failure)
        headers = (responses.retry_after(self._settings.retry_after_s),) if status == 503 else ()
        return responses.openai_error(
            status, _FAILURE_MESSAGES[status], kind=responses.SERVER, code="upstream_failed", headers=headers
        )

    def _write_receipt(self, request: Request, outcome: _RequestOutcome, usage: Usage) -> None:
        wait_times, total_s = outcome.wait_times, self._clock.monotonic() - outcome.started
        receipt = served_by(
            outcome.replica,
            id=request.request_id,
            at=self._fleets.server_now() - total_s,
            key_id=outcome.client.key_id,
            model=outcome.model[:LONGEST_NAME],  # cut to the longest name: many receipts have to fit into one batch
            path=request.route[:200].decode("latin-1"),
            status=outcome.status,
            queue_ms=_ms(wait_times.queue_s),
            load_ms=_ms(wait_times.load_s),
            first_byte_ms=_ms(outcome.first_s() or 0.0),
            total_ms=_ms(total_s),
            prompt_tokens=usage.prompt,
            completion_tokens=usage.completion,
            estimated=usage.estimated,
            streamed=outcome.tap.streamed,
            ending=outcome.ending,
            tries=max(1, outcome.attempts),
            resumed=outcome.resumed,
            error=outcome.error.code,
            error_text=outcome.error.text,
        )
        self._receipts.add(receipt)
        if self._spans is not None and outcome.trace is not None:
            self._spans.record(outcome.trace, receipt)

    async def _refuse(
        self, request: Request, responder: Responder, outcome: _RequestOutcome, response: Response, reason: str = ""
    ) -> int:
        """`reason`: for the receipt, not for the client."""
        outcome.error = receipt_error(response, reason)
        return await responses.send(responder, response, self._cors.headers(request))


def _is_internal(status: int, headers: Headers) -> bool:
    mark = _INTERNAL_RESPONSES.get(status)
    return mark is not None and any(name == mark for name, _ in headers)


def _is_error(status: int, headers: Headers) -> bool:
    return True  # it is only called for these


async def _body_for(route: Route, inference: InferenceRequest) -> bytes | memoryview | None:
    """The body for the replica; None: as it arrived. Engines know a model by its own name, so a body that names an
    alias, or a model for which another one stands in, gets the replica's model name. Nothing else changes."""
    model = inference.model if route.replica is None else route.replica.seen.model
    if inference.spooled is not None:
        return await inference.spooled.view_for(model)
    if not inference.body:
        return None
    if model == inference.model:
        # A large body is written without a copy at every attempt.
        return inference.body if len(inference.body) < _LARGE_BODY_BYTES else memoryview(inference.body)
    fields = msgspec.json.decode(inference.body, type=dict[str, msgspec.Raw])
    fields["model"] = msgspec.Raw(msgspec.json.encode(model))
    return msgspec.json.encode(fields)


def _ms(seconds: float) -> float:
    return round(max(0.0, seconds) * 1000, 3)
