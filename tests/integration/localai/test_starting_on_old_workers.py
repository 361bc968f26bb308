"""PeerStarter a replica on a LocalAI worker that does what none should: people are told of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from corral.bus.local import LocalHub
from corral.contract.messages.replicas import START_REPLICA_RESULT, ReplicaResult, StartReplica
from corral.controller.localai.calls import PeerCalls, PeerTimes
from corral.controller.localai.orders import PeerOrders
from corral.controller.localai.start import PeerStarter
from corral.kit.clock import SystemClock
from corral.store import open_store
from corral.store.tables import nodes
from corral.store.tables.peer_processes import PeerProcess
from tests.integration.store.rows import a_node, a_peer_process
from tests.support.scripted_catalogue import no_galleries
from tests.support.sqlite import sqlite_url
from tests.support.waiting import until

CLOCK = SystemClock()
WHERE = "barn.test:50051"


class OneProcessForAll(PeerCalls):
    """Of a worker from before models had processes of their own: whatever it is asked for, it names the one it has."""

    async def stop_key(self, *_: Any, **__: Any) -> bool | None:
        return None

    async def install(self, *_: Any) -> str:
        return WHERE


class Table:
    def __init__(self, *rows: PeerProcess) -> None:
        self._rows = {row.process_id: row for row in rows}

    def known(self) -> dict[str, PeerProcess]:
        return self._rows


async def test_a_worker_that_names_the_process_of_another_model_is_told_of(tmp_path: Path) -> None:
    """It is no lost lease: without an outcome the load would be begun again and again, and nobody would know why."""
    node, unused = a_node(protocol=0, auth="shared", address=WHERE), None
    order = StartReplica(op_id="op", attempt=1, process_id="p2", model="second", backend="x", definition={})
    table: Any = Table(a_peer_process(node.id, "p1", model="first", address=WHERE))
    told: list[ReplicaResult] = []

    async def heard(result: ReplicaResult, _tokens: object) -> None:
        told.append(result)

    async with open_store(sqlite_url(tmp_path)) as store, LocalHub(CLOCK).join("c") as bus:
        async with store.write() as tx:
            await nodes.insert(tx, node)
        await bus.subscribe(START_REPLICA_RESULT, heard)
        calls = OneProcessForAll(bus, CLOCK, PeerTimes(), galleries_with=no_galleries)
        made: Any = (calls, unused, unused, table, unused, CLOCK, "token")
        given: Any = (unused, store, bus, calls, PeerStarter(*made), table, unused, CLOCK)
        async with PeerOrders(*given, token="token") as orders:
            await orders.start(node.id, order)
            await until(lambda: told, "an outcome")
    assert not told[0].success
    assert "its worker gave the process of first for that of second" in told[0].error
