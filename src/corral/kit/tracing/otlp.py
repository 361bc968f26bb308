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


def encode_spans(resource: Resource, spans: Sequence[Span]) -> bytes:
    return msgspec.json.encode(
        {
            "resourceSpans": [
                {
                    "resource": {"attributes": _attributes(resource.attributes)},
                    "scopeSpans": [
                        {
                            "scope": {"name": "corral", "version": resource.version},
                            "spans": [_span(each) for each in spans],
                        }
                    ],
                }
            ]
        }
    )


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
