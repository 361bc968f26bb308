"""Requests under way at LocalAI workers: each controller counts its own, whoever leads tells gateways the sum."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from corral.bus.api import Bus, Tokens
from corral.bus.local import LocalHub
from corral.contract.messages.replicas import NODE_LOAD, NodeLoad
from corral.controller.localai.load import LoadTimes, PeerLoads
from corral.kit.clock import SystemClock
from tests.support.waiting import until

TIMES = LoadTimes(interval_s=0.01, again_s=0.05, believe_s=0.5)


@contextlib.asynccontextmanager
async def counting(bus: Bus, name: str, *, leads: bool = False) -> AsyncIterator[PeerLoads]:
    nodes = {"p1": "n1", "p2": "n2"}
    loads = PeerLoads(bus, SystemClock(), name, leads=lambda: leads, node_of=nodes.get, times=TIMES)
    running = asyncio.create_task(loads.run())
    try:
        yield loads
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_the_leader_tells_the_sum_and_that_there_are_none_any_more() -> None:
    hub = LocalHub(SystemClock())
    told: dict[str, NodeLoad] = {}

    async def heard(load: NodeLoad, tokens: Tokens) -> None:
        told[tokens["node"]] = load

    async with hub.join("gateway") as gateway, hub.join("a") as one, hub.join("b") as two:
        await gateway.subscribe(NODE_LOAD, heard)
        async with counting(one, "a", leads=True) as first, counting(two, "b") as second:
            first.begin("p1")
            second.begin("p1")
            second.begin("p1")
            second.begin("nobody-knows-it")
            await until(lambda: told["n1"].in_flight == {"p1": 3}, "the sum")
            assert "n2" not in told
            # What another counts is believed for a while only, and said again in time.
            await until(lambda: (first.total("p1"), second.own("p1")) == (3, 2), "the same sum at the leader")
            seq = told["n1"].seq
            await until(lambda: told["n1"].seq > seq, "the same again, for whoever begins to listen")
            first.end("p1")
            second.end("p1")
            second.end("p1")
            await until(lambda: told["n1"].in_flight == {}, "none")
            await until(lambda: first.total("p1") == 0, "none known of")


async def test_a_controller_that_falls_silent_has_none() -> None:
    hub = LocalHub(SystemClock())
    async with hub.join("a") as one, counting(one, "a", leads=True) as first:
        async with hub.join("b") as two, counting(two, "b") as second:
            second.begin("p2")
            await until(lambda: first.total("p2") == 1, "its request")
        await until(lambda: first.total("p2") == 0, "its being forgotten")
