"""Counts what the leader does with replicas: evictions, and how long loads took."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from corral.controller.metrics.labels import MAX_PAIRS, OTHER
from corral.kit.histogram import Histogram

_LOAD_BOUNDS_S = (0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


class ReplicaMetrics(Collector):
    """Each controller counts what it did while it was the leader. Labels are bounded by `MAX_PAIRS` pairs."""

    def __init__(self) -> None:
        self._evictions: Counter[tuple[str, str]] = Counter()
        self._loads: dict[tuple[str, str], Histogram] = {}

    def on_evicted(self, model: str, node: str) -> None:
        self._evictions[self._labels(self._evictions, model, node)] += 1

    def on_loaded(self, model: str, node: str, seconds: float) -> None:
        self._loads.setdefault(self._labels(self._loads, model, node), Histogram(_LOAD_BOUNDS_S)).observe(seconds)
        # A counter that starts at 1 hides its first event from `increase()`: it is there, with 0, before it can rise.
        self._evictions[self._labels(self._evictions, model, node)] += 0

    @staticmethod
    def _labels(known: Iterable[tuple[str, str]], model: str, node: str) -> tuple[str, str]:
        pairs = set(known)
        return (model, node) if (model, node) in pairs or len(pairs) < MAX_PAIRS else (OTHER, OTHER)

    def collect(self) -> tuple[Metric, ...]:
        evictions = CounterMetricFamily(
            "corral_evictions",
            "Replicas that were stopped to make room for another model.",
            labels=["model", "node"],
        )
        for pair, count in self._evictions.items():
            evictions.add_metric(pair, count)
        loads = HistogramMetricFamily(
            "corral_replica_load_seconds",
            "From the choice of a node for a replica until it is ready: install, files and start.",
            labels=["model", "node"],
        )
        for pair, seconds in self._loads.items():
            loads.add_metric(pair, seconds.buckets(), seconds.total_s)
        return evictions, loads
