"""Operations followed to their end over real sockets, whatever the streams do."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from corral.client import Client, Endpoint
from corral.client.operation_watch import OperationWatch
from corral.contract.admin import OperationBody, OperationView
from corral.kit import errors
from tests.support.scripted_fleet import KEY, ScriptedFleet, event, refused, scripted_fleet
from tests.support.waiting import until


@pytest.fixture
def fleet() -> Iterator[ScriptedFleet]:
    with scripted_fleet() as running:
        yield running


def operation(state: str = "under_way", job: str = "op-1", percent: int = 0) -> dict[str, Any]:
    """As the API writes it."""
    return {
        "id": "vllm",
        "jobID": job,
        "progress": percent,
        "kind": "install",
        "backend": "vllm",
        "scope": "all",
        "state": state,
        "settled": state != "under_way",
        "nodes": [{"node_id": "a", "node_name": "attic", "status": "downloading", "percentage": percent}],
    }


class Seen:
    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []
        self.trouble: list[str] = []
        self.back = 0

    def see(self, view: OperationView) -> None:
        self.told.append((view.state, view.progress))

    def lost(self, reason: str) -> None:
        self.trouble.append(reason)

    def found(self) -> None:
        self.back += 1


async def follow(
    fleet: ScriptedFleet, seen: Seen, *ids: str, key: str = KEY, read_every_s: float = 30.0
) -> list[tuple[str, str]]:
    async with asyncio.timeout(20), Client(Endpoint(fleet.url, key)) as client:
        following = OperationWatch(
            client, ids or ("op-1",), seen, read_every_s=read_every_s, retry_first_s=0.02, retry_cap_s=0.05
        )
        return [(view.job_id, view.state) for view in await following.run()]


async def test_asking_planning_and_steering_use_the_contracts_routes(fleet: ScriptedFleet) -> None:
    fleet.accepts = [operation()]
    async with Client(Endpoint(fleet.url, KEY)) as client:
        wanted = OperationBody(kind="upgrade", backend="vllm", selector="tier=fast", max_parallel="1")
        assert (await client.operations.ask(wanted)).job_id == "op-1"
        assert (await client.operations.plan(wanted)).backend == "vllm"
        await client.operations.cancel("op-1", node="a b")
        await client.operations.withdraw("op-1")
        assert (await client.operations.retry("op-1")).job_id == "op-1"
        await client.operations.dismiss("op-1")
        assert [each.job_id for each in await client.operations.list()] == ["op-1"]
        assert [each.outcome for each in await client.operations.history()] == ["completed"]
        await client.operations.clear_history()
        with pytest.raises(errors.NotFound, match="no operation a%2Fb"):
            await client.operations.get("a/b")
    body = {"kind": "upgrade", "backend": "vllm", "selector": "tier=fast", "max_parallel": "1"}
    assert [call for call in fleet.calls if call[0] != "GET"] == [
        ("POST", "/api/operations", body),
        ("POST", "/api/operations", body),
        ("POST", "/api/operations/op-1/cancel", None),
        ("POST", "/api/operations/op-1/withdraw", None),
        ("POST", "/api/operations/op-1/retry", None),
        ("POST", "/api/operations/op-1/dismiss", None),
        ("DELETE", "/api/operations/history", None),
    ]


async def test_all_operations_are_read_page_by_page(fleet: ScriptedFleet) -> None:
    fleet.operations = [operation("done", job=f"op-{number}") for number in range(120)]
    async with Client(Endpoint(fleet.url, KEY)) as client:
        assert len(await client.operations.list(everything=True)) == 120
        assert len(await client.operations.list(everything=True, rows=False)) == 120
        assert len(await client.operations.list()) == 120
    assert _asked(fleet, "/api/operations") == 5


async def test_the_stream_tells_progress_and_the_end(fleet: ScriptedFleet) -> None:
    fleet.operations = [operation()]
    fleet.told = [[operation(percent=40), operation("done", percent=100)]]
    seen = Seen()
    assert await follow(fleet, seen) == [("op-1", "done")]
    assert seen.told[-2:] == [("under_way", 40), ("done", 100)]
    assert seen.trouble == []


async def test_a_stream_that_breaks_off_before_the_end_loses_nothing(fleet: ScriptedFleet) -> None:
    fleet.operations = [operation()]
    fleet.told = [[operation(percent=10)], [operation(percent=20)], [operation("failing", percent=30)]]
    seen = Seen()
    assert await follow(fleet, seen) == [("op-1", "failing")]
    assert [percent for _, percent in seen.told if percent] == [10, 20, 30]


async def test_an_end_nobody_told_is_read(fleet: ScriptedFleet) -> None:
    fleet.operations = [operation()]
    fleet.silent = True
    seen = Seen()
    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(follow(fleet, seen, read_every_s=0.05))
        await until(lambda: len(seen.told) >= 2)
        fleet.operations = [operation("waiting")]
    assert following.result() == [("op-1", "waiting")]


async def test_a_fleet_that_is_away_is_waited_for_and_its_return_is_told(fleet: ScriptedFleet) -> None:
    fleet.operations = [operation("done")]
    # The very first look may fail too: what was asked for has been accepted, so there is something to come back to.
    fleet.answers[("GET", "/api/operations/op-1")] = refused(503, "the controller restarts", "unavailable")
    fleet.answers[("GET", "/api/operations/op-1/events")] = refused(503, "the controller restarts", "unavailable")
    seen = Seen()
    assert await follow(fleet, seen) == [("op-1", "done")]
    assert (seen.trouble, seen.back) == (["the controller restarts"], 1)


async def test_many_followers_do_not_hide_the_end(fleet: ScriptedFleet) -> None:
    fleet.operations = [operation()]
    fleet.answers[("GET", "/api/operations/op-1/events")] = refused(503, "1000 others follow already", "no_capacity")
    seen = Seen()
    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(follow(fleet, seen))
        await until(lambda: len(seen.told) >= 3)  # read again and again, though reading is due in half a minute
        fleet.operations = [operation("done")]
    assert following.result() == [("op-1", "done")]


async def test_several_are_over_when_all_rest_at_one_moment(fleet: ScriptedFleet) -> None:
    fleet.operations = [operation("waiting"), operation(job="op-2")]
    fleet.silent = True
    seen = Seen()
    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(follow(fleet, seen, "op-1", "op-2", read_every_s=0.05))
        await until(lambda: len(seen.told) >= 4)
        fleet.operations = [operation("done"), operation("failing", job="op-2")]
    assert following.result() == [("op-1", "done"), ("op-2", "failing")]


async def test_one_that_has_ended_is_left_alone_while_another_goes_on(fleet: ScriptedFleet) -> None:
    ended = operation("done", percent=100) | {"finished_at": "2026-11-15T12:00:00Z"}
    fleet.operations = [ended, operation(job="op-2")]
    fleet.told = [[ended]]
    seen = Seen()
    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(follow(fleet, seen, "op-1", "op-2"))
        await until(lambda: _asked(fleet, "/api/operations/op-2") >= 5)
        fleet.operations = [ended, operation("done", job="op-2")]
    assert following.result() == [("op-1", "done"), ("op-2", "done")]
    assert _asked(fleet, "/api/operations/op-1") == 1
    assert _asked(fleet, "/api/operations/op-1/events") <= 2  # the first may have been told of the other's view


async def test_two_hundred_at_once_are_one_stream(fleet: ScriptedFleet) -> None:
    ids = [f"op-{number}" for number in range(200)]
    fleet.operations = [operation(job=each) for each in ids]
    ended = [operation("done", job=each) | {"finished_at": "2026-11-15T12:00:00Z"} for each in ids]
    fleet.streams = [[event("operation", each) for each in ended[:150]], [event("operation", each) for each in ended]]
    assert await follow(fleet, Seen(), *ids) == [(each, "done") for each in ids]
    assert _asked(fleet, "/api/events") == 2
    assert sum(path.endswith("/events") for _, path, _ in fleet.calls) == 2
    assert _asked(fleet, "/api/operations/op-0") <= 2, "not again and again what has ended"


async def test_what_waiting_cannot_cure_is_raised_as_itself(fleet: ScriptedFleet) -> None:
    with pytest.raises(errors.NotFound, match="no operation op-1"):
        await follow(fleet, Seen())
    with pytest.raises(errors.Unauthenticated):
        await follow(fleet, Seen(), key="ck_wrong")


async def test_leaving_in_the_middle_leaves_nothing_behind(fleet: ScriptedFleet) -> None:
    fleet.operations = [operation()]
    fleet.silent = True
    seen = Seen()
    following = asyncio.create_task(follow(fleet, seen))
    await until(lambda: ("GET", "/api/operations/op-1/events", None) in fleet.calls and seen.told)
    following.cancel()
    with pytest.raises(asyncio.CancelledError):
        await following
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_the_clients_way_to_backends(fleet: ScriptedFleet) -> None:
    fleet.available = [{"name": "vllm", "id": "ours@vllm", "gallery": {"name": "ours", "url": "x"}, "newer": 1}]
    fleet.upgrades = {"vllm": {"backend_name": "vllm", "installed_version": "1", "available_version": "2"}}
    fleet.matrix = {
        "nodes": [{"id": "a", "name": "attic", "status": "healthy"}],
        "backends": [{"backend": "vllm", "nodes": {"a": {"installed": True, "version": "1"}}}],
    }
    async with Client(Endpoint(fleet.url, KEY)) as client:
        assert [each.gallery.name for each in await client.backends.available()] == ["ours"]
        assert (await client.backends.upgrades())["vllm"].available_version == "2"
        assert (await client.backends.check_upgrades())["vllm"].installed_version == "1"
        assert (await client.backends.matrix()).backends[0].nodes["a"].version == "1"


def _asked(fleet: ScriptedFleet, path: str) -> int:
    return sum(called == path for _, called, _ in fleet.calls)
