"""How many requests the processes of LocalAI workers have under way: each controller counts its own and tells the
others; whoever leads adds up and tells gateways, in the node's name, as an ingress would
(docs/reference/wire/replicas.md#in-flight-report)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from corral.bus.api import Bus, Tokens
from corral.contract.messages.hints import PEER_LOAD, PeerLoad
from corral.contract.messages.replicas import NODE_LOAD, NodeLoad
from corral.kit.clock import Clock
from corral.kit.errors import CorralError
from corral.kit.log import get_log
from corral.kit.tasks import Wake

log = get_log(__name__)
IDLE_REPORTS = 2  # messages get lost, and no other may follow for a long time


@dataclass(frozen=True)
class LoadTimes:
    interval_s: float = 0.25  # never more often than that
    # What was told last is told once more, and as long as there are requests: whoever begins to listen must not take
    # silence for idleness.
    again_s: float = 2.0
    believe_s: float = 7.0  # another controller that fell silent has none


@dataclass(frozen=True)
class _OtherController:
    seq: int
    at: float
    in_flight: Mapping[str, int]


class PeerLoads:
    name = "load of peers"

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        instance: str,
        *,
        leads: Callable[[], bool],
        node_of: Callable[[str], str | None],
        times: LoadTimes | None = None,
    ) -> None:
        """`instance`: this run of this controller. `node_of` a process; None when nobody knows it."""
        self._bus = bus
        self._clock = clock
        self._instance = instance
        self._leads = leads
        self._node_of = node_of
        self._times = times or LoadTimes()
        self._own: dict[str, int] = {}
        self._others: dict[str, _OtherController] = {}  # by controller
        self._numbers = itertools.count(1)
        self._idle_reports: dict[str, int] = {}  # by node that had some: how often its having none is still to be told
        self._wake = Wake()

    def begin(self, process_id: str) -> None:
        self._own[process_id] = self._own.get(process_id, 0) + 1
        self._wake.set()

    def end(self, process_id: str) -> None:
        left = self._own[process_id] - 1
        if left:
            self._own[process_id] = left
        else:
            del self._own[process_id]
        self._wake.set()

    def own(self, process_id: str) -> int:
        return self._own.get(process_id, 0)

    def total(self, process_id: str) -> int:
        return self._totals().get(process_id, 0)

    async def run(self) -> None:
        await self._bus.subscribe(PEER_LOAD, self._on_load)
        due = True
        while True:
            changed = await self._wake.wait(self._times.again_s)
            if changed or due:
                due = changed or bool(self._totals())
                due = not await self._tell() or due
            await self._clock.sleep(self._times.interval_s)

    async def _on_load(self, load: PeerLoad, _tokens: Tokens) -> None:
        before = self._others.get(load.controller)
        if load.controller == self._instance or (before is not None and load.seq <= before.seq):
            return
        self._others[load.controller] = _OtherController(load.seq, self._clock.monotonic(), dict(load.in_flight))
        if load.in_flight != (before.in_flight if before is not None else {}):
            self._wake.set()

    async def _tell(self) -> bool:
        """False: it has to be told again."""
        number = next(self._numbers)
        try:
            await self._bus.publish(
                PEER_LOAD, PeerLoad(controller=self._instance, seq=number, in_flight=dict(self._own))
            )
            if self._leads():
                await self._tell_gateways(number)
        except CorralError as error:
            log.debug("load of peers not told", reason=error.message)
            return False
        return True

    async def _tell_gateways(self, number: int) -> None:
        by_node: dict[str, dict[str, int]] = {node_id: {} for node_id in self._idle_reports}
        for process_id, count in self._totals().items():
            if (node_id := self._node_of(process_id)) is not None:
                by_node.setdefault(node_id, {})[process_id] = count
        for node_id, in_flight in by_node.items():
            report = NodeLoad(boot_id=self._instance, seq=number, in_flight=in_flight)
            await self._bus.publish(NODE_LOAD, report, node=node_id)
        left = {
            node_id: IDLE_REPORTS if in_flight else self._idle_reports[node_id] - 1
            for node_id, in_flight in by_node.items()
        }
        self._idle_reports = {node_id: count for node_id, count in left.items() if count}

    def _totals(self) -> dict[str, int]:
        now = self._clock.monotonic()
        self._others = {name: other for name, other in self._others.items() if now - other.at < self._times.believe_s}
        found = dict(self._own)
        for other in self._others.values():
            for process_id, count in other.in_flight.items():
                found[process_id] = found.get(process_id, 0) + max(0, count)
        return found
