"""A collector of traces on a port of this machine, which reads OTLP/JSON as a real one does."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

_VALUES = {"stringValue": str, "intValue": int, "doubleValue": float, "boolValue": bool}


@dataclass(frozen=True)
class CollectedSpan:
    service: str
    trace_id: str
    span_id: str
    parent_id: str
    name: str
    kind: int
    started_at: float
    ended_at: float
    attributes: dict[str, Any]
    events: dict[str, float]
    error: str


@dataclass
class TraceCollector:
    status: int = 200  # of its answers
    spans: list[CollectedSpan] = field(default_factory=list)
    refused: int = 0  # requests
    headers: list[dict[str, str]] = field(default_factory=list)  # of each request
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def named(self, name: str) -> CollectedSpan:
        (found,) = [each for each in self.spans if each.name == name]
        return found

    async def take(self, request: web.Request) -> web.Response:
        self.headers.append(dict(request.headers))
        if self.status != 200:
            self.refused += 1
            return web.Response(status=self.status)
        assert request.content_type == "application/json"
        for resource in (await request.json())["resourceSpans"]:
            service = _attributes(resource["resource"]["attributes"])
            assert service["service.version"]
            for scope in resource["scopeSpans"]:
                self.spans += [_read(service["service.name"], span) for span in scope["spans"]]
        return web.json_response({"partialSuccess": {}})


def _read(service: str, span: dict[str, Any]) -> CollectedSpan:
    assert re.fullmatch("[0-9a-f]{32}", span["traceId"])
    assert re.fullmatch("[0-9a-f]{16}", span["spanId"])
    assert re.fullmatch("[0-9a-f]{16}|", span.get("parentSpanId", ""))
    status = span.get("status", {})
    assert status.get("code", 0) in (0, 2)
    return CollectedSpan(
        service,
        span["traceId"],
        span["spanId"],
        span.get("parentSpanId", ""),
        span["name"],
        span["kind"],
        _seconds(span["startTimeUnixNano"]),
        _seconds(span["endTimeUnixNano"]),
        _attributes(span["attributes"]),
        {event["name"]: _seconds(event["timeUnixNano"]) for event in span.get("events", [])},
        status.get("message", ""),
    )


def _seconds(nanoseconds: str) -> float:
    assert isinstance(nanoseconds, str), "64-bit numbers are text"
    return int(nanoseconds) / 1e9


def _attributes(found: list[dict[str, Any]]) -> dict[str, Any]:
    result = {}
    for each in found:
        ((kind, value),) = each["value"].items()
        assert kind != "intValue" or isinstance(value, str), "64-bit numbers are text"
        result[each["key"]] = _VALUES[kind](value)
    return result


@contextlib.asynccontextmanager
async def running_collector() -> AsyncIterator[TraceCollector]:
    collector = TraceCollector()
    app = web.Application()
    app.router.add_post("/v1/traces", collector.take)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    collector.port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    try:
        yield collector
    finally:
        await runner.cleanup()
