"""How many requests each replica has under way: our own exactly, those of other gateways as its node tells.

`Load` is the one mutable thing on the warm path. It writes its replica's rank (`pick.py`) into the list the present
view was prepared with, and tells whoever waits when a slot is free. Loads outlive views: a request that began under an
old view ends under a new one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from corral.contract.messages.replicas import NodeLoad
from corral.gateway.pick import BUSY, EJECTED, LAST_RESORT


class Freed(Protocol):
    """Those who wait for a slot."""

    waiting: int

    def freed(self) -> None: ...


class _Nobody:
    waiting = 0

    def freed(self) -> None:
        pass


NOBODY = _Nobody()


class Load:
    """Of one process."""

    __slots__ = ("_base", "_index", "_others", "_peak", "_queue", "_ranks", "_slots", "ejections", "node_id", "own")

    def __init__(self, node_id: str = "") -> None:
        self.node_id = node_id
        self.own = 0  # requests of this gateway's
        self.ejections = 0  # in a row
        self._others = 0  # of everybody else's
        self._peak = 0  # most of our own since the node last told
        self._slots = 1
        self._base = 0
        self._ranks = [0]
        self._index = 0
        self._queue: Freed = NOBODY

    @property
    def in_flight(self) -> int:
        return self.own + self._others

    is_over = False  # it took a slot that was not there; only where several processes take them

    @property
    def is_ejected(self) -> bool:
        return self._base >= EJECTED

    def begin(self) -> None:
        own = self.own = self.own + 1
        if own > self._peak:
            self._peak = own
        load = own + self._others
        self._ranks[self._index] = self._base + (load if load < self._slots else load + BUSY)

    def end(self) -> None:
        self.own -= 1
        load = self.own + self._others
        self._ranks[self._index] = self._base + (load if load < self._slots else load + BUSY)
        if self._queue.waiting:
            self._queue.freed()

    def place(self, ranks: list[int], index: int, *, slots: int, last_resort: bool, queue: Freed) -> None:
        """Where its rank is kept from now on. The list has to have that place."""
        self._ranks = ranks
        self._index = index
        self._slots = slots
        self._base = (LAST_RESORT if last_resort else 0) + (EJECTED if self.is_ejected else 0)
        self._queue = queue
        self._write()

    def displace(self) -> None:
        """The view does not have it any more; what is under way may end."""
        self._ranks, self._index, self._queue = [0], 0, NOBODY

    def told(self, in_flight: int) -> None:
        """The node's own count, ours among it. It was taken a moment ago, when we may have had more under way than
        now: whatever of it can have been ours is not counted as another's, or a request that has just ended would keep
        its slot until the node tells again."""
        self._others = max(0, in_flight - self._peak)
        self._peak = self.own
        self._write()
        if self._queue.waiting:
            self._queue.freed()

    def eject(self) -> None:
        if not self.is_ejected:
            self._base += EJECTED
        self._write()

    def take_back(self) -> None:
        if self.is_ejected:
            self._base -= EJECTED
            self._write()
            if self._queue.waiting:
                self._queue.freed()

    def _write(self) -> None:
        load = self.own + self._others
        self._ranks[self._index] = self._base + (load if load < self._slots else load + BUSY)


class InFlight:
    """Loads by process, and what nodes tell of them."""

    def __init__(self) -> None:
        self._loads: dict[str, Load] = {}
        self._on_node: dict[str, dict[str, Load]] = {}  # the same: nodes tell several times a second
        self._nodes: dict[str, tuple[str, int]] = {}  # the last report of each: its boot and number

    def load(self, process_id: str, node_id: str) -> Load:
        found = self._loads.get(process_id)
        if found is None:
            found = self._loads[process_id] = self.new_load(node_id)
            self._on_node.setdefault(node_id, {})[process_id] = found
        return found

    def new_load(self, node_id: str) -> Load:
        return Load(node_id)

    def find(self, process_id: str) -> Load | None:
        return self._loads.get(process_id)

    def keep(self, process_ids: set[str]) -> None:
        """Those of the present view; of others, only what is still under way matters, and their requests hold it."""
        for process_id in [each for each in self._loads if each not in process_ids]:
            gone = self._loads.pop(process_id)
            gone.displace()
            others = self._on_node[gone.node_id]
            del others[process_id]
            if not others:
                del self._on_node[gone.node_id]
                self._nodes.pop(gone.node_id, None)

    def on_node(self, node_id: str) -> list[Load]:
        return list(self._on_node.get(node_id, {}).values())

    def heard(self, node_id: str, report: NodeLoad) -> None:
        """Reports may overtake each other: a later number of the same boot counts, and any of another boot."""
        loads = self._on_node.get(node_id)
        boot, seq = self._nodes.get(node_id, ("", 0))
        if loads is None or (boot == report.boot_id and report.seq <= seq):
            return
        self._nodes[node_id] = (report.boot_id, report.seq)
        for process_id, load in list(loads.items()):
            load.told(report.in_flight.get(process_id, 0))

    def deaf(self) -> None:
        """Nobody tells any more: better our own numbers than old ones of others."""
        self._nodes.clear()
        for load in self._loads.values():
            load.told(0)


Later = Callable[[float, Callable[[], None]], object]  # call this after so many seconds


class Ejection:
    """Replicas that could not be reached are left alone for a while, each time for longer
    (docs/explanation/design.md#cold-models)."""

    def __init__(self, in_flight: InFlight, later: Later, *, first_s: float, cap_s: float) -> None:
        self._in_flight = in_flight
        self._later = later
        self._first_s = first_s
        self._cap_s = cap_s
        self._held: set[str] = set()  # nodes that stay ejected until `release`
        self.count = 0

    def process(self, process_id: str) -> None:
        if (load := self._in_flight.find(process_id)) is not None:
            self._eject(load)

    def node(self, node_id: str) -> None:
        """Its ingress does not answer: none of its processes can be reached."""
        for load in self._in_flight.on_node(node_id):
            self._eject(load)

    def hold(self, node_id: str) -> None:
        """Its ingress is silent: eject all its processes until `release`, also those that the view brings later, once
        one of them could not be reached."""
        self._held.add(node_id)
        self.node(node_id)

    def release(self, node_id: str) -> None:
        self._held.discard(node_id)
        for load in self._in_flight.on_node(node_id):
            load.ejections = 0
            load.take_back()

    def reached(self, load: Load) -> None:
        load.ejections = 0

    def _eject(self, load: Load) -> None:
        if load.is_ejected:  # others have said so at the same time
            return
        self.count += 1
        wait_s = min(self._cap_s, self._first_s * 2**load.ejections)
        load.ejections = min(load.ejections + 1, 16)
        load.eject()
        self._later(wait_s, partial(self._take_back, load))

    def _take_back(self, load: Load) -> None:
        if load.node_id not in self._held:
            load.take_back()
