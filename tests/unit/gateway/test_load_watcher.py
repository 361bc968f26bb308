"""Requests for a cold model: somebody asks for its load whenever one waits, and none waits for what is there."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from corral.contract.loads import LoadStatus
from corral.contract.view import FleetView, ViewModel, ViewNode, ViewReplica
from corral.gateway.responses import Response
from corral.gateway.routing.in_flight import InFlight
from corral.gateway.routing.load_watcher import LoadWatcher
from corral.gateway.routing.replicas import Route
from corral.gateway.routing.request import RouteRequest
from corral.gateway.routing.router import ReplicaRouter
from corral.gateway.routing.settings import RoutingSettings
from corral.gateway.view.fleet import Client, prepare_fleet
from corral.kit.clock import SystemClock
from corral.kit.errors import Unavailable
from corral.kit.settings import Seconds
from tests.support.scripted_controller_link import ScriptedControllerLink
from tests.support.waiting import until
from tests.unit.gateway.requests import a_request

NODE = ViewNode("n", "n", "healthy", "http://n:1", "t")
CLIENT = Client("k", "inference", True, True, False, float("inf"), None, b"")


class ScriptedLoads(ScriptedControllerLink):
    def __init__(self) -> None:
        self.requested = 0
        self.answer = asyncio.Event()
        self.status = LoadStatus(model="m", state="pending")

    async def request_load(self, model: str) -> LoadStatus | None:
        self.requested += 1
        await self.answer.wait()
        return self.status

    async def load_status(self, model: str, since: int, wait_s: float) -> LoadStatus | None:
        await asyncio.Event().wait()
        return None


class OneWaiter:
    waits = True

    def is_wanted(self, model: str) -> bool:
        return self.waits

    def on_load_failed(self, model: str, status: LoadStatus | None, *, failed_before: bool) -> None:
        self.waits = False


async def nothing_new() -> None:
    pass


def view(*, warm: bool, how: str = "use") -> FleetView:
    model = ViewModel(id="m", revision="r", while_loading=how, stand_in="other")
    replicas = (ViewReplica("p", "n", "m", 0, "r", 1),) if warm else ()
    return FleetView(nodes=(NODE,), models=(model,), replicas=replicas)


def route_request() -> RouteRequest:
    return RouteRequest(a_request(b"/v1/x"), prepare_fleet(view(warm=False)), CLIENT, "m", b"{}")


def a_router(client: ScriptedLoads) -> tuple[ReplicaRouter, LoadWatcher]:
    loads = LoadWatcher(client, lambda: None, SystemClock(), poll_s=60.0)
    return ReplicaRouter(InFlight(), loads, SystemClock(), RoutingSettings(load_wait_s=Seconds(0)), nothing_new), loads


async def steps(many: int = 8) -> None:
    for _ in range(many):
        await asyncio.sleep(0)


@pytest.mark.parametrize("ends", ["by itself", "when ready"])
async def test_whoever_comes_while_a_watch_is_ending_is_attended_to(ends: str) -> None:
    client, waiter = ScriptedLoads(), OneWaiter()
    client.answer.set()
    client.status = LoadStatus(model="m", state="failed", error="no")
    loads = LoadWatcher(client, lambda: None, SystemClock(), poll_s=60.0)
    loads.watch("m", waiter)
    if ends == "when ready":
        loads.on_ready("m")
    else:
        for _ in range(50):
            if waiter.waits:  # it is told of the failure, and ends within that very step
                await asyncio.sleep(0)
    again = OneWaiter()
    loads.watch("m", again)
    await steps()
    assert not again.waits, "nobody asks for the load that this one waits for"
    await loads.close()


async def test_what_became_warm_while_the_controller_was_asked_is_used_at_once() -> None:
    client = ScriptedLoads()
    router, loads = a_router(client)
    router.apply_view(view(warm=False))
    asking = asyncio.ensure_future(router.route(route_request()))
    await steps()
    assert client.requested == 1
    router.apply_view(view(warm=True))
    client.answer.set()
    await steps()
    assert asking.done(), "it waits beside a free slot"
    assert isinstance(asking.result(), Route)
    await loads.close()


async def test_a_model_that_went_while_the_controller_was_asked_is_unknown() -> None:
    client = ScriptedLoads()
    router, loads = a_router(client)
    router.apply_view(view(warm=False))
    asking = asyncio.ensure_future(router.route(route_request()))
    await steps()
    router.apply_view(FleetView())
    client.answer.set()
    await steps()
    assert asking.done(), "it would wait for ever"
    answer = asking.result()
    assert isinstance(answer, Response)
    assert answer.status == 404
    await loads.close()


async def test_a_stand_in_answers_also_while_the_controller_does_not() -> None:
    """Its database is away, say: whoever asks for a load is not answered for as long as a question may take."""
    client = ScriptedLoads()
    router, loads = a_router(client)
    cold = view(warm=False)
    other = ViewModel(id="other", revision="r")
    busy = (ViewReplica("o", "n", "other", 0, "r", 4),)
    router.apply_view(FleetView(nodes=(NODE,), models=(*cold.models, other), replicas=busy))
    for _ in range(3):
        asking = asyncio.ensure_future(router.route(route_request()))
        await steps()
        assert asking.done(), "it waits for the controller beside a warm stand-in"
        route = asking.result()
        assert isinstance(route, Route)
        assert route.is_stand_in
    assert client.requested == 1, "the load is asked for, once at a time"
    await loads.close()


async def test_who_is_not_to_wait_hears_why_a_load_failed() -> None:
    client = ScriptedLoads()
    client.answer.set()
    client.status = LoadStatus(model="m", state="failed", error="out of memory", retry_after_s=9.0)
    router, loads = a_router(client)
    router.apply_view(view(warm=False, how="refuse"))
    answer = await router.route(route_request())
    assert isinstance(answer, Response)
    assert answer.status == 503
    assert b"out of memory" in answer.body
    assert b"loading" not in answer.body
    await loads.close()


async def test_a_controller_that_is_away_is_told_once_not_at_every_try() -> None:
    class Away(ScriptedLoads):
        async def request_load(self, model: str) -> LoadStatus | None:
            self.requested += 1
            raise Unavailable("the controller cannot be reached")

    client, waiter = Away(), OneWaiter()
    loads = LoadWatcher(client, lambda: None, SystemClock(), poll_s=1.0, retry_first_s=0.001, retry_cap_s=0.001)
    with capture_logs() as told:
        loads.watch("m", waiter)
        await until(lambda: client.requested > 5)
    await loads.close()
    assert [line["log_level"] for line in told] == ["warning"]


async def test_what_was_heard_of_a_model_goes_with_it() -> None:
    client = ScriptedLoads()
    client.answer.set()
    loads = LoadWatcher(client, lambda: None, SystemClock(), poll_s=1.0)
    router = ReplicaRouter(InFlight(), loads, SystemClock(), RoutingSettings(), nothing_new)
    router.apply_view(view(warm=False))
    await loads.request("m")
    router.apply_view(view(warm=False))
    assert loads.status("m") is not None
    router.apply_view(FleetView())
    assert loads.status("m") is None
