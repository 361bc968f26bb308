"""Heartbeats from bus and HTTP, kept in memory and written in batches.

One controller of the queue group hears each beat; the last of a node counts. What cannot be written now is kept and
written with the next batch, so a short outage of the database loses nothing but time, and time is judged by `health`.
A controller that cannot write leaves the queue group until it can: the others would never hear of what it received.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

import msgspec

from corral.bus.api import Bus, Subscription, Tokens
from corral.contract.messages.nodes import HEARTBEAT_QUEUE, NODE_HEARTBEAT, BusHeartbeat, HttpHeartbeat
from corral.controller.registry.sanitize import sanitize_devices, sanitize_text
from corral.kit.clock import Clock
from corral.kit.errors import CorralError, Invalid
from corral.kit.tasks import run_every
from corral.store.engine.transactions import Store
from corral.store.tables import nodes
from corral.store.tables.nodes import Heartbeat

_KEEP = 100_000  # more waiting nodes than this would mean that the database has been away for very long


class Heartbeats:
    name = "heartbeats"

    def __init__(
        self,
        store: Store,
        bus: Bus,
        clock: Clock,
        *,
        flush_s: float,
        on_recorded: Callable[[datetime], None],
        on_not_recorded: Callable[[], None],
        on_return: Callable[[], None],
        on_heartbeat: Callable[[str, BusHeartbeat], None] | None = None,
    ) -> None:
        """`on_recorded` (with the database's time) and `on_not_recorded` tell the health monitor whether
        heartbeats can be written; `on_return` that a node which was away sent one: it need not wait for a round;
        `on_heartbeat` receives every heartbeat of the bus, for its inventory."""
        self._store = store
        self._bus = bus
        self._clock = clock
        self._flush_s = flush_s
        self._recorded = on_recorded
        self._not_recorded = on_not_recorded
        self._on_return = on_return
        self._on_heartbeat = on_heartbeat
        self._waiting: dict[str, Heartbeat] = {}
        self._subscription: Subscription | None = None
        self.received = 0

    def receive_http(self, node_id: str, beat: HttpHeartbeat) -> None:
        self._keep(
            Heartbeat(
                node_id=node_id,
                boot_id=sanitize_text(beat.boot_id),
                available_vram=beat.available_vram,
                total_vram=beat.total_vram,
                available_ram=beat.available_ram,
                available_disk=beat.available_disk,
                total_disk=beat.total_disk,
                gpu_vendor=sanitize_text(beat.gpu_vendor),
                bus_down=beat.bus == "down" if beat.bus is not None else None,
            )
        )

    def forget(self, node_id: str) -> None:
        """The node said goodbye: a beat still waiting must not be stamped after that."""
        self._waiting.pop(node_id, None)

    async def run(self) -> None:
        await self._hear()
        await run_every("heartbeats", self._flush_s, self.flush, clock=self._clock, max_wait_s=self._flush_s)

    async def flush(self) -> None:
        """Write what waits; with nothing waiting, still find out whether we could."""
        batch, self._waiting = self._waiting, {}
        try:
            async with self._store.write() as tx:
                away = await nodes.record_heartbeats(tx, list(batch.values())) if batch else 0
                at = await tx.now()
        except Exception as error:
            self._not_recorded()
            if isinstance(error, CorralError):
                # What the database will never take must not come again: then the pulse counts without the numbers.
                refused = isinstance(error, Invalid)
                # By the time it is written, another worker may run there, and have reported to another controller.
                kept = {
                    id: Heartbeat(node_id=id) if refused else msgspec.structs.replace(beat, boot_id=None)
                    for id, beat in batch.items()
                }
                self._waiting = kept | self._waiting
            await self._stop_hearing()
            raise
        await self._hear()
        self._recorded(at)
        if away:
            self._on_return()

    async def _hear(self) -> None:
        if self._subscription is None:
            self._subscription = await self._bus.subscribe(
                NODE_HEARTBEAT, self._on_bus_heartbeat, queue=HEARTBEAT_QUEUE
            )

    async def _stop_hearing(self) -> None:
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            await subscription.unsubscribe()

    async def _on_bus_heartbeat(self, beat: BusHeartbeat, tokens: Tokens) -> None:
        if self._on_heartbeat is not None:
            self._on_heartbeat(tokens["node"], beat)
        self._keep(
            Heartbeat(
                node_id=tokens["node"],
                boot_id=sanitize_text(beat.boot_id),
                available_vram=beat.available_vram,
                total_vram=beat.total_vram,
                available_ram=beat.available_ram,
                total_ram=beat.total_ram,
                available_disk=beat.available_disk,
                total_disk=beat.total_disk,
                gpu_vendor=sanitize_text(beat.gpu_vendor),
                devices=sanitize_devices(beat.devices) if beat.devices is not None else None,
                bus_down=False,
            )
        )

    def _keep(self, beat: Heartbeat) -> None:
        self.received += 1
        if len(self._waiting) < _KEEP or beat.node_id in self._waiting:
            self._waiting[beat.node_id] = beat
