"""Tracks the requests in flight per process, from the load events of the nodes' ingresses (`nodes.{node}.load`).

A node with requests in flight publishes an event every two seconds; a node without publishes none. So a process counts
as idle only after the controller has been subscribed for a while.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from corral.bus.api import Bus, Tokens
from corral.contract.messages.replicas import NODE_LOAD, NodeLoad
from corral.kit.clock import Clock


@dataclass(frozen=True)
class ProcessActivity:
    """The requests in flight of one process, as far as they are known."""

    in_flight: int = 0
    known: bool = False  # the controller has been subscribed for long enough to have heard of a busy process


FRESH_S = 7.0  # more than three intervals of a busy node's events
# The leader stores when a process was last used; the other controllers keep that until one of them leads.
KEPT_S = 3600.0


@dataclass
class _Node:
    boot_id: str = ""
    seq: int = 0
    reported_at: float = 0.0
    in_flight: dict[str, int] = field(default_factory=dict)


class ActivityTracker:
    def __init__(self, bus: Bus, clock: Clock, *, fresh_s: float = FRESH_S) -> None:
        self._bus = bus
        self._clock = clock
        self._fresh_s = fresh_s
        self._subscribed_since: float | None = None
        self._nodes: dict[str, _Node] = {}
        self._used: dict[str, float] = {}  # by process: time of the last event with requests
        self._pruned_at = 0.0

    async def listen(self) -> None:
        await self._bus.subscribe(NODE_LOAD, self.on_load)
        self._bus.on_change(self._bus_changed)
        self._bus_changed(self._bus.connected)

    def _bus_changed(self, connected: bool) -> None:
        """Events were lost while the bus was disconnected."""
        self._subscribed_since = self._clock.monotonic() if connected else None

    async def on_load(self, load: NodeLoad, tokens: Tokens) -> None:
        self._prune()
        node = self._nodes.setdefault(tokens["node"], _Node())
        if load.boot_id == node.boot_id and load.seq <= node.seq:
            return  # a later event has arrived already
        now = self._clock.monotonic()
        # A process whose last request has just ended was in use until now.
        for process_id in {*load.in_flight, *node.in_flight}:
            self._used[process_id] = now
        node.boot_id, node.seq, node.in_flight, node.reported_at = load.boot_id, load.seq, dict(load.in_flight), now

    def find(self, node_id: str, process_id: str) -> ProcessActivity:
        count = self._in_flight(node_id).get(process_id, 0)
        return ProcessActivity(count, count > 0 or self._is_sure())

    def of_node(self, node_id: str) -> tuple[int, bool]:
        """The requests in flight on the node, and whether the subscription is old enough to know."""
        return sum(self._in_flight(node_id).values()), self._is_sure()

    def _in_flight(self, node_id: str) -> Mapping[str, int]:
        node = self._nodes.get(node_id)
        return node.in_flight if node is not None and self._is_fresh(node.reported_at, self._clock.monotonic()) else {}

    def _is_sure(self) -> bool:
        return self._subscribed_since is not None and not self._is_fresh(
            self._subscribed_since, self._clock.monotonic()
        )

    def used_s_ago(self, process_id: str) -> float | None:
        """None: not since the controller subscribed."""
        at = self._used.get(process_id)
        return self._clock.monotonic() - at if at is not None else None

    def forget_all_but(self, process_ids: set[str]) -> None:
        self._used = {process_id: at for process_id, at in self._used.items() if process_id in process_ids}

    def _prune(self) -> None:
        """A controller that never leads also receives events, and nodes may have been deleted."""
        now = self._clock.monotonic()
        if now - self._pruned_at < KEPT_S:
            return
        self._pruned_at = now
        self._used = {process_id: at for process_id, at in self._used.items() if now - at < KEPT_S}
        self._nodes = {node_id: node for node_id, node in self._nodes.items() if now - node.reported_at < KEPT_S}

    def _is_fresh(self, moment: float, now: float) -> bool:
        return now - moment < self._fresh_s
