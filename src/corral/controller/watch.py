"""What changed, for whoever follows: the page, the CLI, scripts.

There is no log of events that could lose one. A counter per kind (`store.revisions`) is raised inside every changing
transaction; this part looks at the counters when it is woken here, hinted at by another controller, or a second has
passed, then reads again what changed and tells the difference to what it told before.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

from corral.bus.api import Bus, Tokens
from corral.contract.admin import NodeView
from corral.contract.messages.hints import VIEW_CHANGED, ViewChanged
from corral.controller.registry.views import read_node_views
from corral.kit.clock import Clock
from corral.kit.errors import CorralError
from corral.kit.log import get_log
from corral.kit.tasks import Wake, run_every
from corral.store import revisions
from corral.store.api import Store

log = get_log(__name__)

_QUEUE = 2000


@dataclass(frozen=True)
class Change:
    kind: str  # node, node-removed, changed, ready
    data: object


END = Change("end", {})


class Following:
    """One follower's place in the stream. A follower too slow for its queue starts over with the present state."""

    def __init__(self, present: Mapping[str, NodeView]) -> None:
        self._queue: asyncio.Queue[Change] = asyncio.Queue()
        self._limit = 0
        self.lagged = False
        self.start_with(present)

    def start_with(self, present: Mapping[str, NodeView]) -> None:
        self._drop_waiting()
        self._limit = len(present) + _QUEUE
        self.lagged = False
        for view in present.values():
            self.tell(Change("node", view))
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
        self._revisions: dict[str, int] = {}
        self._read_at = 0.0
        self._ended = False
        self._begun = 0  # looks; of two at once the one that began later has seen more
        self._seen = 0
        self._hints: asyncio.Queue[ViewChanged] = asyncio.Queue(maxsize=256)

    def touched(self, kind: str, id: str = "") -> None:
        """Call after a changing transaction has committed: wakes this controller now and hints at the others."""
        self._wake.set()
        with contextlib.suppress(asyncio.QueueFull):  # a hint lost costs one interval
            self._hints.put_nowait(ViewChanged(kind=kind, id=id))

    @contextlib.asynccontextmanager
    async def follow(self) -> AsyncIterator[Following]:
        """Starts with the present state, read now: whoever changed something and then follows must find it there."""
        try:
            await self.look()
        except CorralError as error:
            log.warning("follower starts with what was last seen", error=error.message)
        following = Following(self._present)
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
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._send_hints(), name="watch hints")
            tasks.create_task(
                run_every("watch", self._interval_s, self.look, clock=self._clock, wake=self._wake, worst_wait_s=5.0)
            )

    async def look(self) -> None:
        self._begun += 1
        mine = self._begun
        async with self._store.read() as tx:
            current = await revisions.read_all(tx)
            # Heartbeats raise no counter; someone who watches still wants to see memory and times move.
            due = bool(self._followers) and self._clock.monotonic() - self._read_at >= self._refresh_s
            if current == self._revisions and not due:
                return
            nodes_changed = due or current.get("nodes") != self._revisions.get("nodes")
            present = await read_node_views(tx) if nodes_changed else self._present
        if mine < self._seen:
            return  # what we read is older than what has been told already
        self._seen = mine
        changed = [kind for kind, value in current.items() if self._revisions.get(kind) != value and kind != "nodes"]
        self._revisions = current
        self._tell_nodes(present)
        for kind in changed:
            self._tell(Change("changed", {"kind": kind}))

    def _tell_nodes(self, present: dict[str, NodeView]) -> None:
        if present is self._present:
            return
        self._read_at = self._clock.monotonic()
        before, self._present = self._present, present
        for id, view in present.items():
            if before.get(id) != view:
                self._tell(Change("node", view))
        for id in before.keys() - present.keys():
            self._tell(Change("node-removed", {"id": id}))
        for following in self._followers:
            if following.lagged:
                following.start_with(present)

    def _tell(self, change: Change) -> None:
        for following in self._followers:
            following.tell(change)

    async def _hinted(self, _: ViewChanged, __: Tokens) -> None:
        self._wake.set()

    async def _send_hints(self) -> None:
        while True:
            hint = await self._hints.get()
            try:
                await self._bus.publish(VIEW_CHANGED, hint)
            except CorralError as error:
                log.debug("hint not sent", kind=hint.kind, error=error.message)
            except Exception:  # a hint is never worth the controller
                log.exception("hint not sent", kind=hint.kind)
