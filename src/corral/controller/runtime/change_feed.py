"""The change feed: streams changes of nodes and operations to the web page, the CLI and scripts, and wakes loops.

No event log exists that could lose an event. Every transaction that changes something raises the counter of its kind
(`store/tables/revisions.py`). The feed reads the counters when this controller calls `notify`, when another controller
sends a hint, and once per interval; it reads the changed kinds again and publishes the difference.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from corral.bus.api import Bus, Tokens
from corral.contract.admin import NodeView
from corral.contract.messages.hints import VIEW_CHANGED, WORK_CHANGED, ViewChanged
from corral.controller.runtime.node_views import InFlightOf, not_counted, read_node_views
from corral.kit.clock import Clock
from corral.kit.errors import CorralError
from corral.kit.log import get_log
from corral.kit.tasks import Wake, run_every
from corral.store.engine.transactions import Store, Transaction
from corral.store.tables import revisions

log = get_log(__name__)
T = TypeVar("T")

# The counters: a transaction that changes what one of them covers raises it (`store.tables.revisions`).
RULES = "rules"  # backend rules; a reader of rules and of what follows from them takes it as a lock
INVENTORY = "inventory"  # what nodes report
REPLICAS = "replicas"  # the processes that gateways may send requests to
LOADS = "loads"  # load jobs, as clients that wait for a model see them
_QUEUE_SIZE = 2000
READ_AGAIN_S = 1.0  # while a caller waits for a change, whose hint may be lost
WORK = frozenset(
    {"operations", "rules", "inventory", "upgrades", "upgrade_check", "loads", "releases"}
)  # counters that concern controllers only, see WORK_CHANGED


@dataclass(frozen=True)
class Change:
    kind: str  # node, node-removed, operation, operation-removed, changed, ready
    data: object


END = Change("end", {})


class ViewSource(Protocol):
    """Views of one kind, besides nodes, that the feed publishes: read again when their counter changes."""

    event: str
    counter: str

    async def read(self, tx: Transaction) -> Mapping[str, object]:
        """By id, as of now."""


class ChangeSubscription:
    """The queue of one subscriber. A subscriber that is too slow for its queue starts over with the current state."""

    def __init__(self, present: Mapping[str, NodeView], more: Sequence[Change] = ()) -> None:
        self._queue: asyncio.Queue[Change] = asyncio.Queue()
        self._limit = 0
        self.lagged = False
        self.start_with(present, more)

    def start_with(self, present: Mapping[str, NodeView], more: Sequence[Change] = ()) -> None:
        self._clear()
        self._limit = len(present) + len(more) + _QUEUE_SIZE
        self.lagged = False
        for view in present.values():
            self.put(Change("node", view))
        for change in more:
            self.put(change)
        self.put(Change("ready", {"nodes": len(present)}))

    def put(self, change: Change) -> None:
        if self._queue.qsize() < self._limit:
            self._queue.put_nowait(change)
        else:
            self.lagged = True

    def end(self) -> None:
        """The controller stops: the subscriber closes its stream and connects to another controller."""
        self._clear()
        self._queue.put_nowait(END)

    def _clear(self) -> None:
        while not self._queue.empty():
            self._queue.get_nowait()

    async def next(self) -> Change:
        return await self._queue.get()


class ChangeFeed:
    name = "watch"

    def __init__(self, store: Store, bus: Bus, clock: Clock, *, interval_s: float, refresh_s: float = 5.0) -> None:
        self._store = store
        self._bus = bus
        self._clock = clock
        self._interval_s = interval_s
        self._refresh_s = refresh_s
        self._wake = Wake()
        self._subscriptions: set[ChangeSubscription] = set()
        self._present: dict[str, NodeView] = {}
        self._present_at: int | None = None  # the counter of nodes when these were read
        self._present_by = 0  # the pass that read them
        self._revisions: dict[str, int] = {}
        self._read_at = 0.0
        self._ended = False
        self._begun = 0  # passes; of two at once the one that began later has seen more
        self._applied = 0
        self._hints: asyncio.Queue[ViewChanged] = asyncio.Queue(maxsize=256)
        self._callbacks: dict[str, list[Callable[[], None]]] = {}
        self._sources: list[ViewSource] = []
        self._published: dict[str, dict[str, object]] = {}  # by event: the views published last
        self._published_at: dict[str, int | None] = {}  # by event: the counter then
        self.in_flight_of: InFlightOf = not_counted
        self._published_by: dict[str, int] = {}  # by event: the pass that read them

    def on(self, counter: str, callback: Callable[[], None]) -> None:
        """Call the callback when the counter has changed, on this or another controller."""
        self._callbacks.setdefault(counter, []).append(callback)

    def off(self, counter: str, callback: Callable[[], None]) -> None:
        self._callbacks[counter].remove(callback)

    async def read_until(
        self,
        counters: Sequence[str],
        read: Callable[[], Awaitable[T]],
        is_enough: Callable[[T], bool],
        *,
        timeout_s: float,
    ) -> T:
        """Read again after each change of these counters, and at least once per second, as a hint may be lost. Returns
        the first result that is enough, or the last one when the time is over."""
        changed = Wake()
        for counter in counters:
            self.on(counter, changed.set)
        try:
            deadline = self._clock.monotonic() + timeout_s
            while True:
                result = await read()
                left_s = deadline - self._clock.monotonic()
                if is_enough(result) or left_s <= 0:
                    return result
                await changed.wait(min(left_s, READ_AGAIN_S))
        finally:
            for counter in counters:
                self.off(counter, changed.set)

    def add_source(self, source: ViewSource) -> None:
        self._sources.append(source)
        self._published[source.event] = {}

    def publish(self, event: str, id: str, view: object) -> None:
        """Publish a view of a source without a change of its counter, such as progress."""
        if self._published[event].get(id) != view:
            self._published[event][id] = view
            self._publish(Change(event, view))

    def notify(self, kind: str, id: str = "") -> None:
        """Wake this controller and send a hint to the others. Call it after the commit of a transaction that raised a
        counter."""
        self._wake.set()
        with contextlib.suppress(asyncio.QueueFull):  # a lost hint costs one interval
            self._hints.put_nowait(ViewChanged(kind=kind, id=id))

    @contextlib.asynccontextmanager
    async def subscribe(self) -> AsyncIterator[ChangeSubscription]:
        """The subscription starts with the current state, read now: a client that changes something and then subscribes
        receives the change."""
        try:
            await self.run_once(with_sources=True)
        except CorralError as error:
            log.warning("subscriber starts with an older state", error=error.message)
        subscription = ChangeSubscription(self._present, self._published_changes())
        if self._ended:
            subscription.end()
        self._subscriptions.add(subscription)
        try:
            yield subscription
        finally:
            self._subscriptions.discard(subscription)

    @property
    def subscribers(self) -> int:
        return len(self._subscriptions)

    def end(self) -> None:
        """The controller stops: it must not wait for open streams."""
        self._ended = True
        for subscription in self._subscriptions:
            subscription.end()

    async def run(self) -> None:
        await self._bus.subscribe(VIEW_CHANGED, self._hinted)
        await self._bus.subscribe(WORK_CHANGED, self._hinted)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._send_hints(), name="watch hints")
            tasks.create_task(
                run_every("watch", self._interval_s, self.run_once, clock=self._clock, wake=self._wake, max_wait_s=5.0)
            )

    async def run_once(self, *, with_sources: bool = False) -> None:
        """Read the counters and publish what changed. `with_sources`: read nodes and sources although there is no
        subscriber yet."""
        self._begun += 1
        mine = self._begun
        async with self._store.read() as tx:
            current = await revisions.read_all(tx)
            # Heartbeats raise no counter, but subscribers want current memory figures and times.
            due = bool(self._subscriptions) and self._clock.monotonic() - self._read_at >= self._refresh_s
            stale = [
                source
                for source in self._sources
                if current.get(source.counter) != self._published_at.get(source.event, -1)
            ]
            if not (with_sources or self._subscriptions):
                stale = []
            # Reading a thousand nodes takes a while: they are read only if there is a subscriber.
            outdated = due or with_sources or (bool(self._subscriptions) and current.get("nodes") != self._present_at)
            if current == self._revisions and not stale and not outdated:
                return
            read = {source.event: (current.get(source.counter), dict(await source.read(tx))) for source in stale}
            present = await read_node_views(tx, self.in_flight_of) if outdated else None
        # A pass that began later may have read neither nodes nor sources, so each of these has an order of its own.
        if present is not None and mine > self._present_by:
            self._present_by = mine
            self._present_at = current.get("nodes")
            self._publish_nodes(present)
        for event, (counter, views) in read.items():
            if mine > self._published_by.get(event, 0):
                self._published_by[event] = mine
                self._publish_source(event, counter, views)
        if mine < self._applied:
            return  # a later pass has seen newer counters already
        self._applied = mine
        changed = [kind for kind, value in current.items() if self._revisions.get(kind) != value and kind != "nodes"]
        nodes_changed = self._revisions.get("nodes") != current.get("nodes")
        self._revisions = current
        for kind in changed:
            if kind not in {source.counter for source in self._sources}:
                self._publish(Change("changed", {"kind": kind}))
        for kind in [*changed, "nodes"] if nodes_changed else changed:
            for callback in self._callbacks.get(kind, ()):
                callback()

    def _publish_nodes(self, present: dict[str, NodeView]) -> None:
        self._read_at = self._clock.monotonic()
        before, self._present = self._present, present
        for id, view in present.items():
            if before.get(id) != view:
                self._publish(Change("node", view))
        for id in before.keys() - present.keys():
            self._publish(Change("node-removed", {"id": id}))
        for subscription in self._subscriptions:
            if subscription.lagged:
                subscription.start_with(present, self._published_changes())

    def _publish_source(self, event: str, counter: int | None, views: dict[str, object]) -> None:
        before, self._published[event] = self._published[event], views
        self._published_at[event] = counter
        for id, view in views.items():
            if before.get(id) != view:
                self._publish(Change(event, view))
        for id in before.keys() - views.keys():
            self._publish(Change(f"{event}-removed", {"id": id}))

    def _published_changes(self) -> list[Change]:
        return [Change(event, view) for event, views in self._published.items() for view in views.values()]

    def _publish(self, change: Change) -> None:
        for subscription in self._subscriptions:
            subscription.put(change)

    async def _hinted(self, _: ViewChanged, __: Tokens) -> None:
        self._wake.set()

    async def _send_hints(self) -> None:
        while True:
            hint = await self._hints.get()
            try:
                await self._bus.publish(WORK_CHANGED if hint.kind in WORK else VIEW_CHANGED, hint)
            except CorralError as error:
                log.debug("hint not sent", kind=hint.kind, error=error.message)
            except Exception:  # a hint must never stop the controller
                log.exception("hint not sent", kind=hint.kind)
