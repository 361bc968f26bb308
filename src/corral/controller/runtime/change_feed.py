"""What changed, for whoever follows: the page, the CLI, scripts.

There is no log of events that could lose one. A counter per kind (`store.revisions`) is raised inside every changing
transaction; this part looks at the counters when it is woken here, hinted at by another controller, or a second has
passed, then reads again what changed and tells the difference to what it told before.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

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

_QUEUE = 2000
WORK = frozenset(
    {"operations", "rules", "inventory", "upgrades", "upgrade_check", "loads"}
)  # counters that concern controllers only, see WORK_CHANGED


@dataclass(frozen=True)
class Change:
    kind: str  # node, node-removed, operation, operation-removed, changed, ready
    data: object


END = Change("end", {})


class Feed(Protocol):
    """More to follow than nodes: views of one kind, read again when their counter moves."""

    event: str
    counter: str

    async def read(self, tx: Transaction) -> Mapping[str, object]:
        """By id, as of now."""


class Following:
    """One follower's place in the stream. A follower too slow for its queue starts over with the present state."""

    def __init__(self, present: Mapping[str, NodeView], more: Sequence[Change] = ()) -> None:
        self._queue: asyncio.Queue[Change] = asyncio.Queue()
        self._limit = 0
        self.lagged = False
        self.start_with(present, more)

    def start_with(self, present: Mapping[str, NodeView], more: Sequence[Change] = ()) -> None:
        self._drop_waiting()
        self._limit = len(present) + len(more) + _QUEUE
        self.lagged = False
        for view in present.values():
            self.tell(Change("node", view))
        for change in more:
            self.tell(change)
        self.tell(Change("ready", {"nodes": len(present)}))

    def tell(self, change: Change) -> None:
        if self._queue.qsize() < self._limit:
            self._queue.put_nowait(change)
        else:
            self.lagged = True

    def end(self) -> None:
        """Nothing more will come: whoever follows is to hang up and find another controller."""
        self._drop_waiting()
        self._queue.put_nowait(END)

    def _drop_waiting(self) -> None:
        while not self._queue.empty():
            self._queue.get_nowait()

    async def next(self) -> Change:
        return await self._queue.get()


