"""Links with a rate, in virtual time: transfers share links as TCP connections nearly do."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

PART_S = 0.5


@dataclass(eq=False)
class _Flow:
    sender: str
    receiver: str
    left: float
    done: asyncio.Future[None]
    rate: float = 0.0


class Links:
    """Each machine has one link, with the same rate in both directions."""

    def __init__(self, loop: asyncio.AbstractEventLoop, rate: float) -> None:
        """`rate` in units per second; a transfer is so many units."""
        self._loop = loop
        self._rate = rate
        self._flows: list[_Flow] = []
        self._at_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.sent: Counter[str] = Counter()

    async def transfer(self, sender: str, receiver: str, units: float, on_part: Callable[[], None]) -> None:
        """Calls `on_part` now and then, while units arrive."""
        flow = _Flow(sender, receiver, units, self._loop.create_future())
        self._advance()
        self._flows.append(flow)
        self._share()
        try:
            while not flow.done.done():
                await asyncio.wait([flow.done], timeout=PART_S)
                on_part()
        finally:
            if flow in self._flows:  # cancelled
                self._advance()
                self._flows.remove(flow)
                self._share()
            self.sent[sender] += round(units - max(0.0, flow.left))

    def _advance(self) -> None:
        now_s = self._loop.time()
        for flow in self._flows:
            flow.left -= flow.rate * (now_s - self._at_s)
        self._at_s = now_s

    def _share(self) -> None:
        """Max-min fair: the fullest link bounds its transfers, and what they leave elsewhere goes to the others."""
        ends: dict[tuple[str, str], list[_Flow]] = {}
        for flow in self._flows:
            ends.setdefault(("up", flow.sender), []).append(flow)
            ends.setdefault(("down", flow.receiver), []).append(flow)
        free = dict.fromkeys(ends, self._rate)
        waiting = {end: len(flows) for end, flows in ends.items()}
        placed: set[int] = set()
        while len(placed) < len(self._flows):
            end = min((each for each in ends if waiting[each]), key=lambda each: free[each] / waiting[each])
            rate = free[end] / waiting[end]
            for flow in ends[end]:
                if id(flow) not in placed:
                    placed.add(id(flow))
                    flow.rate = rate
                    for other in (("up", flow.sender), ("down", flow.receiver)):
                        free[other] = max(0.0, free[other] - rate)
                        waiting[other] -= 1
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._flows:
            first_s = min(flow.left / max(flow.rate, 1e-9) for flow in self._flows)
            self._timer = self._loop.call_later(max(0.0, first_s), self._complete)

    def _complete(self) -> None:
        self._advance()
        ended = [flow for flow in self._flows if flow.left <= 1e-6]
        self._flows = [flow for flow in self._flows if flow not in ended]
        for flow in ended:
            if not flow.done.done():
                flow.done.set_result(None)
        self._share()
