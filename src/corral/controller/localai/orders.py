"""ReplicaOrders about replicas, also for LocalAI workers: those are carried out here, by whoever gives them.

To the loop that orders them they look like any other: accepted at once, the same order twice is one, progress and
outcome come over the bus under the order's name. A controller that dies in the middle leaves nothing to be believed:
the next asks again, and it is begun anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType

from corral.bus.api import Bus
from corral.contract.messages.replicas import (
    START_REPLICA_PROGRESS,
    START_REPLICA_RESULT,
    ReplicaProgress,
    ReplicaResult,
    ReplicaState,
    StartReplica,
    StopReplica,
)
from corral.contract.models import read_definition
from corral.controller.localai.calls import PeerCalls, PeerUnreachable
from corral.controller.localai.load import PeerLoads
from corral.controller.localai.start import PeerStarter
from corral.controller.localai.table import NotLeading, PeerTable
from corral.controller.orders.observations import OrderAccepted, OrderEnded, OrderNotSent, ReplicaObservation
from corral.controller.orders.order import OrderId
from corral.controller.orders.replica_calls import ReplicaOrders
from corral.inference.backend_process import ProcessHealth
from corral.inference.grpc.process_calls import check_health
from corral.kit.clock import Clock
from corral.kit.errors import CorralError
from corral.kit.log import get_log
from corral.kit.tasks import KeyedTasks, Wake
from corral.store.engine.transactions import Store
from corral.store.tables import nodes
from corral.store.tables.nodes import Node
from corral.store.tables.peer_processes import PeerProcess

log = get_log(__name__)


class PeerOrders:
    """`async with` it. Fits `ReplicaOrders`."""

    def __init__(
        self,
        own: ReplicaOrders,
        store: Store,
        bus: Bus,
        calls: PeerCalls,
        starting: PeerStarter,
        table: PeerTable,
        busy: PeerLoads,
        clock: Clock,
        *,
        token: str,
        on_unreachable: Callable[[str], Awaitable[None]] | None = None,
        tell_every_s: float = 0.5,
    ) -> None:
        """`on_unreachable` is called with the id of a node on which no worker listens."""
        self._own = own
        self._store = store
        self._bus = bus
        self._calls = calls
        self._starting = starting
        self._table = table
        self._busy = busy
        self._clock = clock
        self._token = token
        self._on_unreachable = on_unreachable
        self._tell_every_s = tell_every_s
        self._starts: KeyedTasks[str] = KeyedTasks()  # by process
        self._stopping: set[str] = set()

    async def __aenter__(self) -> PeerOrders:
        await self._starts.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._starts.__aexit__(kind, error, trace)

    async def start(self, node_id: str, order: StartReplica) -> ReplicaObservation:
        """Never raises for what the other side or the bus does."""
        named = OrderId(node_id, order.op_id, order.attempt)
        try:
            node = await self._peer(node_id)
        except CorralError as error:
            log.warning("order not sent", node_id=node_id, model=order.model, error=error.message)
            return OrderNotSent(named)
        if node is None:
            return await self._own.start(node_id, order)
        known = self._table.known().get(order.process_id)
        if known is not None and known.state == ReplicaState.READY:
            return OrderEnded(named, success=True)
        self._starts.start(order.process_id, lambda: self._start(node, order), name=f"start {order.process_id}")
        return OrderAccepted(named)

    async def stop(self, node_id: str, order: StopReplica) -> None:
        """The order is repeated until the node's list shows that it worked."""
        try:
            node = await self._peer(node_id)
            if node is None:
                await self._own.stop(node_id, order)
            elif order.process_id not in self._stopping:
                self._stopping.add(order.process_id)
                try:
                    await self._stop(order)
                finally:
                    self._stopping.discard(order.process_id)
        except CorralError as error:
            log.warning("stop not accepted", node_id=node_id, process=order.process_id, error=error.message)

    async def _peer(self, node_id: str) -> Node | None:
        """None: it takes orders itself."""
        async with self._store.read() as tx:
            node = await nodes.get(tx, node_id)
        return node if node.shares_token else None

    # PeerStarter.

    async def _start(self, node: Node, order: StartReplica) -> None:
        latest = _Latest()
        reporting = asyncio.create_task(self._publish_progress(node.id, latest))
        error = ""
        try:
            definition = read_definition(order.definition | {"name": order.model})
            await self._starting.start(node, order, definition, latest.put)
        except NotLeading:
            return  # it is another controller's by now
        except PeerUnreachable as failure:
            error = failure.message
            if self._on_unreachable is not None:
                await self._on_unreachable(node.id)
        except CorralError as failure:
            error = failure.message or failure.code
        except Exception:
            log.exception("starting a replica failed", node=node.name, model=order.model)
            error = "something went wrong; the controller's log says what"
        finally:
            reporting.cancel()
            await asyncio.gather(reporting, return_exceptions=True)
        if error:
            log.warning("replica did not start", node=node.name, model=order.model, error=error.splitlines()[0][:200])
        result = ReplicaResult(
            op_id=order.op_id,
            attempt=order.attempt,
            success=not error,
            process_id=order.process_id,
            error=error,
        )
        try:
            await self._bus.publish(START_REPLICA_RESULT, result, node=node.id, op=order.op_id)
        except CorralError as failure:  # of one that serves the list tells; one that failed is asked for again
            log.warning("outcome not latest", node=node.name, model=order.model, error=failure.message)

    async def _publish_progress(self, node_id: str, latest: _Latest) -> None:
        while True:
            progress = await latest.next()
            try:
                await self._bus.publish(START_REPLICA_PROGRESS, progress, node=node_id, op=progress.op_id)
            except CorralError as error:
                log.debug("progress not latest", node_id=node_id, error=error.message)
            await self._clock.sleep(self._tell_every_s)

    # Stopping.

    async def _stop(self, order: StopReplica) -> None:
        if order.process_id in self._starts.running():
            self._starts.cancel(order.process_id)
        process = await self._table.find(order.process_id)
        if process is None:
            return
        if not order.force and self._busy.total(order.process_id):
            return  # it finishes what it has; the order is repeated
        await self._table.mark(order.process_id, ReplicaState.STOPPING)
        ended = await self._calls.stop(process, force=order.force)
        if ended or (ended is None and await self._is_dead(process)):
            await self._table.forget(order.process_id)
            log.info("replica stopped", node_id=process.node_id, model=process.model, process=order.process_id)

    async def _is_dead(self, process: PeerProcess) -> bool:
        """Of a worker that does not say what runs: whether anybody answers there."""
        pulse = await check_health(process.address, self._token, self._calls.times.running_s)
        return pulse is ProcessHealth.UNREACHABLE


class _Latest:
    """Only the last word counts; whoever listens may be slower."""

    def __init__(self) -> None:
        self._wake = Wake()
        self._last: ReplicaProgress | None = None

    def put(self, progress: ReplicaProgress) -> None:
        self._last = progress
        self._wake.set()

    async def next(self) -> ReplicaProgress:
        while self._last is None:
            await self._wake.wait(3600.0)
        last, self._last = self._last, None
        return last
