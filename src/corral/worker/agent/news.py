"""What heartbeats tell of backends, orders and processes: when something changed, and now and then all the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from corral.contract.codec import encode
from corral.contract.messages.backends import NodeBackend, OrderReport
from corral.contract.messages.replicas import ReplicaProcess
from corral.kit.tasks import Wake
from corral.worker.installer.installer import Installer

EVERY = 3  # each so many-th heartbeat tells everything, for a controller that missed the last


@dataclass(frozen=True)
class Told:
    """One heartbeat's part. `inventory` None: as told before."""

    inventory: tuple[NodeBackend, ...] | None
    inventory_seq: int
    orders: tuple[OrderReport, ...] | None
    processes: tuple[ReplicaProcess, ...] | None


class News:
    """`wake` is set by whoever changes something: a heartbeat then does not wait for its time."""

    def __init__(
        self,
        installer: Installer,
        orders: Callable[[], tuple[OrderReport, ...]],
        processes: Callable[[], tuple[ReplicaProcess, ...]],
        wake: Wake,
    ) -> None:
        self.wake = wake
        self._installer = installer
        self._orders = orders
        self._processes = processes
        self._last: tuple[int, bytes] | None = None
        self._beats = 0

    async def gather(self) -> tuple[Told, Callable[[], None]]:
        """What to tell now, and what to call once it was told: what was not is told the next time."""
        seq = self._installer.sequence  # before the look: what changes meanwhile makes a later one
        orders, processes = self._orders(), self._processes()
        now = (seq, encode([orders, processes]))
        whole = now != self._last or self._beats % EVERY == 0
        told = Told(None, seq, None, None)
        if whole:
            told = Told(await self._installer.list_backends(), seq, orders, processes)

        def was_told() -> None:
            self._beats += 1
            if whole:
                self._last = now

        return told, was_told

    def start_over(self) -> None:
        """Somebody else listens now."""
        self._last = None
