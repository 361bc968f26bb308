"""Whatever happens in whatever order, each slot that is taken is given back once, and whoever can be served is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from corral.contract.http import Request
from corral.contract.loads import LoadStatus
from corral.contract.manifest import Continues
from corral.contract.messages.replicas import NodeLoad
from corral.contract.view import FleetView, ViewModel, ViewNode, ViewReplica
from corral.gateway.responses import Response
from corral.gateway.routing.in_flight import Ejection, InFlight
from corral.gateway.routing.load_watcher import LoadWatcher
from corral.gateway.routing.replicas import Route
from corral.gateway.routing.request import RouteRequest
from corral.gateway.routing.router import ReplicaRouter
from corral.gateway.routing.settings import RoutingSettings
from corral.gateway.view.fleet import Client, Fleet, prepare_fleet
from corral.kit.clock import SystemClock
from corral.kit.settings import Seconds
from tests.support.scripted_controller_link import ScriptedControllerLink
from tests.unit.gateway.requests import a_request

NODES = tuple(ViewNode(node, node, "healthy", f"http://{node}:1", "t") for node in ("n1", "n2"))
MODEL = ViewModel(id="m", revision="r")
KEYS = ("a", "b")


class NeverLoaded(ScriptedControllerLink):
    async def request_load(self, model: str) -> LoadStatus | None:
        return LoadStatus(model=model, state="pending")

    async def load_status(self, model: str, since: int, wait_s: float) -> LoadStatus | None:
        await asyncio.Event().wait()
        return None


async def nothing_new() -> None:
    pass


def client(key: str) -> Client:
    return Client(key, "inference", True, True, False, float("inf"), None, b"")


@dataclass
class Floor:
    """A router, and requests in all states."""

    slots: dict[str, int] = field(default_factory=dict)
    later: list[Callable[[], None]] = field(default_factory=list)
    running: list[Route] = field(default_factory=list)
    waiting: list[asyncio.Task[Route | Response]] = field(default_factory=list)
    in_flight: InFlight = field(default_factory=InFlight)

    def __post_init__(self) -> None:
        clock = SystemClock()
        loads = LoadWatcher(NeverLoaded(), lambda: None, clock, poll_s=60.0)
        self.loads = loads
        self.router = ReplicaRouter(
            self.in_flight, loads, clock, RoutingSettings(load_wait_s=Seconds(0), queue_limit=8), nothing_new
        )
        self.ejection = Ejection(self.in_flight, lambda _s, call: self.later.append(call), first_s=1.0, cap_s=1.0)
        self.fleet: Fleet = prepare_fleet(FleetView(models=(MODEL,)))
        self.view({"p1": 1, "p3": 2})

    def view(self, slots: dict[str, int]) -> None:
        self.slots = slots
        replicas = tuple(ViewReplica(p, "n1" if p < "p2" else "n2", "m", 0, "r", n) for p, n in slots.items())
        self.router.apply_view(FleetView(nodes=NODES, models=(MODEL,), replicas=replicas))

    def ask(self, key: str) -> RouteRequest:
        request: Request = a_request(b"/v1/x")
        return RouteRequest(request, self.fleet, client(key), "m", b"{}")

    def begin(self, key: str) -> None:
        route = self.router.route_now(self.ask(key))
        if route is not None:
            self.running.append(route)
        else:
            self.waiting.append(asyncio.ensure_future(self.router.route(self.ask(key))))

    async def settle(self) -> None:
        for _ in range(6):
            await asyncio.sleep(0)
        for task in [each for each in self.waiting if each.done()]:
            self.waiting.remove(task)
            if not task.cancelled() and isinstance(routed := task.result(), Route):
                self.running.append(routed)

    def check(self) -> None:
        ours = {
            p: sum(r.replica is not None and r.replica.seen.process_id == p for r in self.running) for p in self.slots
        }
        free = False
        for process_id, slots in self.slots.items():
            load = self.in_flight.find(process_id)
            assert load is not None
            assert load.own <= ours[process_id], "a slot that nobody has"
            free = free or (not load.is_ejected and load.in_flight < slots)
        assert not (free and self.waiting), "somebody waits beside a free slot"
        assert self.router.waiting().get("m", 0) == len(self.waiting)


Step = tuple[str, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "begin", "end", "leave", "rush", "view", "eject", "back", "told"]), st.integers(0, 31)
    ),
    min_size=12,
    max_size=50,
)


async def walk(steps: list[Step]) -> None:
    floor = Floor()
    number = 0
    try:
        for step, many in steps:
            number += 1
            if step == "begin":
                floor.begin(KEYS[many % 2])
            elif step == "end" and floor.running:
                floor.running.pop(many % len(floor.running)).counter.end()
            elif step == "leave" and floor.waiting:
                floor.waiting[many % len(floor.waiting)].cancel()
            elif step == "rush" and floor.running and floor.waiting:  # one is served and leaves before it knows
                floor.running.pop(many % len(floor.running)).counter.end()
                for task in floor.waiting:
                    task.cancel()
            elif step == "view":
                floor.view({p: 1 + many % 2 for place, p in enumerate(("p1", "p2", "p3")) if many >> place & 1})
            elif step == "eject":
                floor.ejection.eject_node("n1") if many % 2 else floor.ejection.eject_process("p3")
            elif step == "back" and floor.later:
                floor.later.pop(0)()
            elif step == "told":
                floor.in_flight.on_report("n2", NodeLoad("b", number, {"p2": many % 3}))
            await floor.settle()
            floor.check()
        while floor.running:
            floor.running.pop().counter.end()
            await floor.settle()
        assert all(floor.in_flight.counter(p, "").own == 0 for p in floor.slots)
    finally:
        for task in floor.waiting:
            task.cancel()
        await asyncio.gather(*floor.waiting, return_exceptions=True)
        await floor.loads.close()


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_slots_come_back_and_nobody_waits_beside_a_free_one(steps: list[Step]) -> None:
    asyncio.run(walk(steps))


def test_the_fast_path_has_only_models_whose_streams_are_not_resumed() -> None:
    floor = Floor()
    continues = Continues(chat="prefill")

    def is_fast(*, asked: bool, can: bool) -> bool:
        replica = ViewReplica("p1", "n1", "m", 0, "r", 4, continues=continues if can else None)
        model = msgspec.structs.replace(MODEL, resume_streams=asked)
        floor.router.apply_view(FleetView(nodes=NODES, models=(model,), replicas=(replica,)))
        route = floor.router.route_now(floor.ask("a"))
        if route is None:
            return False
        assert route.replica is not None
        assert route.replica.continues is None, "its streams are not continued, whatever its backend can"
        route.counter.end()
        return True

    assert is_fast(asked=False, can=True)
    assert is_fast(asked=False, can=False)
    assert is_fast(asked=True, can=False)
    assert not is_fast(asked=True, can=True)
