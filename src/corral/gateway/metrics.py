"""What the gateway counts. Counting costs a few list and dict steps; the text is made when somebody asks for it.

`prometheus_client`'s own counters take a lock and build label keys per call, which would cost more than choosing a
replica does: here they only describe what the plain numbers are called.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from corral.relay import Counters

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"  # what `generate_latest` writes
CLIENT_GONE = 499  # as nginx says it: the client left before the answer was whole

_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
MOST_RECENT = 256

# What a request leaves that went the short way to its end: whose it was, its id, its status, when it began and ended,
# and the last bytes of the answer, or what was seen of a stream.
Recent = tuple[Any, bytes, int, float, float, Any]

_RELAY_GAUGES = {
    "connections_open": "Client connections open.",
    "upstream_open": "Connections to upstreams open.",
}
_RELAY_COUNTERS = {
    "connections": "Client connections accepted.",
    "connections_refused": "Client connections over the limit.",
    "malformed": "Requests refused because of what came over the wire.",
    "handler_failures": "Requests that failed inside the gateway.",
    "clients_gone": "Clients that left while an answer was pending.",
    "client_timeouts": "Clients cut off because they were too slow.",
    "upstream_connects": "Connections made to upstreams.",
    "upstream_connect_failures": "Connections to upstreams that did not come about.",
    "upstream_reuses": "Requests on a connection that was already there.",
    "upstream_retries": "Requests tried again before a byte of the answer.",
    "upstream_failures": "Upstreams that broke or timed out after the request was sent.",
    "upstream_timeouts": "Upstreams that were silent for too long.",
    "tunnels": "WebSockets opened.",
    "bytes_relayed": "Bytes of relayed answers sent to clients.",
}


class RouteClass(StrEnum):
    INFERENCE = "inference"  # /v1/… that a replica answers
    MODELS = "models"  # /v1/models
    CONTROLLER = "controller"  # relayed to the controller
    OWN = "own"  # /healthz, /readyz, /metrics
    OTHER = "other"  # /v1/… that is nothing


class Histogram:
    __slots__ = ("counts", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(_BOUNDS_S) + 1)
        self.total_s = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(_BOUNDS_S, seconds)] += 1
        self.total_s += seconds

    def observe_all(self, many: list[float]) -> None:
        """The same for many, at a fraction of the price. Sorts what it is given."""
        many.sort()
        self.total_s += sum(many)
        below = 0
        for place, bound in enumerate(_BOUNDS_S):
            upto = bisect_right(many, bound, below)
            self.counts[place] += upto - below
            below = upto
        self.counts[-1] += len(many) - below

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative, as the text format wants them."""
        rows, seen = [], 0
        for bound, count in zip((*_BOUNDS_S, float("inf")), self.counts, strict=True):
            seen += count
            rows.append(("+Inf" if bound == float("inf") else str(bound), float(seen)))
        return rows


class RouteCounts:
    """The numbers of one class of routes."""

    __slots__ = ("by_status", "counted", "first_byte", "in_flight", "recent", "seconds")

    def __init__(self) -> None:
        # Answers that came in one piece: only noted, to be counted many at a time.
        self.recent: list[Recent] = []
        self.counted: Callable[[list[Recent]], None] | None = None  # who wants them after that
        self.in_flight = 0
        self.by_status: dict[int, int] = {}
        self.seconds = Histogram()
        self.first_byte = Histogram()

    def end(self, status: int, seconds: float) -> None:
        self.in_flight -= 1
        self.by_status[status] = self.by_status.get(status, 0) + 1
        self.seconds.observe(seconds)

    def catch_up(self) -> None:
        """Count what has only been noted. Whoever reads the numbers calls this first."""
        recent, self.recent = self.recent, []
        if not recent:
            return
        for status, count in Counter([each[2] for each in recent]).items():
            self.by_status[status] = self.by_status.get(status, 0) + count
        self.seconds.observe_all([each[4] - each[3] for each in recent])
        if self.counted is not None:
            self.counted(recent)


@dataclass(slots=True)
class ViewCounts:
    reads: int = 0  # whole views taken over
    unchanged: int = 0
    failures: int = 0
    hints: int = 0
    revision: int = 0
    keys: int = 0
    models: int = 0
    confirmed_at: float | None = None  # monotonic; when the controller last said that this view is the current one
    controller_reachable: bool = False
    bus_connected: bool = False


@dataclass(slots=True)
class Metrics:
    """Plain numbers, written by whoever knows them."""

    routes: dict[RouteClass, RouteCounts] = field(default_factory=lambda: {kind: RouteCounts() for kind in RouteClass})
    relay: Counters = field(default_factory=Counters)
    view: ViewCounts = field(default_factory=ViewCounts)
    # Numbers that others keep anyway, read when somebody asks: by name, what they are and where they are.
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
        running = GaugeMetricFamily("corral_gateway_requests_in_flight", "Requests being answered.", labels=["route"])
        seconds = HistogramMetricFamily(
            "corral_gateway_request_seconds", "From a request's head to the end of its answer.", labels=["route"]
        )
        first = HistogramMetricFamily(
            "corral_gateway_first_byte_seconds",
            "Route inference: from a request's head to the first event of a streamed answer that has content, "
            "reasoning or a part of a tool call; answers that are not streamed do not count. Route controller: how "
            "long the controller took to begin to answer.",
            labels=["route"],
        )
        for kind, counts in self._metrics.routes.items():
            counts.catch_up()
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
        reads = CounterMetricFamily("corral_gateway_view_reads", "Looks at the controller's view.", labels=["result"])
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
            ("controller_reachable", "1 when the controller answered the last question.", view.controller_reachable),
            ("bus_connected", "1 while hints can arrive.", view.bus_connected),
        ):
            gauge = GaugeMetricFamily(f"corral_gateway_{name}", text)
            gauge.add_metric([], float(value))
            yield gauge


class _Processes(Collector):
    """What several processes take together, in the words that `ProcessCollector` has for one."""

    def __init__(self, numbers: Mapping[str, float]) -> None:
        self._numbers = numbers

    def collect(self) -> Iterable[Metric]:
        for name, value in self._numbers.items():
            kind = CounterMetricFamily if name == "process_cpu_seconds" else GaugeMetricFamily
            family = kind(name, "Of all processes of the gateway together.")
            family.add_metric([], value)
            yield family


def render(metrics: Metrics, *, now: float, processes: Mapping[str, float] | None = None) -> bytes:
    """The text format, with the process's own memory, processor time and files, or those of several (`processes`)."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(metrics, now))
    PlatformCollector(registry=registry)
    if processes is None:
        ProcessCollector(registry=registry)
        GCCollector(registry=registry)
    else:
        registry.register(_Processes(processes))
    return generate_latest(registry)
