"""Orders about replicas for LocalAI workers, as whoever gives them sees it: accepted, once each, and their outcome."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from corral.bus.api import Tokens
from corral.bus.local import LocalHub
from corral.contract.messages.backends import INSTALL_BACKEND, STOP_BACKEND, InstallBackend, InstallReply, StopBackend
from corral.contract.messages.models import LIST_RUNNING_MODELS, ListRunningModels, RunningModels
from corral.contract.messages.replicas import START_REPLICA_RESULT, ReplicaResult, StartReplica, StopReplica
from corral.controller.localai.calls import PeerCalls, PeerTimes
from corral.controller.localai.orders import PeerOrders
from corral.controller.localai.start import PeerStarter
from corral.controller.localai.table import PeerTable
from corral.controller.orders.observations import OrderAccepted, OrderNotSent, ReplicaObservation
from corral.controller.orders.order import OrderId
from corral.controller.runtime.change_feed import ChangeFeed
from corral.controller.runtime.leadership import Leadership
from corral.kit.clock import SystemClock
from corral.store import Store, open_store
from corral.store.tables import nodes
from corral.store.tables.nodes import Node
from tests.integration.store.rows import a_node
from tests.support.scripted_catalogue import no_galleries
from tests.support.sqlite import sqlite_url
from tests.support.waiting import until

CLOCK = SystemClock()
ORDER = StartReplica("op", 1, "op-1", "m", 0, "engine", revision="r", definition={"backend": "engine"}, accept=True)
TIMES = PeerTimes(install_s=60, running_s=20, second_try_s=0.01, unseen_s=0.01)


class OwnCalls:
    """To Corral workers."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def start(self, node_id: str, order: StartReplica) -> ReplicaObservation:
        self.asked.append(f"start {node_id}")
        return OrderAccepted(OrderId(node_id, order.op_id, order.attempt))

    async def stop(self, node_id: str, order: StopReplica) -> None:
        self.asked.append(f"stop {node_id}")


class Nothing:
    """Rooms that are not reached here."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AssertionError(f"{name} was asked for")

    def total(self, process_id: str) -> int:
        return 0


class PeerOrdersSite:
    def __init__(self, hub: LocalHub) -> None:
        self.hub = hub
        self.own = OwnCalls()
        self.unreached: list[str] = []
        self.results: list[ReplicaResult] = []
        self.orders: PeerOrders

    async def on_unreachable(self, node_id: str) -> None:
        self.unreached.append(node_id)

    async def heard(self, result: ReplicaResult, _tokens: Tokens) -> None:
        self.results.append(result)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with open_store(sqlite_url(tmp_path)) as opened:
        yield opened


@pytest.fixture
async def theirs(store: Store) -> Node:
    node = a_node(protocol=0, auth="shared", approved=True, status="healthy", address="w1:50051", ingress_url="")
    async with store.write() as tx:
        await nodes.insert(tx, node)
    return node


@pytest.fixture
async def site(store: Store) -> AsyncIterator[PeerOrdersSite]:
    site = PeerOrdersSite(LocalHub(CLOCK))
    async with contextlib.AsyncExitStack() as stack:
        bus = await stack.enter_async_context(site.hub.join("c"))
        await bus.subscribe(START_REPLICA_RESULT, site.heard)
        calls = PeerCalls(bus, CLOCK, TIMES, galleries_with=no_galleries)
        leadership, feed = Leadership(store, "c", ttl_s=10), ChangeFeed(store, bus, CLOCK, interval_s=1)
        table = PeerTable(store, leadership, feed, CLOCK, lease="replicas")
        rest: Any = Nothing()
        starting = PeerStarter(calls, rest, rest, table, rest, CLOCK, "shared")
        site.orders = PeerOrders(
            *(site.own, store, bus, calls, starting, table, rest, CLOCK),
            token="shared",
            on_unreachable=site.on_unreachable,
        )
        await stack.enter_async_context(site.orders)
        yield site


async def test_a_corral_worker_gets_its_orders_itself(site: PeerOrdersSite, store: Store) -> None:
    node = a_node(protocol=1)
    async with store.write() as tx:
        await nodes.insert(tx, node)
    assert isinstance(await site.orders.start(node.id, ORDER), OrderAccepted)
    await site.orders.stop(node.id, StopReplica("p"))
    assert site.own.asked == [f"start {node.id}", f"stop {node.id}"]
    assert isinstance(await site.orders.start("nobody", ORDER), OrderNotSent)


async def test_nobody_listens_on_the_node(site: PeerOrdersSite, theirs: Node) -> None:
    assert isinstance(await site.orders.start(theirs.id, ORDER), OrderAccepted)
    await until(lambda: bool(site.results), "the outcome")
    assert (site.results[0].op_id, site.results[0].attempt, site.results[0].success) == ("op", 1, False)
    assert site.results[0].error == "nobody listens on the node"
    assert site.unreached == [theirs.id]


async def test_the_same_order_twice_is_one_and_a_stop_gives_it_up(site: PeerOrdersSite, theirs: Node) -> None:
    asked: list[InstallBackend] = []
    stopped: list[str] = []

    async def install(order: InstallBackend, _tokens: Tokens) -> InstallReply:
        asked.append(order)
        await asyncio.Event().wait()
        raise AssertionError

    async def running(_asked: ListRunningModels, _tokens: Tokens) -> RunningModels:
        return RunningModels()

    async def stop(order: StopBackend, _tokens: Tokens) -> None:
        stopped.append(order.backend)

    async with site.hub.join("worker") as worker:
        await worker.serve(INSTALL_BACKEND, install, concurrency=4, node=theirs.id)
        await worker.serve(LIST_RUNNING_MODELS, running, node=theirs.id)
        await worker.subscribe(STOP_BACKEND, stop, node=theirs.id)
        assert isinstance(await site.orders.start(theirs.id, ORDER), OrderAccepted)
        await until(lambda: len(asked) == 1, "the order")
        assert isinstance(await site.orders.start(theirs.id, ORDER), OrderAccepted)
        assert [(order.backend, order.model_id, order.replica_index) for order in asked] == [("engine", "m", 0)]
        await site.orders.stop(theirs.id, StopReplica("op-1"))
        await until(lambda: stopped == ["m#0"], "exactly that key")
        assert site.results == []


async def test_a_refusal_is_told_in_the_workers_words(site: PeerOrdersSite, theirs: Node) -> None:
    async def install(_order: InstallBackend, _tokens: Tokens) -> InstallReply:
        return InstallReply(success=False, error="installing backend from gallery: no such image")

    async with site.hub.join("worker") as worker:
        await worker.serve(INSTALL_BACKEND, install, node=theirs.id)
        await site.orders.start(theirs.id, ORDER)
        await until(lambda: bool(site.results), "the outcome")
    assert site.results[0].error == "installing backend from gallery: no such image"
    assert site.unreached == []
