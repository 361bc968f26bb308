"""The parent of a gateway in several processes: owns the sockets, reads the view, keeps the queues (ADR 0018).

It serves no request. A child that ends is replaced at once, and what it had under way is counted no longer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec

from corral.bus.api import BusTls
from corral.contract.codec import encode
from corral.contract.view import FleetView
from corral.gateway.answers import Answer, unknown_model
from corral.gateway.hints import HintListener
from corral.gateway.inflight import Ejection, Load
from corral.gateway.keeper import ViewKeeper
from corral.gateway.link import controller_trust, open_link, parse_controller
from corral.gateway.loads import Loads
from corral.gateway.main import (
    check_listeners,
    count_waiting,
    explained_listening,
    new_ejection,
    read_gateway_key,
    router_options,
    server_tls,
)
from corral.gateway.metrics import Metrics, RouteCounts
from corral.gateway.processes import limits, loads, messages, routers
from corral.gateway.processes.child import PLACE, Place
from corral.gateway.processes.loads import SharedInFlight
from corral.gateway.processes.messages import Channel
from corral.gateway.processes.numbers import Numbers, add_up, ended, numbers_of
from corral.gateway.processes.routers import ParentRouter
from corral.gateway.processes.table import RowBook, SharedTable
from corral.gateway.receipts import ReceiptRing, ReceiptSender
from corral.gateway.replicas import Replica
from corral.gateway.settings import GatewaySettings
from corral.gateway.v1 import Waited
from corral.kit.backoff import Backoff
from corral.kit.clock import Clock, SystemClock
from corral.kit.errors import Failed
from corral.kit.log import get_log
from corral.kit.socket_activation import READY_FD, open_listeners, report_ready

log = get_log(__name__)

_RESTART_EVERY_S = 0.5  # a child that served is replaced at once, at most so often
_FAILED_START_S = (0.5, 30.0)
_STOP_MARGIN_S = 10.0  # beyond the time that running requests may take
_SWEEP_S = 0.05  # for slots whose end nobody reported: their process was killed, or saw nobody waiting yet
_NUMBERS_WITHIN_S = 1.0


async def serve_processes(
    settings: GatewaySettings, listeners: Sequence[socket.socket], *, stopped: asyncio.Event
) -> None:
    """Until `stopped` is set. `CorralError` says in one line what a person must mend before it can start."""
    check_listeners(listeners)
    server_tls(settings)  # a fault in the settings is reported here once, not by each child
    if not listeners:
        with explained_listening(settings):
            listeners = open_listeners(settings.host, settings.port)
    clock = SystemClock()
    address = parse_controller(settings.controller)
    tls = controller_trust(settings.controller_ca) if address.target.tls else None
    async with open_link(address, read_gateway_key(settings), tls=tls, timeout_s=settings.controller_timeout_s) as link:
        metrics = Metrics()
        keeper = ViewKeeper(
            link,
            metrics.view,
            clock,
            check_interval_s=settings.view_check_interval_s,
            full_interval_s=settings.view_interval_s,
            gap_s=settings.view_gap_s,
        )
        table = SharedTable.create(settings.processes + 1)
        in_flight = SharedInFlight(table)
        cold = Loads(link, keeper.hint, clock, poll_s=settings.load_poll_s)
        router = ParentRouter(
            in_flight, cold, clock, router_options(settings), keeper.look_again, controller=address.target
        )
        count_waiting(metrics, router)
        listener = HintListener(
            link,
            keeper.hint,
            metrics.view,
            clock,
            retry_first_s=settings.view_check_interval_s,
            retry_cap_s=settings.hints_retry_s,
            tls=BusTls(ca=settings.bus_ca, certificate=settings.bus_cert, key=settings.bus_key),
            loads=in_flight,
        )
        sender = ReceiptSender(
            ReceiptRing(1),  # requests are the children's; the parent reports which models they wait for
            RouteCounts(),
            link,
            clock,
            keeper.server_now,
            router.waiting,
            interval_s=settings.receipts_interval_s,
        )
        parent = Parent(settings, listeners, table, router, in_flight, keeper, metrics, clock)
        keeper.on_view = parent.take_view
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(keeper.run(), name="view"),
                tasks.create_task(sender.run(), name="receipts"),
                tasks.create_task(parent.sweep(), name="sweep"),
            ]
            if settings.hints:
                running.append(tasks.create_task(listener.run(), name="hints"))
            try:
                await parent.run(stopped)
            finally:
                for task in running:
                    task.cancel()
                await cold.close()


class _Child:
    """One of the processes, as the parent sees it."""

    def __init__(self, column: int, process: asyncio.subprocess.Process) -> None:
        self.column = column
        self.process = process
        self.channel: Channel | None = None
        self.is_serving = False
        self.numbers = Numbers()  # as it told them last
        self.waits: dict[int, asyncio.Task[None]] = {}  # requests that wait for a slot
        self.granted: dict[int, Load] = {}  # slots that we hold until the child counts them

    def send(self, frame: messages.Frame) -> None:
        if self.channel is not None:
            self.channel.send(frame)


class Parent:
    def __init__(
        self,
        settings: GatewaySettings,
        listeners: Sequence[socket.socket],
        table: SharedTable,
        router: ParentRouter,
        in_flight: SharedInFlight,
        keeper: ViewKeeper,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._listeners = listeners
        self._table = table
        self._book = RowBook(table, clock.monotonic)
        self._router = router
        self._in_flight = in_flight
        self._ejection = new_ejection(Ejection, settings, in_flight)
        self._keeper = keeper
        self._metrics = metrics
        self._clock = clock
        self._children: dict[int, _Child] = {}
        self._view: messages.View | None = None
        self._limits: dict[str, int] = {}  # size of each bucket, by row name
        self._gone = Numbers()  # what processes that ended have counted
        self._stopping = asyncio.Event()
        self._ever_served = False
        self._numbers: dict[int, asyncio.Future[None]] = {}  # questions to children
        self._tasks: set[asyncio.Task[None]] = set()
        self._last_id = 0

    # Processes.

    async def run(self, stopped: asyncio.Event) -> None:
        port = self._listeners[0].getsockname()[1]
        log.info("gateway serves", port=port, processes=self._settings.processes, controller=self._settings.controller)
        columns = range(1, self._settings.processes + 1)
        keeping = [asyncio.create_task(self._keep(column), name=f"process {column}") for column in columns]
        stop = asyncio.create_task(stopped.wait(), name="stop")
        try:
            await asyncio.wait((stop, *keeping), return_when=asyncio.FIRST_COMPLETED)
            if not stop.done():  # one of them could not even start
                next(each for each in keeping if each.done()).result()
            self._stop_children(signal.SIGTERM)
            await asyncio.wait(keeping, timeout=self._settings.drain_timeout_s + _STOP_MARGIN_S)
        finally:
            stop.cancel()
            self._stop_children(signal.SIGKILL)
            await asyncio.gather(*keeping, return_exceptions=True)
            for task in self._tasks:
                task.cancel()

    def _stop_children(self, number: signal.Signals) -> None:
        self._stopping.set()
        for listener in self._listeners:
            listener.close()
        for child in self._children.values():
            with contextlib.suppress(ProcessLookupError):
                child.process.send_signal(number)

    async def _keep(self, column: int) -> None:
        """Start the process, and start it again whenever it ends."""
        backoff = Backoff(*_FAILED_START_S)
        while not self._stopping.is_set():
            began = self._clock.monotonic()
            child = await self._start(column)
            code = await child.process.wait()
            self._bury(child)
            if self._stopping.is_set():
                return
            if not child.is_serving and not self._ever_served:
                raise Failed(f"a process of the gateway could not start (exit code {code}); its own line says why")
            if child.is_serving:
                backoff.reset()
                wait_s = max(0.0, _RESTART_EVERY_S - (self._clock.monotonic() - began))
            else:
                wait_s = backoff.next_s()
            log.warning("a gateway process ended and is replaced", process=column, code=code, wait_s=round(wait_s, 1))
            await self._clock.sleep(wait_s)

    async def _start(self, column: int) -> _Child:
        ours, theirs = socket.socketpair()
        with theirs:
            descriptors = (self._table.descriptor, theirs.fileno(), *(each.fileno() for each in self._listeners))
            place = Place(column, self._table.columns, descriptors[0], descriptors[1], descriptors[2:])
            env = {**os.environ, PLACE: encode(place).decode()}
            env.pop(READY_FD, None)
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, *sys.orig_argv[1:]),
                env=env,
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=descriptors,
                start_new_session=True,  # Ctrl-C in a terminal is for the parent, which stops its children in order
            )
        child = self._children[column] = _Child(column, process)
        child.channel = await Channel.open(ours, lambda frame: self._on_frame(child, frame), lambda: None)
        if self._view is not None:
            child.send(msgspec.structs.replace(self._view, clock_offset_s=self._offset_s()))
        if self._stopping.is_set():
            process.terminate()
        return child

    def _bury(self, child: _Child) -> None:
        """Nothing that it had under way counts any more; what it has used of its keys' limits does."""
        del self._children[child.column]
        if child.channel is not None:
            child.channel.close()
        for waiting in child.waits.values():
            waiting.cancel()
        table, cells = self._table, self._table.cells
        for name, row in {"": 0, **self._book.rows}.items():
            first, second = table.first(row), table.second(row)
            if self._limits.get(name):
                cells[first] += cells[first + child.column]  # added before it is taken away: never too little
                cells[second] = max(cells[second], cells[second + child.column])
            cells[first + child.column] = cells[second + child.column] = 0.0
        self._gone = add_up((self._gone, ended(child.numbers)))
        for load in child.granted.values():
            load.end()
        self._router.serve_waiting()

    # The view.

    def take_view(self, view: FleetView) -> None:
        self._limits = dict(limits.rows_of(view.keys))
        names = [
            *(loads.row_name(each.process_id) for each in view.replicas),
            *(routers.queue_row(each.id) for each in view.models),
            *self._limits,
        ]
        new = self._book.keep(names)
        now = self._clock.monotonic()
        for name in new & self._limits.keys():
            if limit := self._limits[name]:
                limits.fill(self._table, self._book.rows[name], limit, now)
        rows = dict(self._book.rows)
        if len(rows) < len(set(names)):
            log.error("the table that gateway processes share is full; they count some things each by themselves")
        offset_s = view.server_time - self._clock.now().timestamp() if view.server_time else self._offset_s()
        self._view = messages.View(encode(view), rows, offset_s)
        for child in self._children.values():  # before anybody is served by it: a child must know the replica
            child.send(self._view)
        self._router.take_over(view, rows, self._in_flight)
        self._router.publish_queues(self._table, rows)
        self._router.serve_waiting()

    def _offset_s(self) -> float:
        return self._keeper.server_now() - self._clock.now().timestamp()

    # Frames.

    def _on_frame(self, child: _Child, frame: messages.Frame) -> None:
        match frame:
            case messages.Wait():
                self._begin(self._wait(child, frame), child.waits, frame.id)
            case messages.Leave():
                if (waiting := child.waits.get(frame.id)) is not None:
                    waiting.cancel()
            case messages.Taken():
                if (load := child.granted.pop(frame.id, None)) is not None:
                    load.end()
            case messages.Freed():
                self._router.serve_waiting(frame.model)
            case messages.Eject():
                loads.apply_ejection(self._ejection, frame.what, frame.id)
                for other in self._children.values():
                    if other is not child:
                        other.send(frame)
            case messages.Look():
                self._begin(self._look(child, frame.id))
            case messages.Serving():
                self._on_serving(child)
            case messages.AskNumbers():
                self._begin(self._tell_numbers(child, frame.id))
            case messages.TellNumbers():
                child.numbers = frame.numbers
                answer = self._numbers.pop(frame.id, None)
                if answer is not None and not answer.done():
                    answer.set_result(None)
            case _:
                log.error("a message that is not for the parent", kind=type(frame).__name__)

    def _begin(
        self,
        work: Coroutine[Any, Any, None],
        known: dict[int, asyncio.Task[None]] | None = None,
        number: int = 0,
    ) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        if known is not None:
            known[number] = task

        def over(_: object) -> None:
            self._tasks.discard(task)
            if known is not None and known.get(number) is task:
                del known[number]
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("a child's question could not be answered", exc_info=error)

        task.add_done_callback(over)

    def _on_serving(self, child: _Child) -> None:
        child.is_serving = True
        log.info("a gateway process serves", process=child.column, pid=child.process.pid)
        serving = sum(each.is_serving for each in self._children.values())
        if not self._ever_served and serving == self._settings.processes:
            self._ever_served = True
            report_ready(os.environ)

    async def _wait(self, child: _Child, frame: messages.Wait) -> None:
        way, waited = self._router.find(frame.model), Waited()
        got: Replica | Answer
        if way is None:
            got = unknown_model(frame.model, installed=0)
        else:
            got = await self._router.wait(way, frame.key_id, waited)
        if isinstance(got, Replica):
            child.granted[frame.id] = got.load
            child.send(messages.Served(frame.id, got.seen.process_id, waited.load_s, waited.queue_s))
        else:
            child.send(
                messages.Refused(frame.id, got.status, got.body, tuple(got.headers), waited.load_s, waited.queue_s)
            )

    async def _look(self, child: _Child, number: int) -> None:
        if number:
            await self._keeper.look_again()
            child.send(messages.Looked(number))
        else:
            self._keeper.hint()

    async def sweep(self) -> None:
        while True:
            await self._clock.sleep(_SWEEP_S)
            self._router.serve_waiting()

    # Numbers.

    async def _tell_numbers(self, child: _Child, number: int) -> None:
        """Those of all processes, as of now; of one that does not answer in time, as it told them last."""
        asked = [self._ask_numbers(each) for each in self._children.values() if each.is_serving]
        if asked:
            await asyncio.wait(asked, timeout=_NUMBERS_WITHIN_S)
        own = numbers_of(self._metrics)
        own.view = self._metrics.view
        own.gauges["processes"] = ("Processes that serve requests.", sum(c.is_serving for c in self._children.values()))
        numbers = add_up((own, self._gone, *(each.numbers for each in self._children.values())))
        child.send(messages.TellNumbers(number, numbers))

    def _ask_numbers(self, child: _Child) -> asyncio.Future[None]:
        self._last_id += 1
        answer = self._numbers[self._last_id] = asyncio.get_running_loop().create_future()
        child.send(messages.AskNumbers(self._last_id))
        return answer
