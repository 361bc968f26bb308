"""Requests in flight at each replica: this gateway's exactly, those of other gateways as the node reports them.

`SlotCounter` is the only mutable object on the fast path. It writes the rank of its replica (`pick.py`) into a list of
the current view, and notifies the queue when a slot becomes free. Counters outlive views: a request that began under an
old view ends under a new one. `Ejection` keeps requests away from replicas that could not be reached.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from corral.contract.messages.replicas import NodeLoad
from corral.gateway.routing.pick import BUSY, EJECTED, LAST_RESORT


class SlotQueue(Protocol):
    """Requests that wait for a slot."""

    waiting: int

    def on_slot_free(self) -> None: ...


class _EmptyQueue:
    waiting = 0

    def on_slot_free(self) -> None:
        pass


_EMPTY_QUEUE = _EmptyQueue()


class SlotCounter:
    """Requests in flight at one process."""

    __slots__ = ("_base", "_index", "_others", "_peak", "_queue", "_ranks", "_slots", "ejections", "node_id", "own")

    def __init__(self, node_id: str = "") -> None:
        self.node_id = node_id
        self.own = 0  # requests of this gateway
        self.ejections = 0  # in a row
        self._others = 0  # requests of other gateways
        self._peak = 0  # maximum of `own` since the node's last report
        self._slots = 1
        self._base = 0
        self._ranks = [0]
        self._index = 0
        self._queue: SlotQueue = _EMPTY_QUEUE

    @property
    def in_flight(self) -> int:
        return self.own + self._others

    is_over = False  # it took a slot that was not free; only with several processes

    @property
    def is_ejected(self) -> bool:
        return self._base >= EJECTED

    def begin(self) -> None:
        own = self.own = self.own + 1
        if own > self._peak:
            self._peak = own
        total = own + self._others
        self._ranks[self._index] = self._base + (total if total < self._slots else total + BUSY)

    def end(self) -> None:
        self.own -= 1
        total = self.own + self._others
        self._ranks[self._index] = self._base + (total if total < self._slots else total + BUSY)
        if self._queue.waiting:
            self._queue.on_slot_free()

    def attach(self, ranks: list[int], index: int, *, slots: int, last_resort: bool, queue: SlotQueue) -> None:
        """Write the rank to `ranks[index]` from now on."""
        self._ranks = ranks
        self._index = index
        self._slots = slots
        self._base = (LAST_RESORT if last_resort else 0) + (EJECTED if self.is_ejected else 0)
        self._queue = queue
        self._write()

    def detach(self) -> None:
        """The view no longer has the replica; requests in flight may end."""
        self._ranks, self._index, self._queue = [0], 0, _EMPTY_QUEUE

    def on_report(self, in_flight: int) -> None:
        """The node's count, which includes ours. It is a moment old, and this gateway may have had more requests in
        flight then. So the maximum since the last report counts as ours; otherwise a request that has just ended would
        keep its slot until the next report."""
        self._others = max(0, in_flight - self._peak)
        self._peak = self.own
        self._write()
        if self._queue.waiting:
            self._queue.on_slot_free()

    def eject(self) -> None:
        if not self.is_ejected:
            self._base += EJECTED
        self._write()

    def readmit(self) -> None:
        if self.is_ejected:
            self._base -= EJECTED
            self._write()
            if self._queue.waiting:
                self._queue.on_slot_free()

    def _write(self) -> None:
        total = self.own + self._others
        self._ranks[self._index] = self._base + (total if total < self._slots else total + BUSY)


class InFlight:
    """Counters by process, updated by the reports of nodes."""

    def __init__(self) -> None:
        self._counters: dict[str, SlotCounter] = {}
        self._on_node: dict[str, dict[str, SlotCounter]] = {}  # the same by node, which reports several times a second
        self._nodes: dict[str, tuple[str, int]] = {}  # the last report of each: boot id and sequence number

    def counter(self, process_id: str, node_id: str) -> SlotCounter:
        found = self._counters.get(process_id)
        if found is None:
            found = self._counters[process_id] = self.new_counter(node_id)
            self._on_node.setdefault(node_id, {})[process_id] = found
        return found

    def new_counter(self, node_id: str) -> SlotCounter:
        return SlotCounter(node_id)

    def find(self, process_id: str) -> SlotCounter | None:
        return self._counters.get(process_id)

    def retain(self, process_ids: set[str]) -> None:
        """Remove all other processes. Their requests in flight keep a reference to their counter."""
        for process_id in [each for each in self._counters if each not in process_ids]:
            gone = self._counters.pop(process_id)
            gone.detach()
            others = self._on_node[gone.node_id]
            del others[process_id]
            if not others:
                del self._on_node[gone.node_id]
                self._nodes.pop(gone.node_id, None)

    def on_node(self, node_id: str) -> list[SlotCounter]:
        return list(self._on_node.get(node_id, {}).values())

    def on_report(self, node_id: str, report: NodeLoad) -> None:
        """Reports may arrive out of order: a report counts if its number is higher, or its boot id is another."""
        counters = self._on_node.get(node_id)
        boot, seq = self._nodes.get(node_id, ("", 0))
        if counters is None or (boot == report.boot_id and report.seq <= seq):
            return
        self._nodes[node_id] = (report.boot_id, report.seq)
        for process_id, counter in list(counters.items()):
            counter.on_report(report.in_flight.get(process_id, 0))

    def on_disconnect(self) -> None:
        """No more reports arrive: our own numbers are better than old ones of others."""
        self._nodes.clear()
        for counter in self._counters.values():
            counter.on_report(0)


CallLater = Callable[[float, Callable[[], None]], object]  # calls the function after so many seconds


class Ejection:
    """Ejects replicas that could not be reached for a while, for longer each time
    (docs/explanation/design.md#cold-models)."""

    def __init__(self, in_flight: InFlight, call_later: CallLater, *, first_s: float, cap_s: float) -> None:
        self._in_flight = in_flight
        self._call_later = call_later
        self._first_s = first_s
        self._cap_s = cap_s
        self._suspended: set[str] = set()  # nodes that stay ejected until `resume_node`
        self.count = 0

    def eject_process(self, process_id: str) -> None:
        if (counter := self._in_flight.find(process_id)) is not None:
            self._eject(counter)

    def eject_node(self, node_id: str) -> None:
        """Eject all its processes: its ingress could not be reached."""
        for counter in self._in_flight.on_node(node_id):
            self._eject(counter)

    def suspend_node(self, node_id: str) -> None:
        """Its ingress is silent: eject all its processes until `resume_node`; also processes of later views, once one
        of them could not be reached."""
        self._suspended.add(node_id)
        self.eject_node(node_id)

    def resume_node(self, node_id: str) -> None:
        self._suspended.discard(node_id)
        for counter in self._in_flight.on_node(node_id):
            counter.ejections = 0
            counter.readmit()

    def on_reached(self, counter: SlotCounter) -> None:
        counter.ejections = 0

    def _eject(self, counter: SlotCounter) -> None:
        if counter.is_ejected:  # another request has ejected it meanwhile
            return
        self.count += 1
        wait_s = min(self._cap_s, self._first_s * 2**counter.ejections)
        counter.ejections = min(counter.ejections + 1, 16)
        counter.eject()
        self._call_later(wait_s, partial(self._readmit, counter))

    def _readmit(self, counter: SlotCounter) -> None:
        if counter.node_id not in self._suspended:
            counter.readmit()
