"""Counts receipts into samples and writes them every few seconds. Each controller counts the receipts that it gets;
the leader also reads gauges: requests that wait and are in flight, and the memory and devices of nodes.

Nothing waits for this: receipts arrive in batches after the requests have ended. A controller that is killed loses what
it counted since the last write.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from corral.contract.hardware import Device
from corral.contract.receipts import Receipt, is_failure
from corral.controller.runtime.leadership import Leadership
from corral.controller.samples.series import Tally, begin_of, bucket_of
from corral.kit.clock import Clock
from corral.kit.tasks import run_every
from corral.store.engine.transactions import Store, Transaction
from corral.store.tables import models, nodes, replicas, samples
from corral.store.tables.samples import COARSE_S, Sample

_LEASE = "samples"
FLEET: Final = ("fleet", "")
FINE_S: Final = 60
MAX_SERIES: Final = 4000  # that are counted at a time; what comes after it is in the fleet's only
MAX_NODES: Final = 1000
# A fleet of a thousand nodes would write a thousand rows a minute: large fleets are sampled less often.
MANY_NODES: Final = 100
_NODE_STEPS: Final = (FINE_S, COARSE_S)
_NODE_STEPS_OF_MANY: Final = (300, 3600)
_MAX_UNWRITTEN: Final = 50_000  # ended intervals, while the database does not answer

Key = tuple[str, str]  # kind and name


@dataclass
class _Interval:
    at: datetime
    tally: Tally = field(default_factory=Tally)
    dirty: bool = True


class SampleRecorder:
    name = "samples"

    def __init__(
        self,
        store: Store,
        leadership: Leadership,
        clock: Clock,
        *,
        in_flight_of: Callable[[str, str], int],
        waiting: Callable[[], Mapping[str, int]],
        interval_s: float = 10.0,
    ) -> None:
        """`in_flight_of`: of a node and a process; `waiting`: requests that wait at gateways, by model."""
        self._store = store
        self._leadership = leadership
        self._clock = clock
        self._in_flight_of = in_flight_of
        self._waiting = waiting
        self._interval_s = interval_s
        self._source = uuid.uuid4().hex[:12]
        self._open: dict[tuple[str, str, int], _Interval] = {}
        self._ended: dict[tuple[str, str, int, datetime], Tally] = {}  # not written yet
        self._nodes_read_at: datetime | None = None

    async def run(self) -> None:
        await run_every("samples", self._interval_s, self.run_once, clock=self._clock)

    async def on_receipts(self, receipts: Sequence[Receipt]) -> None:
        now = self._clock.now()
        tallies: dict[str, tuple[Tally, ...]] = {}  # those of a batch have few models
        for receipt in receipts:
            model = receipt.served_by or receipt.model
            found = tallies.get(model)
            if found is None:
                found = tallies[model] = (*self._tallies(FLEET, now), *self._tallies(("model", model), now))
            _count(receipt, found)

    async def run_once(self) -> None:
        now = self._clock.now()
        if await self._leadership.lead(_LEASE, every_s=self._interval_s):
            await self._measure(now)
        await self._write(now)

    async def _measure(self, now: datetime) -> None:
        due = self._nodes_read_at is None or (now - self._nodes_read_at).total_seconds() >= FINE_S - 1
        async with self._store.read() as tx:
            rows = await replicas.list_(tx)
            hardware = await nodes.list_hardware(tx, limit=MAX_NODES) if due else []
        waiting = self._waiting()
        in_flight: dict[str, int] = {}
        by_node: dict[str, int] = {}
        for row in rows:
            if row.process_id:
                count = self._in_flight_of(row.node_id, row.process_id)
                in_flight[row.model] = in_flight.get(row.model, 0) + count
                by_node[row.node_id] = by_node.get(row.node_id, 0) + count
        self._gauge(FLEET, now, {"waiting": sum(waiting.values()), "in_flight": sum(in_flight.values())})
        for model in {*in_flight, *waiting}:
            busy = {"waiting": waiting.get(model, 0), "in_flight": in_flight.get(model, 0)}
            if any(busy.values()):
                self._gauge(("model", model), now, busy)
        if due:
            self._nodes_read_at = now
            steps = _NODE_STEPS if len(hardware) <= MANY_NODES else _NODE_STEPS_OF_MANY
            for node in hardware:
                values = _measured(node.devices, node.total_ram, node.available_ram)
                self._gauge(("node", node.id), now, {**values, "in_flight": by_node.get(node.id, 0)}, steps)

    async def _write(self, now: datetime) -> None:
        self._end_past(now)
        dirty = [(key, interval) for key, interval in self._open.items() if interval.dirty]
        if not dirty and not self._ended:
            return
        ended = dict(self._ended)
        rows = [
            Sample(kind, name, step_s, at=at, source=self._source, body=tally.body(step_s))
            for (kind, name, step_s, at), tally in ended.items()
        ]
        for (kind, name, step_s), interval in dirty:
            body = interval.tally.body((now - interval.at).total_seconds())
            rows.append(Sample(kind, name, step_s, at=interval.at, source=self._source, body=body))
            interval.dirty = False
        try:
            async with self._store.write() as tx:
                await samples.put(tx, await _of_known_models(tx, rows))
        except BaseException:
            for _, interval in dirty:
                interval.dirty = True
            raise
        for key in ended:
            self._ended.pop(key, None)

    def _tallies(self, key: Key, now: datetime, steps: tuple[int, int] = _NODE_STEPS) -> list[Tally]:
        """Of the intervals that the moment is in. They count as changed."""
        found = []
        for step_s in steps:
            place, at = (*key, step_s), begin_of(now, step_s)
            interval = self._open.get(place)
            if interval is not None and interval.at != at:
                self._end(place, interval)
                interval = None
            if interval is None:
                if len(self._open) >= MAX_SERIES and key != FLEET:
                    continue
                interval = self._open[place] = _Interval(at)
            interval.dirty = True
            found.append(interval.tally)
        return found

    def _gauge(
        self, key: Key, now: datetime, values: Mapping[str, float], steps: tuple[int, int] = _NODE_STEPS
    ) -> None:
        for tally in self._tallies(key, now, steps):
            for name, value in values.items():
                tally.measure(name, value)

    def _end_past(self, now: datetime) -> None:
        for place, interval in list(self._open.items()):
            if interval.at + timedelta(seconds=place[2]) <= now:
                self._end(place, interval)

    def _end(self, place: tuple[str, str, int], interval: _Interval) -> None:
        del self._open[place]
        if len(self._ended) < _MAX_UNWRITTEN:
            self._ended[(*place, interval.at)] = interval.tally


async def _of_known_models(tx: Transaction, rows: list[Sample]) -> list[Sample]:
    """A misspelt name in a request must not fill the table."""
    if not any(row.kind == "model" for row in rows):
        return rows
    known = set(await models.list_ids(tx))
    return [row for row in rows if row.kind != "model" or row.name in known]


def _count(receipt: Receipt, tallies: Iterable[Tally]) -> None:
    failed = is_failure(receipt.status, receipt.ending)
    first = bucket_of(receipt.first_byte_ms) if receipt.first_byte_ms > 0 else None
    queued = bucket_of(receipt.queue_ms) if receipt.queue_ms > 0 else None
    for tally in tallies:
        tally.requests += 1
        tally.errors += failed
        tally.prompt_tokens += max(0, receipt.prompt_tokens)
        tally.completion_tokens += max(0, receipt.completion_tokens)
        if first is not None:
            tally.first_token[first] += 1
        if queued is not None:
            tally.queue[queued] += 1


def _measured(devices: Iterable[Device], total_ram: int, available_ram: int) -> dict[str, float]:
    known = [device for device in devices if device.total_bytes and device.free_bytes is not None]
    values: dict[str, float] = {}
    if total_ram:
        values |= {"ram": total_ram, "ram_used": max(0, total_ram - available_ram)}
    if known:
        values["device"] = sum(device.total_bytes for device in known)
        values["device_used"] = sum(device.total_bytes - (device.free_bytes or 0) for device in known)
    temperatures = [device.temperature_c for device in devices if device.temperature_c is not None]
    powers = [device.power_w for device in devices if device.power_w is not None]
    if temperatures:
        values["temperature"] = max(temperatures)
    if powers:
        values["power"] = sum(powers)
    return values
