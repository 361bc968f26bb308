"""Looks at a chaos run from the side: the invariants in the database, and the memory of each process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import psutil

from corral.controller.health.classify import Guard
from corral.kit.errors import CorralError
from corral.store import open_store
from tests.chaos.fleet import ChaosFleet, Member
from tests.simulation.facts import FactsReader, read_facts
from tests.support import invariants
from tests.support.invariants import Facts, TakenOut

LOOK_S = 1.0
MEMORY_S = 5.0
WINDOW = timedelta(seconds=20)  # `--stale-after` of the run
GUARD = Guard(40, 3)
MIN_SLOPE_S = 300.0  # a process that ran for less says nothing about growth


@dataclass(frozen=True)
class MemorySample:
    at_s: float
    bytes: int


@dataclass(frozen=True)
class Growth:
    """Of one process that ran for some minutes."""

    name: str
    minutes: float
    first_bytes: int
    last_bytes: int
    bytes_per_hour: float


class InvariantWatcher:
    """Two looks are compared as two moments; what happens between them is not seen, but nothing final may change."""

    def __init__(self, fleet: ChaosFleet) -> None:
        self._fleet = fleet
        self.looks = 0
        self.missed = 0  # the database was away
        self.violations: list[str] = []
        self.last = Facts()

    def run(self, over: threading.Event) -> None:
        asyncio.run(self._run(over))

    async def _run(self, over: threading.Event) -> None:
        taken_out: list[TakenOut] = []
        seen = Facts()
        async with open_store(self._fleet.store_url) as store:
            while not over.is_set():
                await asyncio.sleep(LOOK_S)
                try:
                    async with store.read() as tx:
                        now = await read_facts(tx, Facts(), frozenset(FactsReader.TABLES))
                except (CorralError, OSError):
                    self.missed += 1
                    continue
                found = invariants.broken(seen, now) if self.looks else []
                at = datetime.now(UTC)
                if self.looks:
                    fallen = invariants.taken_out(seen, now, at, WINDOW)
                    taken_out = [*invariants.still_out(taken_out, now), *fallen]
                    found += invariants.too_many_taken_out(taken_out, GUARD, WINDOW) if fallen else []
                self.violations += [each for each in found if each not in self.violations]
                self.looks += 1
                seen = self.last = now


class MemoryWatcher:
    def __init__(self, members: Mapping[str, Member]) -> None:
        self._members = members
        self._samples: dict[tuple[str, int], list[MemorySample]] = defaultdict(list)  # by name and pid

    def run(self, over: threading.Event) -> None:
        while not over.wait(MEMORY_S):
            for name, member in list(self._members.items()):
                process = member.process
                if process is None or not process.running:
                    continue
                with contextlib.suppress(psutil.Error):
                    used = psutil.Process(process.pid).memory_info().rss
                    self._samples[name, process.pid].append(MemorySample(time.monotonic(), used))

    def growth(self, *, warm_up_s: float = 60.0) -> list[Growth]:
        """By least squares over each life of a process that was long enough, without its first minute."""
        found = []
        for (name, _), samples in sorted(self._samples.items()):
            late = [each for each in samples if each.at_s - samples[0].at_s >= warm_up_s]
            if len(late) < 2 or late[-1].at_s - late[0].at_s < MIN_SLOPE_S:
                continue
            hours = (late[-1].at_s - late[0].at_s) / 3600
            per_hour = slope(late) * 3600
            found.append(Growth(name, hours * 60, late[0].bytes, late[-1].bytes, per_hour))
        return found


def slope(samples: list[MemorySample]) -> float:
    """Bytes per second."""
    count = len(samples)
    middle_s = sum(each.at_s for each in samples) / count
    middle_bytes = sum(each.bytes for each in samples) / count
    across = sum((each.at_s - middle_s) * (each.bytes - middle_bytes) for each in samples)
    along = sum((each.at_s - middle_s) ** 2 for each in samples)
    return across / along if along else 0.0
