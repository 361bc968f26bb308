"""The spans of a traced request, built from its receipt after the request has ended (`kit/tracing/exporter.py`).

One for the request as the client sees it, one for each time it waited, and one for the call of the replica, whose id
the worker's ingress gets as the parent of its own span.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from corral.contract.codec import decode
from corral.contract.http import Headers
from corral.contract.receipts import Receipt
from corral.gateway.receipts.buffer import FinishedRequest, ReceiptBuffer, ReceiptTemplate
from corral.gateway.receipts.usage import StreamSummary, Usage, read_plain_usage
from corral.kit.tracing.context import TraceContext, find_parent, parse_traceparent
from corral.kit.tracing.otlp import Event, Span, SpanKind, SpanTemplate, Value, encode_span
from corral.kit.tracing.tracer import Tracer

# Values of `gen_ai.operation.name` in OpenTelemetry's semantic conventions.
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
_OTHER_OPERATION = "generate_content"
_FIRST_TOKEN = "first token"
_ENDINGS = {"client_left": "the client disconnected", "upstream_broke": "the replica broke off"}


class RequestTrace(NamedTuple):
    """The ids of a request's spans, chosen before it is forwarded."""

    server: TraceContext
    client: TraceContext
    method: bytes = b"POST"


_NO_TRACE = RequestTrace(TraceContext("", "", ""), TraceContext("", "", ""))


class RequestSpans:
    """Traces the requests of one gateway process."""

    def __init__(self, tracer: Tracer, receipts: ReceiptBuffer) -> None:
        self._tracer = tracer
        self._receipts = receipts
        self._finished: list[FinishedRequest] = []  # traced ones that ended on the fast path and are not recorded yet
        self.next_skip = tracer.next_skip

    def start(self, headers: Headers, method: bytes) -> RequestTrace | None:
        server = self._tracer.start(headers)
        return None if server is None else RequestTrace(server, server.child(), method)

    def start_new(self) -> RequestTrace:
        """For a request without a `traceparent` that is to be traced."""
        server = TraceContext.first()
        return RequestTrace(server, server.child())

    def start_below(self, traceparent: bytes) -> RequestTrace | None:
        """For a request with this `traceparent`; None: the request is not traced."""
        server = self._tracer.start_below(traceparent)
        return None if server is None else RequestTrace(server, server.child())

    def decline(self, headers: Headers) -> bytes:
        """The `traceparent` of a request that `start` does not trace, in place of the client's; b"": the client's."""
        return self._tracer.decline(find_parent(headers))

    def decline_below(self, traceparent: bytes) -> bytes:
        """`decline` for a request that `start_below` does not trace."""
        return self._tracer.decline(parse_traceparent(traceparent))

    def record(self, trace: RequestTrace, receipt: Receipt) -> None:
        self._tracer.exporter.add(lambda: [encode_span(each) for each in build_spans(trace, receipt)])

    def on_finished(self, request: FinishedRequest) -> None:
        """A request that was sent with a `traceparent` ended on the fast path."""
        if request[0].trace is not None:
            self._finished.append(request)

    def record_finished(self) -> None:
        """Record the requests that ended on the fast path."""
        offset_s = self._receipts.offset_s
        finished, self._finished = self._finished, []
        for template, request_id, status, started, ended, response in finished:
            if template.trace is not None:
                times = started + offset_s, ended + offset_s
                # The response itself is not kept: the collector may be away.
                summary = _summarize(response) if isinstance(response, bytes) else response
                self._tracer.exporter.add(partial(write_spans, template, request_id, status, times, summary))


def _summarize(response: bytes) -> StreamSummary:
    return StreamSummary(Usage(*(read_plain_usage(response) or ())), None, streamed=False)


