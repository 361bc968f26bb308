"""What heartbeats tell of backends, orders and processes: when something changed, and now and then all the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from corral.contract.codec import encode
from corral.contract.messages.backends import NodeBackend, OrderReport
from corral.contract.messages.replicas import ReplicaProcess
from corral.kit.log import get_log
from corral.kit.tasks import Wake
from corral.worker.installer.installer import Installer

log = get_log(__name__)
EVERY = 3  # each so many-th heartbeat tells everything, for a controller that missed the last
PATIENCE_S = 1.0


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
        self._looking: asyncio.Task[tuple[int, tuple[NodeBackend, ...]]] | None = None

    async def gather(self) -> tuple[Told, Callable[[], None]]:
        """What to tell now, and what to call once it was told: what was not is told the next time."""
        orders, processes = self._orders(), self._processes()
        said = encode([orders, processes])
        if (self._installer.sequence, said) == self._last and self._beats % EVERY:
            return Told(None, self._installer.sequence, None, None), self._count
        looked = await self._look()
        if looked is None:
            return Told(None, 0, None, processes), self._count
        seq, inventory = looked

        def was_told() -> None:
            self._count()
            self._last = (seq, said)

        return Told(inventory, seq, orders, processes), was_told

    def start_over(self) -> None:
        """Somebody else listens now."""
        self._last = None

    def _count(self) -> None:
        self._beats += 1

    async def _look(self) -> tuple[int, tuple[NodeBackend, ...]] | None:
        """None when the disk takes its time, or fails: a heartbeat waits for nobody. What is read late is told then."""
        if self._looking is None:
            self._looking = asyncio.get_running_loop().create_task(self._read())
        await asyncio.wait((self._looking,), timeout=PATIENCE_S)
        if not self._looking.done():
            self._looking.add_done_callback(lambda _: self.wake.set())
            return None
        looking, self._looking = self._looking, None
        try:
            return looking.result()
        except Exception:
            log.exception("what is installed cannot be told")
            return None

    async def _read(self) -> tuple[int, tuple[NodeBackend, ...]]:
        seq = self._installer.sequence  # before the look: what changes meanwhile makes a later one
        return seq, await self._installer.list_backends()

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
