"""The spans of the ingress: one for each request that the gateway traces, below the gateway's own."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager

from corral.kit.tracing.context import TraceContext
from corral.kit.tracing.otlp import Span, SpanKind, SpanTemplate, Value
from corral.kit.tracing.tracer import OpenSpan, Tracer, record_span
from corral.worker.supervisor.table import Running

_VARYING = ("http.response.status_code", "corral.request.id")
_NO_CONTEXT = TraceContext("", "", "")


def record_request(
    tracer: Tracer, context: TraceContext, method: bytes, path: bytes, running: Running, request_id: str
) -> AbstractContextManager[OpenSpan]:
    """The current span of the block."""
    attributes = _attributes(method, path, running, request_id)
    return record_span(tracer, context, _name(method, path), SpanKind.SERVER, attributes)


def new_template(method: bytes, path: bytes, running: Running) -> SpanTemplate:
    """Of the requests with one head for one process that end on the fast path."""
    attributes = _attributes(method, path, running, "") | {"http.response.status_code": 200}
    span = Span(
        context=_NO_CONTEXT,
        name=_name(method, path),
        kind=SpanKind.SERVER,
        started_at=0.0,
        ended_at=0.0,
        attributes=attributes,
    )
    return SpanTemplate(span, _VARYING)


def add_finished(
    tracer: Tracer,
    template: SpanTemplate,
    context: TraceContext,
    times: tuple[float, float],
    status: int,
    request_id: bytes,
) -> None:
    """`times`: monotonic, of the request's start and end."""
    offset_s = tracer.now() - time.monotonic()
    times = times[0] + offset_s, times[1] + offset_s
    tracer.exporter.add(lambda: (template.write(context, times, (status, request_id.decode())),))


def _name(method: bytes, path: bytes) -> str:
    return f"{method.decode('latin-1')} {_route(path)}"


def _attributes(method: bytes, path: bytes, running: Running, request_id: str) -> dict[str, Value]:
    return {
        "http.request.method": method.decode("latin-1"),
        "url.path": _route(path),
        "corral.request.id": request_id,
        "corral.process.id": running.process_id,
        "corral.backend": running.backend,
        "gen_ai.request.model": running.model,
    }


def _route(path: bytes) -> str:
    return path.partition(b"?")[0].decode("latin-1")