class RequestSpanTemplates:
    """Of the requests that one client sent to one replica and that ended on the fast path."""

    __slots__ = ("call", "request")

    def __init__(self, template: ReceiptTemplate) -> None:
        receipt = decode(Receipt, template.start() + b',"id":"","at":0,"status":200}')
        request, *calls = build_spans(_NO_TRACE, receipt)
        self.request = SpanTemplate(request, ("http.response.status_code", "corral.request.id"))
        tokens = ("gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens")
        self.call = SpanTemplate(calls[0], tokens) if calls else None


def write_spans(
    template: ReceiptTemplate, request_id: bytes, status: int, times: tuple[float, float], summary: StreamSummary
) -> Sequence[str]:
    """What `build_spans` has for such a request: it never waited, and one replica answered it, without an error.
    `times`: its start and its end, in seconds since the epoch."""
    trace, shared = template.trace, template.shared or template
    assert trace is not None
    templates = shared.span_templates = shared.span_templates or RequestSpanTemplates(shared)
    spans = [templates.request.write(trace.server, times, (status, request_id.decode()))]
    if templates.call is not None:
        first = Event(_FIRST_TOKEN, times[0] + summary.first_s) if summary.first_s else None
        tokens = summary.usage.prompt, summary.usage.completion
        spans.append(templates.call.write(trace.client, times, tokens, first))
    return spans


def build_spans(trace: RequestTrace, receipt: Receipt) -> Sequence[Span]:
    ended_at = receipt.at + receipt.total_ms / 1000
    error = _ENDINGS.get(receipt.ending, "") or (f"status {receipt.status}" if receipt.status >= 500 else "")
    spans = [
        Span(
            context=trace.server,
            name=f"{trace.method.decode('latin-1')} {receipt.path}",
            kind=SpanKind.SERVER,
            started_at=receipt.at,
            ended_at=ended_at,
            attributes={
                "http.request.method": trace.method.decode("latin-1"),
                "url.path": receipt.path,
                "http.response.status_code": receipt.status,
                "corral.request.id": receipt.id,
                "corral.key.id": receipt.key_id,
                **_error_type(receipt),
            },
            error=error,
        )
    ]
    at = receipt.at
    for name, waited_ms in (("wait for the model to load", receipt.load_ms), ("wait for a slot", receipt.queue_ms)):
        if waited_ms > 0:
            spans.append(
                Span(
                    context=trace.server.child(),
                    name=name,
                    kind=SpanKind.INTERNAL,
                    started_at=at,
                    ended_at=at + waited_ms / 1000,
                )
            )
            at += waited_ms / 1000
    if receipt.process_id:
        spans.append(_call_of_the_replica(trace.client, receipt, min(at, ended_at), ended_at, error))
    return spans


def _call_of_the_replica(
    context: TraceContext, receipt: Receipt, started_at: float, ended_at: float, error: str
) -> Span:
    operation = _OPERATIONS.get(receipt.path, _OTHER_OPERATION)
    attributes: dict[str, Value] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "corral",
        "gen_ai.request.model": receipt.model,
        "gen_ai.response.model": receipt.served_by or receipt.model,
        "gen_ai.usage.input_tokens": receipt.prompt_tokens,
        "gen_ai.usage.output_tokens": receipt.completion_tokens,
        "corral.node.id": receipt.node_id,
        "corral.process.id": receipt.process_id,
        "corral.tries": receipt.tries,
        **_error_type(receipt),
    }
    has_first = receipt.first_byte_ms > 0
    return Span(
        context=context,
        name=f"{operation} {receipt.model}",
        kind=SpanKind.CLIENT,
        started_at=started_at,
        ended_at=ended_at,
        attributes=attributes,
        events=(Event(_FIRST_TOKEN, receipt.at + receipt.first_byte_ms / 1000),) if has_first else (),
        error=error,
    )


def _error_type(receipt: Receipt) -> dict[str, Value]:
    if receipt.ending:
        return {"error.type": receipt.ending}
    return {"error.type": str(receipt.status)} if receipt.status >= 400 else {}
