"""Decides which requests are traced, and records the spans of those that are."""

from __future__ import annotations

import contextlib
import math
import os
import random
import socket
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

from corral import __version__
from corral.kit.tracing.context import Parent, TraceContext, find_parent, not_sampled, parse_traceparent
from corral.kit.tracing.exporter import SpanExporter
from corral.kit.tracing.otlp import Event, Resource, Span, SpanKind, Value, encode_span
from corral.kit.tracing.settings import TraceSettings


class Tracer:
    """Of one process. A process without traces has none."""

    def __init__(self, settings: TraceSettings, exporter: SpanExporter, now: Callable[[], float]) -> None:
        """`now`: seconds since the epoch, on the controller's clock: spans of several machines then fit together."""
        self._share = settings.traces_sample
        self._follow_clients = settings.traces_follow_clients
        self.exporter = exporter
        self.now = now
        self._skip = self.next_skip()

    def is_sampled(self) -> bool:
        """Whether to trace the next request that has no `traceparent`. It draws once for each traced request: the
        number of requests until then."""
        if self._skip:
            self._skip -= 1
            return False
        self._skip = self.next_skip()
        return True

    def start(self, headers: Sequence[tuple[bytes, bytes]]) -> TraceContext | None:
        """The first span of this fleet for a request; None: the request is not traced."""
        parent = find_parent(headers)
        if parent is None:
            return TraceContext.first() if self.is_sampled() else None
        return _below(parent) if self._follow_clients else None

    def start_below(self, traceparent: bytes) -> TraceContext | None:
        """`start` for a request with this `traceparent`, on the fast path."""
        return _below(parse_traceparent(traceparent)) if self._follow_clients else None

    def decline(self, parent: Parent | None) -> bytes:
        """The `traceparent` to pass on with a request that is not traced although its client says so; b"": the
        client's own. Workers do as this header says."""
        return b"" if self._follow_clients or parent is None or not parent.sampled else not_sampled(parent)

    def join(self, headers: Sequence[tuple[bytes, bytes]]) -> TraceContext | None:
        """A span below that of the gateway; None: the gateway does not trace this request."""
        return _below(find_parent(headers))

    def join_one(self, traceparent: bytes) -> TraceContext | None:
        """`join` for a request with this `traceparent`, on the fast path."""
        return _below(parse_traceparent(traceparent))

    def next_skip(self) -> float:
        """How many requests without a `traceparent` are not traced until the next one that is, drawn at random."""
        if self._share <= 0:
            return math.inf
        if self._share >= 1:
            return 0
        return int(math.log(1.0 - random.random()) / math.log(1.0 - self._share))


def _below(parent: Parent | None) -> TraceContext | None:
    return TraceContext.below(parent) if parent is not None and parent.sampled else None


@dataclass(slots=True)
class OpenSpan:
    """A span whose end is not known yet."""

    tracer: Tracer
    context: TraceContext
    name: str
    kind: SpanKind
    attributes: dict[str, Value] = field(default_factory=dict)
    error: str = ""
    events: list[Event] = field(default_factory=list)
    started_at: float = 0.0

    def event(self, name: str) -> None:
        self.events.append(Event(name, self.tracer.now()))

    def on_status(self, status: int) -> None:
        """Of a request that this span is."""
        self.attributes["http.response.status_code"] = status
        if status >= 500:
            self.error = f"status {status}"

    def end(self) -> None:
        ended_at = self.tracer.now()
        self.tracer.exporter.add(lambda: (encode_span(self._finished(ended_at)),))

    def _finished(self, ended_at: float) -> Span:
        return Span(
            context=self.context,
            name=self.name,
            kind=self.kind,
            started_at=self.started_at,
            ended_at=ended_at,
            attributes=self.attributes,
            events=tuple(self.events),
            error=self.error,
        )


# The span of the request that the running task serves; None where the request is not traced.
current_span: ContextVar[OpenSpan | None] = ContextVar("current_span", default=None)


@contextlib.contextmanager
def record_span(
    tracer: Tracer, context: TraceContext, name: str, kind: SpanKind, attributes: dict[str, Value]
) -> Iterator[OpenSpan]:
    """The current span of the block. An error that leaves the block is the span's."""
    span = OpenSpan(tracer, context, name, kind, attributes, started_at=tracer.now())
    token = current_span.set(span)
    try:
        yield span
    except BaseException as error:
        span.error = span.error or type(error).__name__
        raise
    finally:
        current_span.reset(token)
        span.end()


def begin_child(name: str, attributes: dict[str, Value]) -> OpenSpan | None:
    """A call that the current span makes; None: the request is not traced. The caller ends it."""
    above = current_span.get()
    if above is None:
        return None
    tracer = above.tracer
    return OpenSpan(tracer, above.context.child(), name, SpanKind.CLIENT, attributes, started_at=tracer.now())


def open_tracer(settings: TraceSettings, service: str, now: Callable[[], float]) -> Tracer | None:
    """None: traces are off. The caller runs `tracer.exporter.run()`."""
    if not settings.traces_endpoint:
        return None
    resource = Resource(
        {
            "service.name": service,
            "service.version": __version__,
            "service.instance.id": f"{socket.gethostname()}:{os.getpid()}",
            "host.name": socket.gethostname(),
        },
        __version__,
    )
    return Tracer(settings, SpanExporter(settings, resource), now)
