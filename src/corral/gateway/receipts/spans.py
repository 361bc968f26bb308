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
from corral.gateway.receipts.buffer import FinishedRequest, ReceiptBuffer, write_receipt
from corral.kit.tracing.context import TraceContext
from corral.kit.tracing.otlp import Event, Span, SpanKind, Value
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
_ENDINGS = {"client_left": "the client disconnected", "upstream_broke": "the replica broke off"}


class RequestTrace(NamedTuple):
    """The ids of a request's spans, chosen before it is forwarded."""

    server: TraceContext
    client: TraceContext
    method: bytes = b"POST"


class RequestSpans:
    """Traces the requests of one gateway process."""

    def __init__(self, tracer: Tracer, receipts: ReceiptBuffer) -> None:
        self._tracer = tracer
        self._receipts = receipts
        self.is_sampled = tracer.is_sampled

    def start(self, headers: Headers, method: bytes) -> RequestTrace | None:
        server = self._tracer.start(headers)
        return None if server is None else RequestTrace(server, server.child(), method)

    def start_new(self) -> RequestTrace:
        """For a request that `is_sampled` chose, without a `traceparent`."""
        server = TraceContext.first()
        return RequestTrace(server, server.child())

    def record(self, trace: RequestTrace, receipt: Receipt) -> None:
        self._tracer.exporter.add(partial(build_spans, trace, receipt))

    def record_finished(self, finished: list[FinishedRequest]) -> None:
        """Requests that ended on the fast path."""
        for each in finished:
            trace = each[0].trace
            if trace is not None:
                encoded = write_receipt(each, self._receipts.offset_s)
                self._tracer.exporter.add(partial(_build_from_bytes, trace, encoded))


def _build_from_bytes(trace: RequestTrace, encoded: bytes) -> Sequence[Span]:
    return build_spans(trace, decode(Receipt, encoded))


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
        events=(Event("first token", receipt.at + receipt.first_byte_ms / 1000),) if has_first else (),
        error=error,
    )


def _error_type(receipt: Receipt) -> dict[str, Value]:
    if receipt.ending:
        return {"error.type": receipt.ending}
    return {"error.type": str(receipt.status)} if receipt.status >= 400 else {}
