"""Sends orders about releases to workers (docs/reference/wire/releases.md)."""

from __future__ import annotations

import asyncio

from corral.bus.api import Bus
from corral.contract.messages.releases import (
    CANCEL_UPGRADE,
    UPGRADE_WORKER,
    CancelUpgrade,
    UpgradeWorker,
    UpgradeWorkerReply,
)
from corral.kit.errors import CorralError
from corral.kit.log import get_log

log = get_log(__name__)
MAX_PARALLEL = 64  # calls


class ReleaseCalls:
    def __init__(self, bus: Bus, *, timeout_s: float) -> None:
        self._bus = bus
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(MAX_PARALLEL)

    async def upgrade(self, node_id: str, order: UpgradeWorker) -> UpgradeWorkerReply:
        """Raises what a call raises."""
        async with self._slots:
            return await self._bus.call(UPGRADE_WORKER, order, timeout_s=self._timeout_s, node=node_id)

    async def cancel(self, node_id: str, operation_id: str) -> None:
        """A worker that does not reply goes on, and says so at the next order."""
        try:
            order = CancelUpgrade(op_id=operation_id)
            await self._bus.call(CANCEL_UPGRADE, order, timeout_s=self._timeout_s, node=node_id)
        except CorralError as error:
            log.info("cancel not delivered", node_id=node_id, operation=operation_id, reason=error.message)
