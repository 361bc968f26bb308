"""What goes wrong in a chaos run: chosen by a seed, undone after some seconds, and counted by kind.

Several faults may be active at once, as in life, but never more than one on the same process, and one process of each
role is left alone: what is measured is a fleet in trouble, not one that is switched off.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.chaos.fleet import ChaosFleet, Member

FREE_BYTES = 1 << 20


@dataclass(frozen=True)
class Fault:
    kind: str
    target: str
    begin: Callable[[], None]
    end: Callable[[], None]
    lasts_s: float


class Faults:
    """`run_once`, several times a second, begins and ends what is due; `end_all` undoes the rest.

    Call both in the main thread: a database server that is started again ends with the thread that started it."""

    def __init__(self, fleet: ChaosFleet, chance: Random, *, every_s: float) -> None:
        self._fleet = fleet
        self._chance = chance
        self._every_s = every_s
        self._active: dict[str, tuple[float, Fault]] = {}  # by target: when it ends
        self.counts: Counter[str] = Counter()
        self.journal: list[tuple[float, str]] = []
        self._began = time.monotonic()
        self._next_at = self._began

    def run_once(self) -> None:
        now = time.monotonic()
        self._end_due(now)
        if now >= self._next_at:
            self._next_at = now + self._chance.expovariate(1 / self._every_s)
            self._begin_one(now)

    def end_all(self) -> None:
        self._end_due(float("inf"))

    def _end_due(self, now: float) -> None:
        for target, (ends_at, fault) in list(self._active.items()):
            if ends_at <= now:
                del self._active[target]
                self._note(f"end of: {fault.kind} {target}")
                fault.end()

    def _begin_one(self, now: float) -> None:
        makers = (
            (self._kill, 6),
            (self._stop, 5),
            (self._partition, 3),
            (self._backend_dies, 4),
            (self._backend_stops, 2),
            (self._disk_full, 1),
            (self._clock_steps, 2),
            (self._database_dies, 1),
        )
        maker = self._chance.choices([each for each, _ in makers], [weight for _, weight in makers])[0]
        fault = maker()
        if fault is None or fault.target in self._active or not self._leaves_enough(fault):
            return
        self._active[fault.target] = (now + fault.lasts_s, fault)
        self.counts[fault.kind] += 1
        self._note(f"{fault.kind} {fault.target} for {fault.lasts_s:.1f} s")
        fault.begin()

    def _leaves_enough(self, fault: Fault) -> bool:
        """One process of each role is left alone."""
        member = self._fleet.members.get(fault.target)
        if member is None or member.role == "bus":
            return True
        same = {name for name, each in self._fleet.members.items() if each.role == member.role}
        return len(same - self._active.keys()) > 1

    def _note(self, what: str) -> None:
        self.journal.append((time.monotonic() - self._began, what))

    # Each kind

    def _kill(self) -> Fault:
        member = self._member()
        return Fault(f"{member.role} killed", member.name, member.kill, member.start, self._chance.uniform(0.2, 12))

    def _stop(self) -> Fault:
        member = self._member()
        return Fault(f"{member.role} stopped", member.name, member.stop, member.resume, self._chance.uniform(1, 20))

    def _partition(self) -> Fault:
        name = self._chance.choice(sorted(self._fleet.machines))
        machine = self._fleet.machines[name]
        return Fault(
            "machine cut off",
            name,
            lambda: machine.ip("link", "set", "cable", "down"),
            lambda: machine.ip("link", "set", "cable", "up"),
            self._chance.uniform(2, 40),
        )

    def _backend_dies(self) -> Fault | None:
        return self._of_backend("backend killed", signal.SIGKILL, 0.1)

    def _backend_stops(self) -> Fault | None:
        return self._of_backend("backend stopped", signal.SIGSTOP, self._chance.uniform(1, 15))

    def _of_backend(self, kind: str, number: signal.Signals, lasts_s: float) -> Fault | None:
        found = sorted(pid for pid, _ in backend_processes(self._fleet))
        if not found:
            return None
        pid = self._chance.choice(found)
        return Fault(kind, f"pid {pid}", lambda: _signal(pid, number), lambda: _signal(pid, signal.SIGCONT), lasts_s)

    def _disk_full(self) -> Fault | None:
        if not self._fleet.disks:
            return None
        name, folder = next(iter(self._fleet.disks.items()))
        filler = folder / "filler"
        begin, end = lambda: _fill(filler), lambda: filler.unlink(missing_ok=True)
        return Fault("disk full", f"disk of {name}", begin, end, self._chance.uniform(5, 40))

    def _clock_steps(self) -> Fault | None:
        members = [each for each in self._fleet.members.values() if each.clock is not None]
        if not members:
            return None
        member = self._chance.choice(members)
        step_s = self._chance.choice((-600, -90, -20, 20, 90, 600))
        return Fault(
            f"clock of {member.role} steps",
            f"clock of {member.name}",
            lambda: member.step_clock(step_s),
            lambda: member.step_clock(0),
            self._chance.uniform(10, 60),
        )

    def _database_dies(self) -> Fault:
        postgres = self._fleet.postgres
        return Fault("database killed", "database", postgres.stop, postgres.start, self._chance.uniform(0.5, 15))

    def _member(self) -> Member:
        """Workers are most of a fleet, and most of what dies."""
        names = sorted(self._fleet.members)
        weights = [3 if name.startswith("worker") else 1 for name in names]
        return self._fleet.members[self._chance.choices(names, weights)[0]]


def backend_processes(fleet: ChaosFleet) -> Iterator[tuple[int, str]]:
    """Processes that serve models: pid, and the worker to whose data folder they belong. Their parents (the shims) and
    the workers themselves are not among them."""
    folders = {name: str(fleet.data_of(name).resolve()) for name in fleet.machines}
    own = {each.process.pid for each in fleet.members.values() if each.process is not None}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) in own:
            continue
        with contextlib.suppress(OSError):
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            place = os.readlink(folder / "cwd")
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            if state == "Z" or "shim.py" in line:
                continue
            for name, data in folders.items():
                if place.startswith(f"{data}/backends/"):
                    yield int(folder.name), name


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _fill(filler: Path) -> None:
    with filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            if file.write(b"\0" * FREE_BYTES) < FREE_BYTES:
                return
