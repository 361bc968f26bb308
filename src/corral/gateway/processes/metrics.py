"""The metrics of one process as data, and their sum over several processes: `/metrics` covers the whole gateway.

The counts of a process stay when it ends, or counters would decrease: `keep_counters` returns them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import msgspec
from prometheus_client import ProcessCollector

from corral.gateway.receipts.metrics import Metrics, RouteClass, RouteCounts
from corral.gateway.view.cache import ViewCounts
from corral.kit.histogram import Histogram
from corral.relay import Counters

_RELAY_GAUGES = ("connections_open", "upstream_open")
_PROCESS_COUNTER = "process_cpu_seconds"


class RouteSnapshot(msgspec.Struct):
    in_flight: int
    by_status: dict[int, int]
    seconds: tuple[list[int], float]
    first_byte: tuple[list[int], float]


class MetricsSnapshot(msgspec.Struct):
    routes: dict[str, RouteSnapshot] = {}
    relay: dict[str, int] = {}
    totals: dict[str, tuple[str, float]] = {}  # by name: help text and value
    gauges: dict[str, tuple[str, float]] = {}
    process: dict[str, float] = {}  # memory, CPU time and files
    view: ViewCounts | None = None  # of the process that reads the view


def take_snapshot(metrics: Metrics) -> MetricsSnapshot:
    return MetricsSnapshot(
        routes={kind.value: _route(counts) for kind, counts in metrics.routes.items()},
        relay=dataclasses.asdict(metrics.relay),
        totals={name: (text, read()) for name, (text, read) in metrics.totals.items()},
        gauges={name: (text, read()) for name, (text, read) in metrics.gauges.items()},
        process={family.name: family.samples[0].value for family in ProcessCollector(registry=None).collect()},
    )


def _route(counts: RouteCounts) -> RouteSnapshot:
    counts.count_finished()
    return RouteSnapshot(
        counts.in_flight,
        dict(counts.by_status),
        (list(counts.seconds.counts), counts.seconds.total_s),
        (list(counts.first_byte.counts), counts.first_byte.total_s),
    )


def keep_counters(snapshot: MetricsSnapshot) -> MetricsSnapshot:
    """The counters of a process that has ended, without its gauges."""
    return MetricsSnapshot(
        routes={
            kind: RouteSnapshot(0, route.by_status, route.seconds, route.first_byte)
            for kind, route in snapshot.routes.items()
        },
        relay={name: 0 if name in _RELAY_GAUGES else value for name, value in snapshot.relay.items()},
        totals=snapshot.totals,
        process={name: value for name, value in snapshot.process.items() if name == _PROCESS_COUNTER},
    )


def merge_snapshots(many: Iterable[MetricsSnapshot]) -> MetricsSnapshot:
    total = MetricsSnapshot()
    for each in many:
        total.view = total.view or each.view
        for kind, route in each.routes.items():
            known = total.routes.get(kind)
            total.routes[kind] = route if known is None else _added(known, route)
        for name, value in each.relay.items():
            total.relay[name] = total.relay.get(name, 0) + value
        for into, found in ((total.totals, each.totals), (total.gauges, each.gauges)):
            for name, (text, amount) in found.items():
                into[name] = (text, amount + into.get(name, ("", 0.0))[1])
        for name, amount in each.process.items():
            before = total.process.get(name)
            if before is None:
                total.process[name] = amount
            elif name == "process_start_time_seconds":
                total.process[name] = min(before, amount)
            else:
                total.process[name] = before + amount
    return total


def _added(one: RouteSnapshot, other: RouteSnapshot) -> RouteSnapshot:
    by_status = dict(one.by_status)
    for status, count in other.by_status.items():
        by_status[status] = by_status.get(status, 0) + count
    return RouteSnapshot(
        one.in_flight + other.in_flight,
        by_status,
        _added_times(one.seconds, other.seconds),
        _added_times(one.first_byte, other.first_byte),
    )


def _added_times(one: tuple[list[int], float], other: tuple[list[int], float]) -> tuple[list[int], float]:
    return [a + b for a, b in zip(one[0], other[0], strict=True)], one[1] + other[1]


def restore_metrics(snapshot: MetricsSnapshot) -> Metrics:
    """`Metrics` for `render`."""
    metrics = Metrics(relay=Counters(**snapshot.relay), view=snapshot.view or ViewCounts())
    for kind, route in snapshot.routes.items():
        counts = metrics.routes[RouteClass(kind)]
        counts.in_flight = route.in_flight
        counts.by_status = route.by_status
        counts.seconds = _histogram(route.seconds)
        counts.first_byte = _histogram(route.first_byte)
    for into, found in ((metrics.totals, snapshot.totals), (metrics.gauges, snapshot.gauges)):
        for name, (text, amount) in found.items():
            into[name] = (text, lambda amount=amount: amount)  # type: ignore[misc]
    return metrics


def _histogram(times: tuple[list[int], float]) -> Histogram:
    histogram = Histogram()
    histogram.counts, histogram.total_s = times
    return histogram
