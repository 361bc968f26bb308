"""Collects what a heartbeat reports of backends, orders and processes: after a change, and in every third heartbeat."""

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
FULL_REPORT_EVERY = 3  # heartbeats, for a controller that missed the last report
READ_TIMEOUT_S = 1.0


@dataclass(frozen=True)
class HeartbeatReport:
    """Part of one heartbeat. `inventory` None: unchanged since the last report."""

    inventory: tuple[NodeBackend, ...] | None
    inventory_seq: int
    orders: tuple[OrderReport, ...] | None
    processes: tuple[ReplicaProcess, ...] | None


class HeartbeatReporter:
    """`wake` is set after each change: the next heartbeat is then sent at once."""

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
        self._listing: asyncio.Task[tuple[int, tuple[NodeBackend, ...]]] | None = None

    async def collect(self) -> tuple[HeartbeatReport, Callable[[], None]]:
        """The report, and a function to call once it was sent: a report that was not sent is made again."""
        orders, processes = self._orders(), self._processes()
        encoded = encode([orders, processes])
        if (self._installer.sequence, encoded) == self._last and self._beats % FULL_REPORT_EVERY:
            return HeartbeatReport(None, self._installer.sequence, None, None), self._count
        listed = await self._list_backends()
        if listed is None:
            return HeartbeatReport(None, 0, None, processes), self._count
        seq, inventory = listed

        def on_sent() -> None:
            self._count()
            self._last = (seq, encoded)

        return HeartbeatReport(inventory, seq, orders, processes), on_sent

    def start_session(self) -> None:
        """A new session begins: the next report is a full one."""
        self._last = None

    def _count(self) -> None:
        self._beats += 1

    async def _list_backends(self) -> tuple[int, tuple[NodeBackend, ...]] | None:
        """None when the disk is slow or fails: a heartbeat does not wait for it. A list that is read late is reported
        then."""
        if self._listing is None:
            self._listing = asyncio.get_running_loop().create_task(self._read())
        await asyncio.wait((self._listing,), timeout=READ_TIMEOUT_S)
        if not self._listing.done():
            self._listing.add_done_callback(lambda _: self.wake.set())
            return None
        listing, self._listing = self._listing, None
        try:
            return listing.result()
        except Exception:
            log.exception("installed backends cannot be listed")
            return None

    async def _read(self) -> tuple[int, tuple[NodeBackend, ...]]:
        seq = self._installer.sequence  # read before the list: a change in the meantime gets a later number
        return seq, await self._installer.list_backends()

    async def close(self) -> None:
        if self._listing is not None:
            self._listing.cancel()
            await asyncio.gather(self._listing, return_exceptions=True)
