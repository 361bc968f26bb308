"""A histogram of durations as Prometheus has it, without locks and labels: counting takes one search in the bounds."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Histogram:
    __slots__ = ("bounds", "counts", "total_s")

    def __init__(self, bounds: tuple[float, ...] = BOUNDS_S) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total_s = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total_s += seconds

    def observe_all(self, many: list[float]) -> None:
        """`observe` for many values, at a fraction of the cost. Sorts the list in place."""
        many.sort()
        self.total_s += sum(many)
        below = 0
        for bucket, bound in enumerate(self.bounds):
            upto = bisect_right(many, bound, below)
            self.counts[bucket] += upto - below
            below = upto
        self.counts[-1] += len(many) - below

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative, as in the text format."""
        rows, seen = [], 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            seen += count
            rows.append(("+Inf" if bound == float("inf") else str(bound), float(seen)))
        return rows
