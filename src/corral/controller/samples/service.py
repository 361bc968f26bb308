"""Reads samples as series, for the API and the charts of the page."""

from __future__ import annotations

from datetime import timedelta

from corral.contract.samples import SampleSeries
from corral.controller.runtime.node_views import rfc3339
from corral.controller.samples.series import RANGES, Range, covered_until, points_of
from corral.kit.clock import Clock
from corral.kit.errors import Invalid, NotFound
from corral.store.engine.transactions import Store
from corral.store.tables import nodes, samples

KINDS = ("fleet", "model", "node")


class SampleService:
    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock

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
            rows = await samples.list_(tx, kind=kind, name=key, since=since, coarse=shown.coarse)
            latest = await samples.find_latest(tx, kind="fleet", name="", since=now - timedelta(hours=1))
        step_s = max(shown.step_s, *(row.step_s for row in rows)) if rows else shown.step_s
        until = covered_until([latest], now)
        points = points_of(rows, since=since, until=until, step_s=step_s, gaps=kind != "model")
        return SampleSeries(kind, name, rfc3339(now - shown.span), rfc3339(until), step_s, points)
