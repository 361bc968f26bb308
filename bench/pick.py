"""Choosing a replica, by how many there are: of integers alone, and by the beginning of a prompt of 16 KiB.

    scripts/bench pick

CPU of this thread, the best of several rounds. The target is 20 µs with 1,000 replicas. The last table has the whole
choice for a request and the end of its slot, as the fast path takes it, also while a revision is on trial.
"""

from __future__ import annotations

import json
import random
import time
import timeit
from collections.abc import Callable
from typing import Any, cast

from corral.contract.http import Request
from corral.contract.view import FleetView, ViewModel, ViewNode, ViewReplica
from corral.gateway.routing.in_flight import InFlight
from corral.gateway.routing.load_watcher import LoadWatcher
from corral.gateway.routing.pick import Policy, PrefixMatch, pick, pick_by_prefix, rank
from corral.gateway.routing.prefixes import PrefixIndex, hash_blocks
from corral.gateway.routing.request import RouteRequest
from corral.gateway.routing.router import ReplicaRouter
from corral.gateway.routing.settings import RoutingSettings
from corral.gateway.view.fleet import Client, prepare_fleet
from corral.kit.clock import SystemClock

COUNTS = (1, 2, 10, 100, 1000)
ROUNDS, TIMES = 7, 500


def best_us(call: Callable[[], object]) -> float:
    return min(timeit.repeat(call, number=TIMES, repeat=ROUNDS, timer=time.thread_time)) / TIMES * 1e6


def measure(count: int, chain: list[int], dice: random.Random) -> tuple[float, float]:
    ranks = [rank(dice.randrange(8), 64) for _ in range(count)]
    names = [f"p{place}" for place in range(count)]
    places = {name: place for place, name in enumerate(names)}
    index = PrefixIndex(ttl_s=300, half_life_s=120)
    index.observe(chain[:32], names[0], 0.0)

    def warm() -> object:
        found = index.match(chain, places, 1.0)
        hot = None if found is None else PrefixMatch(places[found[0]], found[1] / len(chain))
        return pick_by_prefix(ranks, 0, Policy(), hot, lambda place: index.weight(names[place], 1.0))

    return best_us(lambda: pick(ranks, 0)), best_us(warm)


def router(count: int, percent: int) -> tuple[ReplicaRouter, RouteRequest]:
    """With so many replicas, of which the last one is on trial if `percent` is not 0."""
    trial: dict[str, Any] = {"trial_revision": "new", "trial_percent": percent} if percent else {}
    revisions = ["old"] * (count - 1) + ["new" if percent else "old"]
    view = FleetView(
        nodes=(ViewNode("n", "n", "healthy", "http://n.test:1", "t"),),
        models=(ViewModel(id="m", revision="old", **trial),),
        replicas=tuple(ViewReplica(f"p{n}", "n", "m", n, each, 64) for n, each in enumerate(revisions)),
    )
    clock = SystemClock()
    loads = LoadWatcher(cast("Any", None), lambda: None, clock, poll_s=60.0)
    made = ReplicaRouter(InFlight(), loads, clock, RoutingSettings(), cast("Any", None))
    made.apply_view(view)
    client = Client("a", "inference", True, True, False, float("inf"), None, b"")
    request = Request(b"POST", b"/v1/chat/completions", (), "1.1", None, False, "r", cast("Any", None))
    return made, RouteRequest(request, prepare_fleet(view), client, "m", b"{}")


def route_us(count: int, percent: int) -> float:
    made, request = router(count, percent)

    def once() -> None:
        route = made.route_now(request)
        assert route is not None
        route.counter.end()

    return best_us(once)


def main() -> None:
    dice = random.Random(1)
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "a b c d " * 2500}]}).encode()
    print(f"hashing a prompt of {len(body):,} bytes: {best_us(lambda: hash_blocks(body)):.1f} µs\n")
    print("| replicas | least to do | and its cache |")
    print("|---:|---:|---:|")
    for count in COUNTS:
        plain_us, warm_us = measure(count, hash_blocks(body), dice)
        print(f"| {count:,} | {plain_us:.1f} µs | {warm_us:.1f} µs |")

    print("\n| replicas | a request's choice | while the last is on trial (25 %) |")
    print("|---:|---:|---:|")
    for count in (1, 2, 10):
        trial = f"{route_us(count, 25):.2f} µs" if count > 1 and "trial_percent" in ViewModel.__struct_fields__ else "-"
        print(f"| {count} | {route_us(count, 0):.2f} µs | {trial} |")


if __name__ == "__main__":
    main()
