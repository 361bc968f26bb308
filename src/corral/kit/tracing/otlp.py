"""Spans, and their encoding as OTLP/JSON: an `ExportTraceServiceRequest`, as the body of `POST /v1/traces`. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import TypeAlias

import msgspec

from corral.kit.tracing.context import TraceContext

CONTENT_TYPE = "application/json"
Value: TypeAlias = str | int | float | bool


class SpanKind(IntEnum):
    INTERNAL = 1
    SERVER = 2
    CLIENT = 3


class Event(msgspec.Struct, frozen=True):
    name: str
    at: float  # seconds since the epoch


class Span(msgspec.Struct, frozen=True, kw_only=True):
    context: TraceContext
    name: str
    kind: SpanKind
    started_at: float  # seconds since the epoch
    ended_at: float
    attributes: Mapping[str, Value] = {}
    events: tuple[Event, ...] = ()
    error: str = ""  # what failed; empty: nothing


class Resource(msgspec.Struct, frozen=True):
    """The process that exports."""

    attributes: Mapping[str, Value]
    version: str  # of the code that makes the spans


class SpanTemplate:
    """Writes spans that have all but their ids, their times and a few attributes in common. Encoding a `Span` costs
    several times as much."""

    __slots__ = ("_format",)

    def __init__(self, span: Span, varying: Sequence[str]) -> None:
        """`varying`: attributes of `span` whose values differ, whole numbers or text that needs no escapes."""
        fixed = {name: value for name, value in span.attributes.items() if name not in varying}
        attributes = [_text(each).replace("%", "%%") for each in _attributes(fixed)]
        attributes += [
            _INT_ATTRIBUTE % name if isinstance(span.attributes[name], int) else _TEXT_ATTRIBUTE % name
            for name in varying
        ]
        head = f'"flags":1,"name":{_text(span.name)},"kind":{int(span.kind)},'.replace("%", "%%")
        self._format = '{"traceId":"%s","spanId":"%s",%s' + head + _TIMES + ",".join(attributes) + "]%s}"

    def write(
        self,
        context: TraceContext,
        times: tuple[float, float],
        values: tuple[str | int, ...],
        event: Event | None = None,
    ) -> str:
        """`times`: its start and its end, in seconds since the epoch. `values`: those of the attributes that vary, in
        their order."""
        return self._format % (
            context.trace_id,
            context.span_id,
            f'"parentSpanId":"{context.parent_id}",' if context.parent_id else "",
            times[0] * 1e6,
            times[1] * 1e6,
            *values,
            ""
            if event is None
            else f',"events":[{{"name":{_text(event.name)},"timeUnixNano":"{event.at * 1e6:.0f}000"}}]',
        )


# Times in microseconds, as in `_nanoseconds`.
_TIMES = '"startTimeUnixNano":"%.0f000","endTimeUnixNano":"%.0f000","attributes":['
_INT_ATTRIBUTE = '{"key":"%s","value":{"intValue":"%%d"}}'
_TEXT_ATTRIBUTE = '{"key":"%s","value":{"stringValue":"%%s"}}'


def encode_span(span: Span) -> str:
    return _text(_span(span))


def encode_request(resource: Resource, spans: Sequence[str]) -> bytes:
    """`spans`: encoded already."""
    process = _text({"attributes": _attributes(resource.attributes)})
    scope = _text({"name": "corral", "version": resource.version})
    found = ",".join(spans)
    return (
        f'{{"resourceSpans":[{{"resource":{process},"scopeSpans":[{{"scope":{scope},"spans":[{found}]}}]}}]}}'.encode()
    )


def _text(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _span(span: Span) -> dict[str, object]:
    context = span.context
    fields: dict[str, object] = {
        "traceId": context.trace_id,
        "spanId": context.span_id,
        "flags": 1,  # sampled
        "name": span.name,
        "kind": int(span.kind),
        "startTimeUnixNano": _nanoseconds(span.started_at),
        "endTimeUnixNano": _nanoseconds(max(span.started_at, span.ended_at)),
        "attributes": _attributes(span.attributes),
    }
    if context.parent_id:
        fields["parentSpanId"] = context.parent_id
    if span.events:
        fields["events"] = [{"name": each.name, "timeUnixNano": _nanoseconds(each.at)} for each in span.events]
    if span.error:
        fields["status"] = {"code": 2, "message": span.error}
    return fields


def _nanoseconds(seconds: float) -> str:
    """64-bit numbers are text in the JSON of protobuf. Microseconds are what a float of this size can hold."""
    return f"{round(seconds * 1e6)}000"


def _attributes(attributes: Mapping[str, Value]) -> list[dict[str, object]]:
    return [{"key": key, "value": _value(value)} for key, value in attributes.items()]


def _value(value: Value) -> dict[str, object]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    return {"stringValue": value}
