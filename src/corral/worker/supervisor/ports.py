"""Which port the next process gets (docs/reference/wire/processes.md#ports). Pure: the time and the look at the machine
are handed in.

A released port rests, because a client may still send to the process that had it. Then it stays reserved for its key
for a while: an address that a client remembers leads to the same model or to no process, never to another model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from corral.kit.errors import CorralError
from corral.worker.settings.processes import PortRange


class NoFreePort(CorralError):
    code = "no_free_port"


@dataclass(frozen=True)
class Taken:
    port: int
    stolen_from: str = ""  # clients may still know an address of that key


@dataclass
class _Rest:
    """A released port: no process gets it before `free_at`, and only `key` before `claimed_until`."""

    key: str
    free_at: float
    claimed_until: float


@dataclass
class PortAllocator:
    ports: PortRange
    quarantine_s: float = 15.0
    affinity_s: float = 300.0
    _held: dict[int, str] = field(default_factory=dict)
    _resting: dict[int, _Rest] = field(default_factory=dict)  # in the order of release
    _grown: Iterator[int] | None = None

    def take(self, key: str, now: float, usable: Callable[[int], bool]) -> Taken:
        """Allocate a port for this key. `usable` checks the machine: a port that another program uses rests for a
        while."""
        for port, owner in self._candidates(key, now):
            if not usable(port):
                self._rest(port, "", now)
                continue
            self._resting.pop(port, None)
            self._held[port] = key
            return Taken(port, owner if owner != key else "")
        raise NoFreePort(
            f"no free gRPC port in range: {self.ports.first}-{self.ports.last}, "
            f"{len(self._held)} in use, {len(self._resting)} resting"
        )

    def hold(self, port: int, key: str) -> None:
        """Mark the port of an adopted process as in use."""
        self._resting.pop(port, None)
        self._held[port] = key

    def release(self, port: int, now: float) -> None:
        key = self._held.pop(port, None)
        if key is not None:
            self._rest(port, key, now)

    def change_range(self, ports: PortRange) -> None:
        """Use another range from now on; ports in use stay in use."""
        if ports != self.ports:
            self.ports = ports
            self._resting.clear()
            self._grown = None

    def _rest(self, port: int, key: str, now: float) -> None:
        self._resting.pop(port, None)  # so that it goes to the end
        claimed_until = now + self.affinity_s if key else now
        self._resting[port] = _Rest(key, now + self.quarantine_s, claimed_until)

    def _candidates(self, key: str, now: float) -> Iterator[tuple[int, str]]:
        """Ports in the order to try, each with the key it is reserved for, if any."""
        rested = [(port, rest) for port, rest in reversed(self._resting.items()) if rest.free_at <= now]
        yield from ((port, key) for port, rest in rested if rest.key == key and now < rest.claimed_until)
        yield from ((port, "") for port, rest in rested if now >= rest.claimed_until)
        yield from ((port, "") for port in self._grow())
        others = [(port, rest) for port, rest in rested if rest.key != key and now < rest.claimed_until]
        yield from ((port, rest.key) for port, rest in reversed(others))  # the oldest claim is the least remembered

    def _grow(self) -> Iterator[int]:
        if self._grown is None:
            self._grown = iter(self.ports)
        for port in self._grown:
            if port not in self._held and port not in self._resting:
                yield port
