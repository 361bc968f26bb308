"""While a revision of a model is on trial, it gets its share of the requests: exactly, evenly, and never more."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

import msgspec
import pytest

from corral.contract.messages.replicas import NodeLoad
from corral.contract.view import FleetView, ViewModel, ViewNode, ViewReplica
from corral.gateway.routing.in_flight import Ejection, InFlight
from corral.gateway.routing.load_watcher import LoadWatcher
from corral.gateway.routing.replicas import Route
from corral.gateway.routing.request import RouteRequest
from corral.gateway.routing.router import ReplicaRouter
from corral.gateway.routing.settings import RoutingSettings
from corral.gateway.view.fleet import prepare_fleet
from corral.kit.clock import SystemClock
from corral.kit.settings import Seconds
from tests.unit.gateway.requests import a_request
from tests.unit.gateway.test_router_slots import NeverLoaded, client, nothing_new

NODES = tuple(ViewNode(node, node, "healthy", f"http://{node}:1", "t") for node in ("n1", "n2"))
SOAKING = ViewModel(id="m", revision="old", trial_revision="new", trial_percent=5)
REPLICAS = (
    ViewReplica("p1", "n1", "m", 0, "old", 4),
    ViewReplica("p2", "n2", "m", 0, "old", 4),
    ViewReplica("p3", "n1", "m", 1, "new", 4),
)
SYSTEM = "Answer like a farmer. " * 40


class Gateway:
    def __init__(self) -> None:
        clock = SystemClock()
        self.in_flight = InFlight()
        loads = LoadWatcher(NeverLoaded(), lambda: None, clock, poll_s=60.0)
        self.router = ReplicaRouter(self.in_flight, loads, clock, RoutingSettings(load_wait_s=Seconds(0)), nothing_new)

    def view(self, model: ViewModel = SOAKING, replicas: Sequence[ViewReplica] = REPLICAS, **changes: int) -> None:
        model = msgspec.structs.replace(model, **changes)
        self.fleet = prepare_fleet(FleetView(models=(model,)))
        self.router.apply_view(FleetView(nodes=NODES, models=(model,), replicas=tuple(replicas)))

    def begin(self, prompt: str = "") -> Route | None:
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": prompt}]}).encode()
        return self.router.route_now(RouteRequest(a_request(b"/v1/x"), self.fleet, client("a"), "m", body))

    def ask(self, prompt: str = "") -> str:
        """The revision that answers one request, which ends at once."""
        route = self.begin(prompt)
        assert route is not None
        assert route.replica is not None
        route.counter.end()
        return route.replica.seen.revision

    def asked(self, count: int, prompt: str = "") -> Counter[str]:
        return Counter(self.ask(prompt) for _ in range(count))


@pytest.fixture
def gateway() -> Gateway:
    made = Gateway()
    made.view()
    return made


@pytest.mark.parametrize("percent", [0, 5, 25, 100])
def test_the_share_is_exact_and_evenly_spread(gateway: Gateway, percent: int) -> None:
    gateway.view(trial_percent=percent)
    assert gateway.asked(400)["new"] == 4 * percent
    for _ in range(20):
        assert abs(gateway.asked(20)["new"] - percent / 5) < 1


def test_views_that_come_in_between_do_not_change_the_share(gateway: Gateway) -> None:
    """With few requests there is a view between any two of them: the count goes on."""
    answered = Counter[str]()
    for _ in range(100):
        gateway.view()
        answered[gateway.ask()] += 1
    assert answered == {"new": 5, "old": 95}


def test_a_cached_prefix_keeps_no_request_on_one_side(gateway: Gateway) -> None:
    gateway.view(trial_percent=25)
    assert gateway.asked(400, SYSTEM)["new"] == 100


def test_each_side_keeps_its_own_prefixes(gateway: Gateway) -> None:
    """The old revision's cached prefixes survive that the trial serves the same prompt in between."""
    gateway.view(trial_percent=25)
    served = Counter[str]()
    for _ in range(40):
        route = gateway.begin(SYSTEM)
        assert route is not None
        assert route.replica is not None
        served[route.replica.seen.process_id] += 1
        route.counter.end()
    assert served["p3"] == 10
    assert sorted((served["p1"], served["p2"])) == [0, 30]


def test_a_request_does_not_wait_for_the_trial(gateway: Gateway) -> None:
    gateway.view(trial_percent=100)
    begun = [gateway.begin() for _ in range(12)]
    served = Counter(each.replica.seen.revision for each in begun if each is not None and each.replica is not None)
    assert served == {"new": 4, "old": 8}
    assert gateway.begin() is None


def test_the_trial_takes_no_more_than_its_share_when_the_others_are_busy(gateway: Gateway) -> None:
    begun = [gateway.begin() for _ in range(8)]
    assert {each.replica.seen.revision for each in begun if each is not None and each.replica is not None} == {"old"}
    assert gateway.begin() is None  # it waits for a slot, as without a trial


def test_the_trial_serves_when_no_other_replica_is_reached(gateway: Gateway) -> None:
    ejection = Ejection(gateway.in_flight, lambda _s, _call: None, first_s=1.0, cap_s=1.0)
    for process_id in ("p1", "p2"):
        ejection.eject_process(process_id)
    assert gateway.asked(3) == {"new": 3}


def test_without_replicas_of_the_old_revision_the_trial_serves_all(gateway: Gateway) -> None:
    gateway.view(replicas=REPLICAS[2:])
    assert gateway.asked(40) == {"new": 40}


def test_an_unreachable_trial_costs_no_request(gateway: Gateway) -> None:
    gateway.view(trial_percent=100)
    Ejection(gateway.in_flight, lambda _s, _call: None, first_s=1.0, cap_s=1.0).eject_process("p3")
    assert gateway.asked(10) == {"old": 10}


def test_replicas_of_any_third_revision_get_nothing(gateway: Gateway) -> None:
    gateway.view(replicas=(*REPLICAS, ViewReplica("p4", "n2", "m", 1, "third", 4)))
    assert set(gateway.asked(100)) == {"old", "new"}


def test_after_the_promotion_its_cached_prefixes_count(gateway: Gateway) -> None:
    gateway.view(trial_percent=100)
    gateway.asked(1, SYSTEM)
    gateway.view(ViewModel(id="m", revision="new"), (REPLICAS[2], ViewReplica("p5", "n2", "m", 0, "new", 4)))
    served = Counter[str]()
    for _ in range(10):
        route = gateway.begin(SYSTEM)
        assert route is not None
        assert route.replica is not None
        served[route.replica.seen.process_id] += 1
        route.counter.end()
    assert served == {"p3": 10}


def test_slots_in_use_survive_the_begin_and_the_end_of_a_trial(gateway: Gateway) -> None:
    gateway.view(ViewModel(id="m", revision="old"), REPLICAS[:2])
    begun = [gateway.begin() for _ in range(8)]
    assert gateway.begin() is None
    gateway.view(trial_percent=0)
    assert gateway.begin() is None
    gateway.view(ViewModel(id="m", revision="old"), REPLICAS[:2])
    assert gateway.begin() is None
    for each in begun:
        assert each is not None
        each.counter.end()
    assert gateway.asked(4) == {"old": 4}


def test_reports_of_nodes_reach_both_sides(gateway: Gateway) -> None:
    gateway.view(trial_percent=100)
    gateway.in_flight.on_report("n1", NodeLoad(boot_id="b", seq=1, in_flight={"p3": 4}))
    assert gateway.asked(5) == {"old": 5}