class Watch:
    name = "watch"

    def __init__(self, store: Store, bus: Bus, clock: Clock, *, interval_s: float, refresh_s: float = 5.0) -> None:
        self._store = store
        self._bus = bus
        self._clock = clock
        self._interval_s = interval_s
        self._refresh_s = refresh_s
        self._wake = Wake()
        self._followers: set[Following] = set()
        self._present: dict[str, NodeView] = {}
        self._present_at: int | None = None  # the counter of nodes when these were read
        self._present_by = 0  # the look that read them
        self._revisions: dict[str, int] = {}
        self._read_at = 0.0
        self._ended = False
        self._begun = 0  # looks; of two at once the one that began later has seen more
        self._seen = 0
        self._hints: asyncio.Queue[ViewChanged] = asyncio.Queue(maxsize=256)
        self._callbacks: dict[str, list[Callable[[], None]]] = {}
        self._feeds: list[Feed] = []
        self._fed: dict[str, dict[str, object]] = {}  # by event: what was told last
        self._fed_at: dict[str, int | None] = {}  # by event: the counter then
        self.in_flight_of: InFlightOf = not_counted
        self._fed_by: dict[str, int] = {}  # by event: the look that read it

    def on(self, counter: str, callback: Callable[[], None]) -> None:
        """Be woken when the counter has moved, here or on another controller."""
        self._callbacks.setdefault(counter, []).append(callback)

    def off(self, counter: str, callback: Callable[[], None]) -> None:
        self._callbacks[counter].remove(callback)

    def add(self, feed: Feed) -> None:
        self._feeds.append(feed)
        self._fed[feed.event] = {}

    def tell(self, event: str, id: str, view: object) -> None:
        """News of a feed that are quicker than its counter, such as progress."""
        if self._fed[event].get(id) != view:
            self._fed[event][id] = view
            self._tell(Change(event, view))

    def touched(self, kind: str, id: str = "") -> None:
        """Call after a changing transaction has committed: wakes this controller now and hints at the others."""
        self._wake.set()
        with contextlib.suppress(asyncio.QueueFull):  # a hint lost costs one interval
            self._hints.put_nowait(ViewChanged(kind=kind, id=id))

    @contextlib.asynccontextmanager
    async def follow(self) -> AsyncIterator[Following]:
        """Starts with the present state, read now: whoever changed something and then follows must find it there."""
        try:
            await self.look(feeds=True)
        except CorralError as error:
            log.warning("follower starts with what was last seen", error=error.message)
        following = Following(self._present, self._fed_changes())
        if self._ended:
            following.end()
        self._followers.add(following)
        try:
            yield following
        finally:
            self._followers.discard(following)

    @property
    def followers(self) -> int:
        return len(self._followers)

    def end(self) -> None:
        """The controller stops: open streams must not hold it up."""
        self._ended = True
        for following in self._followers:
            following.end()

    async def run(self) -> None:
        await self._bus.subscribe(VIEW_CHANGED, self._hinted)
        await self._bus.subscribe(WORK_CHANGED, self._hinted)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._send_hints(), name="watch hints")
            tasks.create_task(
                run_every("watch", self._interval_s, self.look, clock=self._clock, wake=self._wake, worst_wait_s=5.0)
            )

    async def look(self, *, feeds: bool = False) -> None:
        """`feeds`: also read what only followers want, though none is there yet."""
        self._begun += 1
        mine = self._begun
        async with self._store.read() as tx:
            current = await revisions.read_all(tx)
            # Heartbeats raise no counter; someone who watches still wants to see memory and times move.
            due = bool(self._followers) and self._clock.monotonic() - self._read_at >= self._refresh_s
            stale = [feed for feed in self._feeds if current.get(feed.counter) != self._fed_at.get(feed.event, -1)]
            if not (feeds or self._followers):
                stale = []
            # Only followers want nodes: a thousand of them are not read anew for nobody.
            outdated = due or feeds or (bool(self._followers) and current.get("nodes") != self._present_at)
            if current == self._revisions and not stale and not outdated:
                return
            fed = {feed.event: (current.get(feed.counter), dict(await feed.read(tx))) for feed in stale}
            present = await read_node_views(tx, self.in_flight_of) if outdated else None
        # A look that began later may have read neither nodes nor feeds, so each of these has an order of its own.
        if present is not None and mine > self._present_by:
            self._present_by = mine
            self._present_at = current.get("nodes")
            self._tell_nodes(present)
        for event, (counter, views) in fed.items():
            if mine > self._fed_by.get(event, 0):
                self._fed_by[event] = mine
                self._tell_feed(event, counter, views)
        if mine < self._seen:
            return  # what we read is older than what has been told already
        self._seen = mine
        changed = [kind for kind, value in current.items() if self._revisions.get(kind) != value and kind != "nodes"]
        nodes_moved = self._revisions.get("nodes") != current.get("nodes")
        self._revisions = current
        for kind in changed:
            if kind not in {feed.counter for feed in self._feeds}:
                self._tell(Change("changed", {"kind": kind}))
        for kind in [*changed, "nodes"] if nodes_moved else changed:
            for callback in self._callbacks.get(kind, ()):
                callback()

    def _tell_nodes(self, present: dict[str, NodeView]) -> None:
        self._read_at = self._clock.monotonic()
        before, self._present = self._present, present
        for id, view in present.items():
            if before.get(id) != view:
                self._tell(Change("node", view))
        for id in before.keys() - present.keys():
            self._tell(Change("node-removed", {"id": id}))
        for following in self._followers:
            if following.lagged:
                following.start_with(present, self._fed_changes())

    def _tell_feed(self, event: str, counter: int | None, views: dict[str, object]) -> None:
        before, self._fed[event] = self._fed[event], views
        self._fed_at[event] = counter
        for id, view in views.items():
            if before.get(id) != view:
                self._tell(Change(event, view))
        for id in before.keys() - views.keys():
            self._tell(Change(f"{event}-removed", {"id": id}))

    def _fed_changes(self) -> list[Change]:
        return [Change(event, view) for event, views in self._fed.items() for view in views.values()]

    def _tell(self, change: Change) -> None:
        for following in self._followers:
            following.tell(change)

    async def _hinted(self, _: ViewChanged, __: Tokens) -> None:
        self._wake.set()

    async def _send_hints(self) -> None:
        while True:
            hint = await self._hints.get()
            try:
                await self._bus.publish(WORK_CHANGED if hint.kind in WORK else VIEW_CHANGED, hint)
            except CorralError as error:
                log.debug("hint not sent", kind=hint.kind, error=error.message)
            except Exception:  # a hint is never worth the controller
                log.exception("hint not sent", kind=hint.kind)
