"""The numbers of one process as data, and those of several added up: `/metrics` covers the whole gateway.

What a process has counted stays counted when it is gone, or counters would run backwards: `ended` is what remains of
it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import msgspec
from prometheus_client import ProcessCollector

from corral.gateway.metrics import Histogram, Metrics, RouteClass, RouteCounts, ViewCounts
from corral.relay import Counters

_OPEN_NOW = ("connections_open", "upstream_open")
_COUNTED_PROCESS = "process_cpu_seconds"


class RouteNumbers(msgspec.Struct):
    in_flight: int
    by_status: dict[int, int]
    seconds: tuple[list[int], float]
    first_byte: tuple[list[int], float]


class Numbers(msgspec.Struct):
    routes: dict[str, RouteNumbers] = {}
    relay: dict[str, int] = {}
    totals: dict[str, tuple[str, float]] = {}  # by name: what it is, and how much
    gauges: dict[str, tuple[str, float]] = {}
    process: dict[str, float] = {}  # memory, processor time and files
    view: ViewCounts | None = None  # of the one process that reads it


def numbers_of(metrics: Metrics) -> Numbers:
    return Numbers(
        routes={kind.value: _route(counts) for kind, counts in metrics.routes.items()},
        relay=dataclasses.asdict(metrics.relay),
        totals={name: (text, read()) for name, (text, read) in metrics.totals.items()},
        gauges={name: (text, read()) for name, (text, read) in metrics.gauges.items()},
        process={family.name: family.samples[0].value for family in ProcessCollector(registry=None).collect()},
    )


def _route(counts: RouteCounts) -> RouteNumbers:
    counts.catch_up()
    return RouteNumbers(
        counts.in_flight,
        dict(counts.by_status),
        (list(counts.seconds.counts), counts.seconds.total_s),
        (list(counts.first_byte.counts), counts.first_byte.total_s),
    )


def ended(numbers: Numbers) -> Numbers:
    """What remains of a process that is gone: everything it had counted, nothing that it had open."""
    return Numbers(
        routes={
            kind: RouteNumbers(0, route.by_status, route.seconds, route.first_byte)
            for kind, route in numbers.routes.items()
        },
        relay={name: 0 if name in _OPEN_NOW else value for name, value in numbers.relay.items()},
        totals=numbers.totals,
        process={name: value for name, value in numbers.process.items() if name == _COUNTED_PROCESS},
    )


def add_up(many: Iterable[Numbers]) -> Numbers:
    total = Numbers()
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


def _added(one: RouteNumbers, other: RouteNumbers) -> RouteNumbers:
    by_status = dict(one.by_status)
    for status, count in other.by_status.items():
        by_status[status] = by_status.get(status, 0) + count
    return RouteNumbers(
        one.in_flight + other.in_flight,
        by_status,
        _added_times(one.seconds, other.seconds),
        _added_times(one.first_byte, other.first_byte),
    )


def _added_times(one: tuple[list[int], float], other: tuple[list[int], float]) -> tuple[list[int], float]:
    return [a + b for a, b in zip(one[0], other[0], strict=True)], one[1] + other[1]


def as_metrics(numbers: Numbers) -> Metrics:
    """For `metrics.render`."""
    metrics = Metrics(relay=Counters(**numbers.relay), view=numbers.view or ViewCounts())
    for kind, route in numbers.routes.items():
        counts = metrics.routes[RouteClass(kind)]
        counts.in_flight = route.in_flight
        counts.by_status = route.by_status
        counts.seconds = _histogram(route.seconds)
        counts.first_byte = _histogram(route.first_byte)
    for into, found in ((metrics.totals, numbers.totals), (metrics.gauges, numbers.gauges)):
        for name, (text, amount) in found.items():
            into[name] = (text, lambda amount=amount: amount)  # type: ignore[misc]
    return metrics


def _histogram(times: tuple[list[int], float]) -> Histogram:
    histogram = Histogram()
    histogram.counts, histogram.total_s = times
    return histogram
