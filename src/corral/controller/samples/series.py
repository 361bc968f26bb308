"""Samples as series: counts that are added up, times in logarithmic buckets, gauges that are averaged, intervals that
are merged into longer ones. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from corral.contract.samples import SamplePoint
from corral.store.tables.samples import Gauge, Sample, SampleBody

_GROWTH = math.log(1.15)  # a bucket is 15 % wider than the one before: a percentile is off by 7 % at most
_LARGEST = 140  # more than three days
_MIN_COVERED_S = 10.0  # a rate over less says nothing


@dataclass(frozen=True)
class Range:
    """A span of time that people look at, and how finely it is shown."""

    key: str
    words: str
    span: timedelta
    step_s: int
    coarse: bool  # made of coarse samples


RANGES = {
    each.key: each
    for each in (
        Range("1h", "1 h", timedelta(hours=1), 60, coarse=False),
        Range("6h", "6 h", timedelta(hours=6), 300, coarse=False),
        Range("24h", "24 h", timedelta(hours=24), 900, coarse=False),
        Range("7d", "7 days", timedelta(days=7), 7200, coarse=True),
        Range("30d", "30 days", timedelta(days=30), 21600, coarse=True),
    )
}


def bucket_of(ms: float) -> int:
    """The logarithmic bucket of a duration; 0 is one millisecond and less."""
    return min(_LARGEST, max(0, round(math.log(ms) / _GROWTH))) if ms > 1 else 0


def percentile(buckets: Mapping[int, int], share: float) -> float | None:
    """In milliseconds; None: nothing was counted."""
    rank, seen = share * sum(buckets.values()), 0
    for bucket in sorted(buckets):
        seen += buckets[bucket]
        if seen >= rank:
            return round(math.exp(bucket * _GROWTH), 1)
    return None


class Tally:
    """What one source counts in one interval."""

    __slots__ = ("completion_tokens", "errors", "first_token", "gauges", "prompt_tokens", "queue", "requests")

    def __init__(self) -> None:
        self.requests = self.errors = self.prompt_tokens = self.completion_tokens = 0
        self.first_token: dict[int, int] = defaultdict(int)
        self.queue: dict[int, int] = defaultdict(int)
        self.gauges: dict[str, Gauge] = {}

    def measure(self, name: str, value: float) -> None:
        known = self.gauges.get(name)
        if known is None:
            self.gauges[name] = Gauge(value, 1, value)
        else:
            self.gauges[name] = Gauge(known.total + value, known.count + 1, max(known.most, value))

    def add(self, body: SampleBody) -> None:
        self.requests += body.requests
        self.errors += body.errors
        self.prompt_tokens += body.prompt_tokens
        self.completion_tokens += body.completion_tokens
        for mine, more in ((self.first_token, body.first_token), (self.queue, body.queue)):
            for bucket, count in more.items():
                mine[bucket] += count
        for name, gauge in body.gauges.items():
            known = self.gauges.get(name, Gauge(0.0, 0, gauge.most))
            most = max(known.most, gauge.most)
            self.gauges[name] = Gauge(known.total + gauge.total, known.count + gauge.count, most)

    def body(self, until_s: float) -> SampleBody:
        return SampleBody(
            until_s=until_s,
            requests=self.requests,
            errors=self.errors,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            first_token=dict(self.first_token),
            queue=dict(self.queue),
            gauges=dict(self.gauges),
        )


def begin_of(moment: datetime, step_s: int) -> datetime:
    """Of the interval that the moment is in."""
    return moment - timedelta(seconds=moment.timestamp() % step_s)


def points_of(
    samples: Iterable[Sample], *, since: datetime, until: datetime, step_s: int, gaps: bool
) -> tuple[SamplePoint, ...]:
    """One point per interval from `since` to `until`, which is the moment up to which somebody counted. An interval
    without samples is a gap where `gaps`, else a point with zeros."""
    tallies: dict[datetime, Tally] = {}
    for sample in samples:
        tallies.setdefault(begin_of(sample.at, step_s), Tally()).add(sample.body)
    points = []
    at = begin_of(since, step_s) + timedelta(seconds=step_s)  # the first one is not whole
    while at < until:
        seconds = min(float(step_s), (until - at).total_seconds())
        tally = tallies.get(at)
        if seconds >= min(_MIN_COVERED_S, step_s) and (tally is not None or not gaps):
            points.append(_point(at, seconds, tally or Tally()))
        at += timedelta(seconds=step_s)
    return tuple(points)


def _point(at: datetime, seconds: float, tally: Tally) -> SamplePoint:
    def mean(name: str) -> float | None:
        gauge = tally.gauges.get(name)
        return round(gauge.total / gauge.count, 3) if gauge is not None and gauge.count else None

    waiting = tally.gauges.get("waiting")
    return SamplePoint(
        at=at.isoformat(),
        seconds=round(seconds, 3),
        requests=tally.requests,
        errors=tally.errors,
        prompt_tokens=tally.prompt_tokens,
        completion_tokens=tally.completion_tokens,
        first_token_p50_ms=percentile(tally.first_token, 0.5),
        first_token_p95_ms=percentile(tally.first_token, 0.95),
        queue_p50_ms=percentile(tally.queue, 0.5),
        queue_p95_ms=percentile(tally.queue, 0.95),
        waiting=mean("waiting"),
        waiting_most=waiting.most if waiting is not None else None,
        in_flight=mean("in_flight"),
        ram_used_bytes=mean("ram_used"),
        ram_bytes=mean("ram"),
        device_used_bytes=mean("device_used"),
        device_bytes=mean("device"),
        temperature_c=mean("temperature"),
        power_w=mean("power"),
    )


def covered_until(latest: Sequence[Sample | None], now: datetime) -> datetime:
    """The moment up to which somebody counted."""
    ends = [sample.at + timedelta(seconds=sample.body.until_s) for sample in latest if sample is not None]
    return min(now, max(ends)) if ends else now
