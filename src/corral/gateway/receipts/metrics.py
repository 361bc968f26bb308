"""The gateway's metrics. Counting costs a few list and dict operations; the text is built when it is requested.

The counters of `prometheus_client` take a lock and build label keys per call, which would cost more than the choice of
a replica. Here that library only formats the text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from corral.contract.http import RelayResult
from corral.contract.receipts import CLIENT_GONE
from corral.gateway.receipts.buffer import FinishedRequest
from corral.gateway.view.cache import ViewCounts
from corral.kit.histogram import Histogram
from corral.relay import Counters

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"  # of `generate_latest`

MAX_UNCOUNTED = 256

_RELAY_GAUGES = {
    "connections_open": "Client connections open.",
    "upstream_open": "Connections to upstreams open.",
}
_RELAY_COUNTERS = {
    "connections": "Client connections accepted.",
    "connections_refused": "Client connections over the limit.",
    "malformed": "Requests refused because they were malformed.",
    "handler_failures": "Requests that failed inside the gateway.",
    "clients_gone": "Clients that left before their response was complete.",
    "client_timeouts": "Clients cut off because they were too slow.",
    "upstream_connects": "Connections made to upstreams.",
    "upstream_local_connects": "Connections made to workers of this machine through unix sockets.",
    "upstream_connect_failures": "Connections to upstreams that could not be opened.",
    "upstream_reuses": "Requests sent on an idle connection.",
    "upstream_retries": "Requests sent again before a byte of the response.",
    "upstream_failures": "Upstreams that broke or timed out after the request was sent.",
    "upstream_timeouts": "Upstreams that were silent for too long.",
    "tunnels": "WebSockets opened.",
    "bytes_relayed": "Bytes of relayed responses sent to clients.",
}


class RouteClass(StrEnum):
    INFERENCE = "inference"  # /v1/… that a replica serves
    MODELS = "models"  # /v1/models
    CONTROLLER = "controller"  # relayed to the controller
    STATUS = "own"  # /healthz, /readyz, /metrics
    OTHER = "other"  # other paths under /v1/…


class RouteCounts:
    """The counters of one class of routes."""

    __slots__ = ("by_status", "first_byte", "in_flight", "on_counted", "seconds", "uncounted")

    def __init__(self) -> None:
        # Requests that ended on the fast path, to be counted many at a time.
        self.uncounted: list[FinishedRequest] = []
        self.on_counted: Callable[[list[FinishedRequest]], None] | None = None  # called with them after that
        self.in_flight = 0
        self.by_status: dict[int, int] = {}
        self.seconds = Histogram()
        self.first_byte = Histogram()

    def end(self, status: int, seconds: float) -> None:
        self.in_flight -= 1
        self.by_status[status] = self.by_status.get(status, 0) + 1
        self.seconds.observe(seconds)

    def count_relayed(self, result: RelayResult, first_s: float | None) -> int:
        """Count the first byte of a relayed answer and return the status to count: the upstream's, unless the client
        left. `first_s`: the time to the first byte; None: the answer has no such time."""
        if result.status and first_s is not None:
            self.first_byte.observe(first_s)
        return CLIENT_GONE if result.client_gone else result.status

    def count_finished(self) -> None:
        """Count the requests that ended on the fast path. Call this before you read the counters."""
        finished, self.uncounted = self.uncounted, []
        if not finished:
            return
        for status, count in Counter([each[2] for each in finished]).items():
            self.by_status[status] = self.by_status.get(status, 0) + count
        self.seconds.observe_all([each[4] - each[3] for each in finished])
        if self.on_counted is not None:
            self.on_counted(finished)


@dataclass(slots=True)
class Metrics:
    """All counters of a process, written in place."""

    routes: dict[RouteClass, RouteCounts] = field(default_factory=lambda: {kind: RouteCounts() for kind in RouteClass})
    relay: Counters = field(default_factory=Counters)
    view: ViewCounts = field(default_factory=ViewCounts)
    # Numbers that other objects keep, read when the text is built: by name, the help text and a function.
    totals: dict[str, tuple[str, Callable[[], float]]] = field(default_factory=dict)
    gauges: dict[str, tuple[str, Callable[[], float]]] = field(default_factory=dict)


class _Families(Collector):
    def __init__(self, metrics: Metrics, now: float) -> None:
        self._metrics = metrics
        self._now = now

    def collect(self) -> Iterable[Metric]:
        yield from self._requests()
        yield from self._relay()
        yield from self._view()
        for name, (text, read) in self._metrics.totals.items():
            counter = CounterMetricFamily(f"corral_gateway_{name}", text)
            counter.add_metric([], read())
            yield counter
        for name, (text, read) in self._metrics.gauges.items():
            gauge = GaugeMetricFamily(f"corral_gateway_{name}", text)
            gauge.add_metric([], read())
            yield gauge

    def _requests(self) -> Iterable[Metric]:
        total = CounterMetricFamily("corral_gateway_requests", "Requests answered.", labels=["route", "status"])
        running = GaugeMetricFamily("corral_gateway_requests_in_flight", "Requests in progress.", labels=["route"])
        seconds = HistogramMetricFamily(
            "corral_gateway_request_seconds", "From a request's head to the end of its response.", labels=["route"]
        )
        first = HistogramMetricFamily(
            "corral_gateway_first_byte_seconds",
            "Route inference: from a request's head to the first event of a streamed answer that has content, "
            "reasoning or a part of a tool call; answers that are not streamed do not count. Route controller: how "
            "long the controller took to begin to answer.",
            labels=["route"],
        )
        for kind, counts in self._metrics.routes.items():
            counts.count_finished()
            running.add_metric([kind.value], counts.in_flight)
            seconds.add_metric([kind.value], counts.seconds.buckets(), counts.seconds.total_s)
            first.add_metric([kind.value], counts.first_byte.buckets(), counts.first_byte.total_s)
            for status, count in sorted(counts.by_status.items()):
                total.add_metric([kind.value, str(status)], count)
        return total, running, seconds, first

    def _relay(self) -> Iterable[Metric]:
        for name, text in _RELAY_GAUGES.items():
            gauge = GaugeMetricFamily(f"corral_gateway_{name}", text)
            gauge.add_metric([], getattr(self._metrics.relay, name))
            yield gauge
        for name, text in _RELAY_COUNTERS.items():
            counter = CounterMetricFamily(f"corral_gateway_{name}", text)
            counter.add_metric([], getattr(self._metrics.relay, name))
            yield counter

    def _view(self) -> Iterable[Metric]:
        view = self._metrics.view
        reads = CounterMetricFamily("corral_gateway_view_reads", "Reads of the controller's view.", labels=["result"])
        for result, count in (("changed", view.reads), ("unchanged", view.unchanged), ("failed", view.failures)):
            reads.add_metric([result], count)
        hints = CounterMetricFamily("corral_gateway_view_hints", "Hints on the bus that the view changed.")
        hints.add_metric([], view.hints)
        yield reads
        yield hints
        age_s = float("nan") if view.confirmed_at is None else self._now - view.confirmed_at
        for name, text, value in (
            ("view_age_seconds", "Since the controller last confirmed the view; NaN before the first.", age_s),
            ("view_revision", "Revision of the view.", view.revision),
            ("view_keys", "API keys in the view.", view.keys),
            ("view_models", "Models in the view.", view.models),
            (
                "controller_reachable",
                "1 if the controller answered the last read of the view.",
                view.controller_reachable,
            ),
            ("bus_connected", "1 while hints can arrive.", view.bus_connected),
        ):
            gauge = GaugeMetricFamily(f"corral_gateway_{name}", text)
            gauge.add_metric([], float(value))
            yield gauge


class _Processes(Collector):
    """The metrics of `ProcessCollector`, as the sum over several processes."""

    def __init__(self, numbers: Mapping[str, float]) -> None:
        self._numbers = numbers

    def collect(self) -> Iterable[Metric]:
        for name, value in self._numbers.items():
            kind = CounterMetricFamily if name == "process_cpu_seconds" else GaugeMetricFamily
            family = kind(name, "Of all processes of the gateway together.")
            family.add_metric([], value)
            yield family


def render(metrics: Metrics, *, now: float, processes: Mapping[str, float] | None = None) -> bytes:
    """The text format, with memory, CPU time and files of this process, or of several (`processes`)."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(metrics, now))
    PlatformCollector(registry=registry)
    if processes is None:
        ProcessCollector(registry=registry)
        GCCollector(registry=registry)
    else:
        registry.register(_Processes(processes))
    return generate_latest(registry)
