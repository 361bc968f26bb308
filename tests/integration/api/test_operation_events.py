"""Operations as server-sent events: on `/api/events` with everything else, and one by itself."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from corral.bus.local import LocalHub
from corral.controller.runtime.change_feed import ChangeFeed
from corral.kit.clock import SystemClock
from corral.store import open_store
from corral.store.engine.transactions import Transaction
from corral.store.tables import revisions
from tests.support.backend_api import Api, open_api
from tests.support.sqlite import sqlite_url


async def next_of(stream: Any, kind: str) -> Any:
    async with asyncio.timeout(20):
        async for name, data in stream:
            if name == kind:
                return data
    raise AssertionError(f"the stream ended before a {kind}")


async def test_one_operation_is_followed_from_where_it_is_to_its_end(api: Api) -> None:
    barn = await api.fleet.corral("barn")
    barn.script.hold = asyncio.Event()
    job = await api.install()
    await api.fleet.until_row(job, "barn", "downloading")
    seen: list[float] = []
    async with api.events(f"/api/operations/{job}/events") as stream:
        first = await next_of(stream, "operation")
        assert (first["jobID"], first["state"]) == (job, "under_way")
        for number in (1, 2, 3):
            await barn.progress(
                job, backend="vllm", attempt=1, seq=number, percentage=number * 10.0, phase="downloading"
            )
        while not seen or seen[-1] < 30:
            seen.append((await next_of(stream, "operation"))["nodes"][0]["percentage"])
        assert seen == sorted(seen), "progress never goes backwards"
        barn.script.hold.set()
        last: dict[str, Any] = {}
        async with asyncio.timeout(20):
            async for name, data in stream:  # which ends by itself
                assert name == "operation"
                last = data
        assert (last["state"], last["progress"], last["message"]) == ("done", 100, "completed")
        assert last["finished_at"]


async def test_one_that_has_ended_is_told_once(api: Api) -> None:
    await api.fleet.corral("barn")
    job = await api.install()
    await api.fleet.until(job, "done")
    async with api.events(f"/api/operations/{job}/events") as stream, asyncio.timeout(20):
        told = [data["outcome"] async for _, data in stream]
    assert told == ["completed"]


async def test_the_stream_of_everything_has_operations_before_ready_and_as_they_change(api: Api) -> None:
    barn = await api.fleet.corral("barn")
    barn.script.hold = asyncio.Event()
    job = await api.install()
    await api.fleet.until_row(job, "barn", "downloading")
    async with api.events("/api/events") as stream, asyncio.timeout(20):
        before = []
        async for name, data in stream:
            if name == "ready":
                break
            before.append((name, data.get("jobID")))
        assert ("operation", job) in before
        second = await api.install("llama-cpp", node="barn")
        while (told := await next_of(stream, "operation"))["jobID"] != second:
            pass
        assert told["backend"] == "llama-cpp"
        await api.post(f"/api/operations/{job}/dismiss")
        assert await next_of(stream, "operation-removed") == {"id": job}
        barn.script.hold.set()


async def test_the_stream_of_everything_leaves_out_the_nodes_of_operations_on_request(api: Api) -> None:
    barn = await api.fleet.corral("barn")
    barn.script.hold = asyncio.Event()
    job = await api.install()
    await api.fleet.until_row(job, "barn", "downloading")
    async with api.events("/api/events?rows=false") as stream, asyncio.timeout(20):
        told = await next_of(stream, "operation")
    assert (told["jobID"], told["counts"], told.get("nodes", [])) == (job, {"downloading": 1}, [])
    barn.script.hold.set()


async def test_a_watcher_gets_at_most_four_updates_a_second_and_always_the_last(api: Api) -> None:
    barn = await api.fleet.corral("barn")
    barn.script.hold = asyncio.Event()
    job = await api.install()
    await api.fleet.until_row(job, "barn", "downloading")
    now = asyncio.get_running_loop().time
    async with api.events(f"/api/operations/{job}/events") as stream:
        await next_of(stream, "operation")
        arrivals: list[float] = []
        started, percentage = now(), 0.0
        for number in range(1, 101):
            await barn.progress(
                job, backend="vllm", attempt=1, seq=number, percentage=float(number), phase="extracting"
            )
            await asyncio.sleep(0.01)
        while percentage < 99.9:  # the last one comes though nothing follows it
            percentage = (await next_of(stream, "operation"))["nodes"][0]["percentage"]
            arrivals.append(now())
        spent = arrivals[-1] - started
        assert len(arrivals) <= spent / 0.25 + 2
        assert len(arrivals) < 50, "a hundred events were not a hundred updates"
        barn.script.hold.set()


async def test_what_one_controller_is_told_the_other_shows(tmp_path: Path) -> None:
    async with open_api(tmp_path) as api:
        barn = await api.fleet.corral("barn")
        barn.script.hold = asyncio.Event()
        await api.serve(await api.fleet.controller("c2", url=sqlite_url(tmp_path)))
        async with api.events("/api/events", on=1) as stream:
            await next_of(stream, "ready")
            job = await api.install()
            assert (await next_of(stream, "operation"))["jobID"] == job
            await api.fleet.until_row(job, "barn", "downloading")
            await barn.progress(job, backend="vllm", attempt=1, seq=1, percentage=50.0, phase="downloading")
            while (await next_of(stream, "operation"))["nodes"][0]["percentage"] != 50.0:
                pass
            barn.script.hold.set()
            while (await next_of(stream, "operation"))["state"] != "done":
                pass


class SlowSource:
    """A source whose reading takes as long as the test wants."""

    event = "thing"
    counter = "things"

    def __init__(self) -> None:
        self.begun, self.go_on = asyncio.Event(), asyncio.Event()

    async def read(self, tx: Transaction) -> dict[str, object]:
        self.begun.set()
        await self.go_on.wait()
        return {"t": {"id": "t"}}


async def test_a_pass_that_overtakes_a_new_subscription_does_not_cost_it_the_current_state(tmp_path: Path) -> None:
    async with open_store(sqlite_url(tmp_path)) as store:
        bus = LocalHub(SystemClock()).join("c")
        feed, source = ChangeFeed(store, bus, SystemClock(), interval_s=60), SlowSource()
        feed.add_source(source)
        async with store.write() as tx:
            await revisions.bump(tx, "things")

        async def follow() -> list[str]:
            async with feed.subscribe() as subscription:
                return [(await subscription.next()).kind for _ in range(2)]

        following = asyncio.create_task(follow())
        await source.begun.wait()
        async with store.write() as tx:
            await revisions.bump(tx, "nodes")
        await feed.run_once()  # begins later, ends sooner, and has no reason to read the source
        source.go_on.set()
        async with asyncio.timeout(10):
            assert await following == ["thing", "ready"]
        await bus.close()


async def test_a_key_that_is_not_known_follows_nothing(api: Api) -> None:
    assert (await api.get("/api/events", key="ck_nobody")).status == 401
