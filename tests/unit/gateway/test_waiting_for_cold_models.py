"""Requests for a cold model: somebody asks for its load whenever one waits, and none waits for what is there."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from corral.contract.loads import LoadStatus
from corral.contract.view import FleetView, ViewModel, ViewNode, ViewReplica
from corral.gateway.answers import Answer
from corral.gateway.fields import Fields
from corral.gateway.inflight import InFlight
from corral.gateway.loads import Loads
from corral.gateway.replicas import Route
from corral.gateway.router import ReplicaRouter, RouterOptions
from corral.gateway.v1 import Ask
from corral.gateway.view import Client, prepare_fleet
from corral.kit.clock import SystemClock
from corral.kit.errors import Unavailable
from tests.support.waiting import until
from tests.unit.gateway.requests import a_request

NODE = ViewNode("n", "n", "healthy", "http://n:1", "t")
CLIENT = Client("k", "inference", True, True, False, float("inf"), None, b"")


class Desk:
    def __init__(self) -> None:
        self.asked = 0
        self.answer = asyncio.Event()
        self.status = LoadStatus(model="m", state="pending")

    async def ask_for_load(self, model: str) -> LoadStatus | None:
        self.asked += 1
        await self.answer.wait()
        return self.status

    async def load_status(self, model: str, since: int, wait_s: float) -> LoadStatus | None:
        await asyncio.Event().wait()
        return None


class Someone:
    waits = True

    def wants(self, model: str) -> bool:
        return self.waits

    def load_failed(self, model: str, status: LoadStatus | None, *, before: bool) -> None:
        self.waits = False


async def nothing_new() -> None:
    pass


def view(*, warm: bool, how: str = "use") -> FleetView:
    model = ViewModel(id="m", revision="r", while_loading=how, stand_in="other")
    replicas = (ViewReplica("p", "n", "m", 0, "r", 1),) if warm else ()
    return FleetView(nodes=(NODE,), models=(model,), replicas=replicas)


def ask() -> Ask:
    return Ask(a_request(b"/v1/x"), prepare_fleet(view(warm=False)), CLIENT, Fields("m"), b"{}")


def a_router(desk: Desk) -> tuple[ReplicaRouter, Loads]:
    loads = Loads(desk, lambda: None, SystemClock(), poll_s=60.0)
    return ReplicaRouter(InFlight(), loads, SystemClock(), RouterOptions(load_wait_s=0.0), nothing_new), loads


async def steps(many: int = 8) -> None:
    for _ in range(many):
        await asyncio.sleep(0)


@pytest.mark.parametrize("ends", ["by itself", "told to"])
async def test_whoever_comes_while_a_watch_is_ending_is_attended_to(ends: str) -> None:
    desk, someone = Desk(), Someone()
    desk.answer.set()
    desk.status = LoadStatus(model="m", state="failed", error="no")
    loads = Loads(desk, lambda: None, SystemClock(), poll_s=60.0)
    loads.attend("m", someone)
    if ends == "told to":
        loads.arrived("m")
    else:
        for _ in range(50):
            if someone.waits:  # it is told of the failure, and ends within that very step
                await asyncio.sleep(0)
    again = Someone()
    loads.attend("m", again)
    await steps()
    assert not again.waits, "nobody asks for the load that this one waits for"
    await loads.close()


async def test_what_became_warm_while_the_controller_was_asked_is_used_at_once() -> None:
    desk = Desk()
    router, loads = a_router(desk)
    router.took(view(warm=False))
    asking = asyncio.ensure_future(router.route(ask()))
    await steps()
    assert desk.asked == 1
    router.took(view(warm=True))
    desk.answer.set()
    await steps()
    assert asking.done(), "it waits beside a free slot"
    assert isinstance(asking.result(), Route)
    await loads.close()


async def test_a_model_that_went_while_the_controller_was_asked_is_unknown() -> None:
    desk = Desk()
    router, loads = a_router(desk)
    router.took(view(warm=False))
    asking = asyncio.ensure_future(router.route(ask()))
    await steps()
    router.took(FleetView())
    desk.answer.set()
    await steps()
    assert asking.done(), "it would wait for ever"
    answer = asking.result()
    assert isinstance(answer, Answer)
    assert answer.status == 404
    await loads.close()


async def test_a_stand_in_answers_also_while_the_controller_does_not() -> None:
    """Its database is away, say: whoever asks for a load is not answered for as long as a question may take."""
    desk = Desk()
    router, loads = a_router(desk)
    cold = view(warm=False)
    other = ViewModel(id="other", revision="r")
    busy = (ViewReplica("o", "n", "other", 0, "r", 4),)
    router.took(FleetView(nodes=(NODE,), models=(*cold.models, other), replicas=busy))
    for _ in range(3):
        asking = asyncio.ensure_future(router.route(ask()))
        await steps()
        assert asking.done(), "it waits for the controller beside a warm stand-in"
        route = asking.result()
        assert isinstance(route, Route)
        assert route.stand_in
    assert desk.asked == 1, "the load is asked for, once at a time"
    await loads.close()


async def test_who_is_not_to_wait_hears_why_a_load_failed() -> None:
    desk = Desk()
    desk.answer.set()
    desk.status = LoadStatus(model="m", state="failed", error="out of memory", retry_after_s=9.0)
    router, loads = a_router(desk)
    router.took(view(warm=False, how="refuse"))
    answer = await router.route(ask())
    assert isinstance(answer, Answer)
    assert answer.status == 503
    assert b"out of memory" in answer.body
    assert b"loading" not in answer.body
    await loads.close()


async def test_a_controller_that_is_away_is_told_once_not_at_every_try() -> None:
    class Away(Desk):
        async def ask_for_load(self, model: str) -> LoadStatus | None:
            self.asked += 1
            raise Unavailable("the controller cannot be reached")

    desk, someone = Away(), Someone()
    loads = Loads(desk, lambda: None, SystemClock(), poll_s=1.0, retry_first_s=0.001, retry_cap_s=0.001)
    with capture_logs() as told:
        loads.attend("m", someone)
        await until(lambda: desk.asked > 5)
    await loads.close()
    assert [line["log_level"] for line in told] == ["warning"]


async def test_what_was_heard_of_a_model_goes_with_it() -> None:
    desk = Desk()
    desk.answer.set()
    loads = Loads(desk, lambda: None, SystemClock(), poll_s=1.0)
    router = ReplicaRouter(InFlight(), loads, SystemClock(), RouterOptions(), nothing_new)
    router.took(view(warm=False))
    await loads.ask("m")
    router.took(view(warm=False))
    assert loads.status("m") is not None
    router.took(FleetView())
    assert loads.status("m") is None
