"""Sends orders about model files to Corral workers, and translates the replies (docs/reference/wire/staging.md)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec

from corral.bus.api import Bus
from corral.contract.codec import encode
from corral.contract.messages.replicas import ReplicaFile
from corral.contract.messages.staging import (
    CANCEL_STAGE,
    COLLECT_FILES,
    LIST_FILES,
    STAGE_MODEL,
    CancelStage,
    CollectedFiles,
    CollectFiles,
    FilesOnNode,
    ListFiles,
    StageModel,
)
from corral.controller.orders.observations import OrderAccepted, OrderEnded, ReplicaObservation, observe_error
from corral.controller.orders.order import OrderId
from corral.controller.orders.replica_calls import MAX_FILES, KeepList
from corral.controller.settings.backends import BackendSettings
from corral.kit.clock import Clock
from corral.kit.errors import CorralError, Failed, Unreachable
from corral.kit.log import get_log
from corral.kit.retry import retry_unreachable

log = get_log(__name__)
T = TypeVar("T")

MAX_LISTED = 1000  # files in one call: some 200 KB, and a message of the bus holds 512
MAX_PARALLEL = 64  # calls
NO_WORKER = "no worker listens there for such orders: it is away, or older than this controller"


class StageCalls:
    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        settings: BackendSettings,
        *,
        keep_list: KeepList | None = None,
        second_try_s: float = 0.25,
        list_s: float = 5.0,
        collect_s: float = 60.0,
    ) -> None:
        """`keep_list`: for orders with more files than a message holds."""
        self._bus = bus
        self._clock = clock
        self._accept_s = settings.backend_accept_timeout_s
        self._list_s = list_s
        self._keep_list = keep_list
        self._second_try_s = second_try_s
        self._collect_s = collect_s
        self._slots = asyncio.Semaphore(MAX_PARALLEL)

    async def stage(self, node_id: str, order: StageModel) -> ReplicaObservation:
        """Send it. An error of the worker or of the bus becomes an observation."""
        order_id = OrderId(node_id, order.op_id, order.attempt)
        try:
            order = await self._with_file_list(order)
            reply = await self._call(lambda: self._bus.call(STAGE_MODEL, order, timeout_s=self._accept_s, node=node_id))
        except CorralError as error:
            return observe_error(order_id, error)
        return OrderAccepted(order_id) if reply.accepted else OrderEnded(order_id, reply.success, reply.error)

    async def cancel(self, node_id: str, operation_id: str, model: str) -> None:
        """A worker that does not reply ends the transfer with its files in place, which harms nothing."""
        order = CancelStage(op_id=operation_id, model=model)
        try:
            await self._call(lambda: self._bus.call(CANCEL_STAGE, order, timeout_s=self._accept_s, node=node_id))
        except CorralError as error:
            log.info("cancel not delivered", node_id=node_id, operation=operation_id, reason=error.message)

    async def list_files(self, node_id: str, files: Sequence[ReplicaFile]) -> FilesOnNode:
        """Raises what a call raises."""
        parts = [
            await self._list(node_id, files[start : start + MAX_LISTED]) for start in range(0, len(files), MAX_LISTED)
        ]
        have = tuple(size for part in parts for size in part.have_bytes)
        return msgspec.structs.replace(parts[-1], have_bytes=have) if parts else FilesOnNode()

    async def _list(self, node_id: str, files: Sequence[ReplicaFile]) -> FilesOnNode:
        request, timeout_s = ListFiles(files=tuple(files)), self._list_s
        return _without_error(
            await self._call(lambda: self._bus.call(LIST_FILES, request, timeout_s=timeout_s, node=node_id))
        )

    async def collect(self, node_id: str, keep: Sequence[str], *, dry_run: bool) -> CollectedFiles:
        """Raises what a call raises."""
        request = CollectFiles(keep=tuple(keep), dry_run=dry_run)
        return _without_error(
            await self._call(lambda: self._bus.call(COLLECT_FILES, request, timeout_s=self._collect_s, node=node_id))
        )

    async def _call(self, call: Callable[[], Awaitable[T]]) -> T:
        async with self._slots:
            try:
                return await retry_unreachable(call, clock=self._clock, after_s=self._second_try_s)
            except Unreachable as error:
                raise Unreachable(NO_WORKER) from error

    async def _with_file_list(self, order: StageModel) -> StageModel:
        if self._keep_list is None or len(order.files) <= MAX_FILES:
            return order
        return msgspec.structs.replace(order, files=(), file_list=await self._keep_list(encode(order.files)))


Reply = TypeVar("Reply", FilesOnNode, CollectedFiles)


def _without_error(reply: Reply) -> Reply:
    if reply.error:
        raise Failed(reply.error)
    return reply
