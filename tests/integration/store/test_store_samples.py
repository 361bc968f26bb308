"""Samples on both databases: counted from receipts, written once per interval, merged, read as series, pruned."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest

from corral.contract.hardware import Device
from corral.contract.receipts import Receipt
from corral.controller.runtime.leadership import Leadership
from corral.controller.samples.recorder import MANY_NODES, SampleRecorder
from corral.controller.samples.service import SampleService
from corral.kit.errors import Invalid, NotFound, Unavailable
from corral.store import Store
from corral.store.tables import models, nodes, replicas, samples
from corral.store.tables.samples import Sample, SampleBody
from tests.integration.store.rows import NOON, a_model, a_node, a_replica
from tests.support.manual_clock import ManualClock

GIB = 1024**3
START = 1_800_000_000.0  # the beginning of a minute


def receipt(model: str = "smol", **told: Any) -> Receipt:
    defaults: dict[str, Any] = {"id": "r", "at": START, "key_id": "k", "path": "/v1/chat/completions", "status": 200}
    return Receipt(model=model, **(defaults | told))


class Counting:
    """One controller that counts."""

    def __init__(self, store: Store, clock: ManualClock, holder: str = "one") -> None:
        self.in_flight = 0
        self.waiting: dict[str, int] = {}
        self.clock = clock
        self.recorder = SampleRecorder(
            store,
            Leadership(store, holder, ttl_s=60),
            clock,
            in_flight_of=lambda node, process: self.in_flight,
            waiting=lambda: self.waiting,
        )
        self.service = SampleService(store, clock)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START)


@pytest.fixture
async def counting(store: Store, clock: ManualClock) -> Counting:
    async with store.write() as tx:
        await models.put(tx, a_model("smol"))
    return Counting(store, clock)


async def rows(store: Store, kind: str = "fleet", name: str = "", coarse: bool = False) -> list[Sample]:
    async with store.read() as tx:
        since = datetime.fromtimestamp(START, NOON.tzinfo) - timedelta(days=40)
        return await samples.list_(tx, kind=kind, name=name, since=since, coarse=coarse)


async def test_requests_of_a_minute_become_one_row_of_the_fleet_and_one_of_the_model(
    store: Store, counting: Counting, clock: ManualClock
) -> None:
    batch = [
        receipt(first_byte_ms=100, queue_ms=50, prompt_tokens=10, completion_tokens=90),
        receipt(first_byte_ms=400, prompt_tokens=10, completion_tokens=10),
        receipt("alias", served_by="smol", status=502),
        receipt(ending="upstream_broke"),
    ]
    await counting.recorder.on_receipts(batch)
    clock.advance(20)
    await counting.recorder.run_once()
    for found in (await rows(store), await rows(store, "model", "smol")):
        (row,) = found
        assert (row.body.requests, row.body.errors) == (4, 2)
        assert (row.body.prompt_tokens, row.body.completion_tokens) == (20, 100)
        assert row.body.until_s == 20
    clock.advance(20)
    await counting.recorder.on_receipts(batch[:1])
    await counting.recorder.run_once()
    assert [row.body.requests for row in await rows(store)] == [5], "the row grows until the minute ends"
    (coarse,) = await rows(store, coarse=True)
    assert (coarse.step_s, coarse.body.requests) == (900, 5)

    series = await counting.service.series("fleet", "", "1h")
    (point,) = series.points
    assert (point.requests, point.seconds) == (5, 40)
    assert point.first_token_p50_ms == pytest.approx(100, rel=0.08)
    assert point.first_token_p95_ms == pytest.approx(400, rel=0.08)
    assert point.queue_p50_ms == pytest.approx(50, rel=0.08)


async def test_the_next_minute_is_another_row_and_what_ended_is_written(
    store: Store, counting: Counting, clock: ManualClock
) -> None:
    await counting.recorder.on_receipts([receipt()])
    clock.advance(70)
    await counting.recorder.on_receipts([receipt(), receipt()])
    await counting.recorder.run_once()
    assert [(row.body.requests, row.body.until_s) for row in await rows(store)] == [(1, 60), (2, 10)]


async def test_two_controllers_count_side_by_side(store: Store, counting: Counting, clock: ManualClock) -> None:
    other = Counting(store, clock, "two")
    counting.waiting = other.waiting = {"smol": 3}
    for each in (counting, other):
        await each.recorder.on_receipts([receipt()])
    clock.advance(30)
    for each in (counting, other):
        await each.recorder.run_once()
    (point,) = (await counting.service.series("fleet", "", "1h")).points
    assert (point.requests, point.waiting) == (2, 3.0)
    assert sum("waiting" in row.body.gauges for row in await rows(store)) == 1, "only the leader reads gauges"
    (point,) = (await other.service.series("model", "smol", "1h")).points[-1:]
    assert (point.requests, point.waiting) == (2, 3.0)


async def test_a_model_that_nobody_knows_fills_no_table(store: Store, counting: Counting, clock: ManualClock) -> None:
    await counting.recorder.on_receipts([receipt(f"misspelt-{number}") for number in range(50)])
    clock.advance(20)
    await counting.recorder.run_once()
    (row,) = await rows(store)
    assert row.body.requests == 50
    assert not await rows(store, "model", "misspelt-1")


async def test_the_leader_measures_memory_devices_and_requests_of_nodes(
    store: Store, counting: Counting, clock: ManualClock
) -> None:
    gpu = Device(index=0, vendor="nvidia", total_bytes=24 * GIB, free_bytes=4 * GIB, temperature_c=61, power_w=210)
    node = a_node(name="barn", devices=(gpu, gpu), total_ram=64 * GIB, available_ram=60 * GIB)
    async with store.write() as tx:
        await nodes.insert(tx, node)
        await replicas.put(tx, [a_replica(node.id, "smol", process_id="p1")])
    counting.in_flight = 2
    await counting.recorder.run_once()
    clock.advance(20)
    await counting.recorder.run_once()
    (point,) = (await counting.service.series("node", "barn", "1h")).points
    assert (point.device_used_bytes, point.device_bytes) == (40 * GIB, 48 * GIB)
    assert (point.ram_used_bytes, point.ram_bytes) == (4 * GIB, 64 * GIB)
    assert (point.temperature_c, point.power_w, point.in_flight) == (61, 420, 2)
    assert (await counting.service.series("node", node.id, "1h")).points == (point,)


async def test_a_large_fleet_is_sampled_less_often(store: Store, counting: Counting) -> None:
    fleet = [a_node(total_ram=GIB) for _ in range(MANY_NODES + 1)]
    async with store.write() as tx:
        for node in fleet:
            await nodes.insert(tx, node)
    await counting.recorder.run_once()
    (row,) = await rows(store, "node", fleet[0].id)
    (coarse,) = await rows(store, "node", fleet[0].id, coarse=True)
    assert (row.step_s, coarse.step_s) == (300, 3600)


async def test_what_could_not_be_written_is_written_later(
    store: Store, counting: Counting, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    await counting.recorder.on_receipts([receipt()])
    clock.advance(70)

    async def refuse(*_: Any) -> None:
        raise Unavailable("the database is away")

    with monkeypatch.context() as broken:
        broken.setattr(samples, "put", refuse)
        with pytest.raises(Unavailable):
            await counting.recorder.run_once()
    await counting.recorder.on_receipts([receipt()])
    await counting.recorder.run_once()
    assert [row.body.requests for row in await rows(store)] == [1, 1]


async def test_fine_samples_live_for_a_day_and_coarse_ones_for_thirty(store: Store) -> None:
    async with store.write() as tx:
        now = await tx.now()
        ages = {60: (timedelta(hours=24), timedelta(hours=26)), 900: (timedelta(days=29), timedelta(days=31))}
        await samples.put(
            tx,
            [
                Sample("fleet", "", step_s, at=now - age, source="a", body=SampleBody(until_s=step_s))
                for step_s, of_step in ages.items()
                for age in of_step
            ],
        )
        assert await samples.prune(tx, now) == 2
        since = now - timedelta(days=40)
        fine = await samples.list_(tx, kind="fleet", name="", since=since, coarse=False)
        coarse = await samples.list_(tx, kind="fleet", name="", since=since, coarse=True)
    assert [now - row.at for row in (*fine, *coarse)] == [timedelta(hours=24), timedelta(days=29)]


async def test_questions_that_have_no_answer_say_what_to_ask(counting: Counting) -> None:
    for kind, name, span, words in (
        ("cluster", "", "1h", "kind: 'cluster' is none of fleet, model, node"),
        ("fleet", "", "2h", "range: '2h' is none of 1h, 6h, 24h, 7d, 30d"),
        ("model", "", "1h", "name: give it for a model or a node, and only then"),
    ):
        with pytest.raises(Invalid, match=words):
            await counting.service.series(kind, name, span)
    with pytest.raises(NotFound, match="there is no node 'nowhere'; `corral nodes` lists them"):
        await counting.service.series("node", "nowhere", "1h")


@pytest.mark.parametrize("span", ["7d", "30d"])
async def test_what_ended_long_ago_is_read_once_and_the_series_is_the_same(
    store: Store, counting: Counting, clock: ManualClock, span: str
) -> None:
    now = datetime.fromtimestamp(START, NOON.tzinfo)

    async def put(*ages_s: int, step_s: int = 900) -> None:
        async with store.write() as tx:
            body = SampleBody(until_s=step_s, requests=5, gauges={})
            found = [Sample("fleet", "", step_s, now - timedelta(seconds=age), "one", body) for age in ages_s]
            await samples.put(tx, found)

    await put(*range(900, 31 * 86400, 900))
    await put(60, step_s=60)  # somebody counted until now
    for minutes in (0, 1, 2, 9, 5):  # all is read again after 10
        clock.advance(minutes * 60)
        now += timedelta(minutes=minutes)
        await put(0)
        await put(60, step_s=60)
        kept, anew = counting.service, SampleService(store, clock)
        assert await kept.series("fleet", "", span) == await anew.series("fleet", "", span), minutes
    began = len((await counting.service.series("fleet", "", span)).points)
    async with store.write() as tx:
        await samples.prune(tx, now + timedelta(days=40))
    assert len((await counting.service.series("fleet", "", span)).points) >= began - 3, "it was not read again"
    clock.advance(601)
    assert (await counting.service.series("fleet", "", span)).points == (), "after a while it is"
