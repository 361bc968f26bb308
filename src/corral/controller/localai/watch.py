"""Looks after the processes on LocalAI workers: asks each worker what runs and each process whether it lives, and keeps
the list of it true. Whoever leads does; what it finds, the loop of the replicas acts on."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from corral.contract.messages.models import RunningModel
from corral.contract.messages.replicas import ReplicaState
from corral.controller.localai.calls import PeerCalls
from corral.controller.localai.process_state import (
    ProcessGone,
    ProcessStays,
    ProcessUseless,
    classify_process,
    is_watched,
)
from corral.controller.localai.table import PeerTable
from corral.inference.backend_process import ProcessHealth, model_identity
from corral.inference.grpc.process_calls import check_health, serves_other_model
from corral.kit.clock import Clock
from corral.kit.errors import CorralError
from corral.kit.log import get_log
from corral.kit.tasks import Wake, run_every
from corral.store.engine.transactions import Store
from corral.store.tables import nodes, peer_processes
from corral.store.tables.nodes import Node
from corral.store.tables.peer_processes import PeerProcess

log = get_log(__name__)

_AT_ONCE = 32
_IDENTITY_EVERY_S = 60.0
_ANSWERING = ("healthy", "draining")  # of others silence says nothing


class PeerMonitor:
    name = "watching peers"

    def __init__(
        self,
        store: Store,
        calls: PeerCalls,
        table: PeerTable,
        clock: Clock,
        *,
        token: str,
        every_s: float,
        pulse_s: float = 5.0,
    ) -> None:
        self._store = store
        self._calls = calls
        self._table = table
        self._clock = clock
        self._token = token
        self._every_s = every_s
        self._pulse_s = pulse_s
        self._misses: dict[str, int] = {}  # by process
        self._silent: set[str] = set()  # nodes of which it was told that they do not answer
        self._identified_at: dict[str, float] = {}  # by process: when it was last asked who it is
        self._turn = asyncio.Semaphore(_AT_ONCE)
        self._wake = Wake()

    async def run(self) -> None:
        await run_every(self.name, self._every_s, self.run_once, clock=self._clock, wake=self._wake)

    def doubt(self, process_id: str) -> None:
        """It did not answer as it should: have a look at it."""
        self._identified_at.pop(process_id, None)
        self._wake.set()

    async def run_once(self) -> None:
        if not self._table.leads or not self._calls.connected:
            self._misses.clear()
            return
        async with self._store.read() as tx:
            found = [node for node in await nodes.list_(tx) if node.shares_token and node.approved]
            rows = await peer_processes.list_(tx)
        there = [node for node in found if node.status in _ANSWERING and not node.bus_down]
        processes: dict[str, list[PeerProcess]] = {}
        for row in rows:
            if is_watched(row):
                processes.setdefault(row.node_id, []).append(row)
        self._misses = {row.process_id: self._misses.get(row.process_id, 0) for row in rows}
        self._identified_at = {
            row.process_id: at for row in rows if (at := self._identified_at.get(row.process_id)) is not None
        }
        await self._table.repair_inventories([node.id for node in found])
        await asyncio.gather(*(self._look_at(node, processes[node.id]) for node in there if node.id in processes))

    async def _look_at(self, node: Node, processes: list[PeerProcess]) -> None:
        try:
            async with self._turn:
                running = await self._calls.running(node.id)
                for process in processes:
                    await self._classify(process, running)
            self._silent.discard(node.id)
        except CorralError as error:  # no answer says nothing about what is there
            tell = log.debug if node.id in self._silent else log.warning
            self._silent.add(node.id)
            tell("a worker could not be asked what runs", node=node.name, error=error.message)

    async def _classify(self, process: PeerProcess, running: Mapping[tuple[str, int], RunningModel] | None) -> None:
        pulse = await check_health(process.address, self._token, self._pulse_s)
        another = await self._is_another(process) if pulse is ProcessHealth.ALIVE else False
        judged = classify_process(process, running, pulse, self._misses.get(process.process_id, 0), is_another=another)
        match judged:
            case ProcessStays(misses=misses):
                self._misses[process.process_id] = misses
            case ProcessGone(why=why):
                log.warning("replica gone", node_id=process.node_id, model=process.model, why=why)
                await self._table.forget(process.process_id, unless_stopping=True)
            case ProcessUseless(why=why):
                log.warning("replica of no use", node_id=process.node_id, model=process.model, why=why)
                await self._table.mark(process.process_id, ReplicaState.FAILED, why)

    async def _is_another(self, process: PeerProcess) -> bool:
        """Now and then, and when somebody doubts it: every request asks the same, and is refused by one that is."""
        identified_at, now = self._identified_at.get(process.process_id), self._clock.monotonic()
        identity = model_identity(process.load)
        if not identity or (identified_at is not None and now - identified_at < _IDENTITY_EVERY_S):
            return False
        self._identified_at[process.process_id] = now
        return await serves_other_model(process.address, self._token, identity, self._pulse_s)
