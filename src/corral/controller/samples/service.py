"""Reads samples as series, for the API and the charts of the page."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from corral.contract.samples import SamplePoint, SampleSeries
from corral.controller.runtime.node_views import rfc3339
from corral.controller.samples.series import RANGES, Range, begin_of, covered_until, points_of
from corral.kit.clock import Clock
from corral.kit.errors import Invalid, NotFound
from corral.store.engine.transactions import Store
from corral.store.tables import nodes, samples

KINDS = ("fleet", "model", "node")
_SETTLED_AFTER = timedelta(hours=1)  # controllers write the rows of present intervals only
_KEPT_FOR = timedelta(minutes=10)  # then all is read again
MAX_KEPT = 64  # series


@dataclass(frozen=True)
class SettledPoints:
    """The points of a series whose intervals ended long ago: 30 days have some 3,000 rows, which do not change."""

    step_s: int
    until: datetime  # the beginning of the first interval that is not among them
    read_at: datetime
    points: tuple[SamplePoint, ...]


class SampleService:
    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._settled: dict[tuple[str, str, str], SettledPoints] = {}  # by kind, name and range; the oldest first

    async def series(self, kind: str, name: str, span: str) -> SampleSeries:
        """`name`: of a model; of a node its name or id; empty for the fleet."""
        if kind not in KINDS:
            raise Invalid(f"kind: {kind!r} is none of {', '.join(KINDS)}")
        if span not in RANGES:
            raise Invalid(f"range: {span!r} is none of {', '.join(RANGES)}")
        if (kind == "fleet") != (not name):
            raise Invalid("name: give it for a model or a node, and only then")
        return await self._read(kind, name, RANGES[span])

    async def _read(self, kind: str, name: str, shown: Range) -> SampleSeries:
        now = self._clock.now()
        since = now - shown.span - timedelta(seconds=shown.step_s)
        async with self._store.read() as tx:
            key = name
            if kind == "node":
                node = await nodes.find_by_name(tx, name) or await nodes.find(tx, name)
                if node is None:
                    raise NotFound(f"there is no node {name!r}; `corral nodes` lists them")
                key = node.id
            place = (kind, key, shown.key)
            settled = self._find_settled(place, now)
            rows = await samples.list_(
                tx, kind=kind, name=key, since=settled.until if settled else since, coarse=shown.coarse
            )
            if settled is not None and any(row.step_s > settled.step_s for row in rows):
                settled = None  # a fleet that grew has longer intervals
                rows = await samples.list_(tx, kind=kind, name=key, since=since, coarse=shown.coarse)
            latest = await samples.find_latest(tx, kind="fleet", name="", since=now - timedelta(hours=1))
        step_s = max((settled.step_s if settled else shown.step_s, *(row.step_s for row in rows)))
        until = covered_until([latest], now)
        begin = settled.until - timedelta(seconds=step_s) if settled else since  # the first interval is left out
        fresh = points_of(rows, since=begin, until=until, step_s=step_s, gaps=kind != "model")
        first = begin_of(since, step_s).isoformat()
        points = (*(point for point in settled.points if point.at > first), *fresh) if settled else fresh
        if shown.coarse:
            self._keep_settled(
                place, points, min(until, now - _SETTLED_AFTER), step_s, settled.read_at if settled else now
            )
        return SampleSeries(kind, name, rfc3339(now - shown.span), rfc3339(until), step_s, points)

    def _find_settled(self, place: tuple[str, str, str], now: datetime) -> SettledPoints | None:
        found = self._settled.get(place)
        is_usable = found is not None and found.until <= now and timedelta(0) <= now - found.read_at < _KEPT_FOR
        return found if is_usable else None

    def _keep_settled(
        self, place: tuple[str, str, str], points: tuple[SamplePoint, ...], until: datetime, step_s: int, at: datetime
    ) -> None:
        end = begin_of(until, step_s)
        self._settled.pop(place, None)
        if len(self._settled) >= MAX_KEPT:
            del self._settled[next(iter(self._settled))]
        kept = tuple(point for point in points if point.at < end.isoformat())
        self._settled[place] = SettledPoints(step_s, end, at, kept)
