"""What every subsystem of the controller uses: database, bus, change feed, leadership, clock."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Protocol

from corral.bus.api import Bus
from corral.bus.nats import NatsBus
from corral.controller.registry.changes import NodeChanges
from corral.controller.runtime.change_feed import ChangeFeed
from corral.controller.runtime.database import open_store_when_there
from corral.controller.runtime.leadership import Leadership
from corral.controller.runtime.presence import hold_instance_id
from corral.controller.settings import ControllerSettings
from corral.controller.wiring.bus import BusSetup, set_up_bus
from corral.kit.clock import Clock
from corral.kit.files import make_folder
from corral.store.engine.transactions import Store


class Part(Protocol):
    """A loop of the controller: `main.py` runs each as a task with this name."""

    @property
    def name(self) -> str: ...
    async def run(self) -> None: ...


@contextlib.asynccontextmanager
async def run_parts(parts: Iterable[Part]) -> AsyncIterator[None]:
    """Runs the loops as long as the block. The first to fail ends the block and the other loops."""
    async with asyncio.TaskGroup() as tasks:
        loops = [tasks.create_task(part.run(), name=part.name) for part in parts]
        yield
        for loop in loops:
            loop.cancel()


@dataclass(frozen=True)
class Runtime:
    instance: str
    store: Store
    bus: Bus
    bus_setup: BusSetup
    feed: ChangeFeed
    changes: NodeChanges
    leadership: Leadership
    clock: Clock


@contextlib.asynccontextmanager
async def open_runtime(
    settings: ControllerSettings, clock: Clock, stopped: asyncio.Event
) -> AsyncIterator[Runtime | None]:
    """None if the controller is stopped before the database can be opened."""
    make_folder(settings.data)
    bus_setup = set_up_bus(settings, clock)
    async with contextlib.AsyncExitStack() as opened:
        instance = settings.instance_id or opened.enter_context(hold_instance_id(settings.data.expanduser()))
        store = await opened.enter_async_context(open_store_when_there(settings.store_url(), stopped))
        if store is None:
            yield None
            return
        bus = await opened.enter_async_context(
            NatsBus(bus_setup.urls, bus_setup.credentials, tls=bus_setup.tls, inbox_prefix=bus_setup.inbox, clock=clock)
        )
        feed = ChangeFeed(store, bus, clock, interval_s=settings.runtime.watch_interval_s)
        # Unlike the instance id, the name of a lease holder is new with every start.
        holder = f"{instance}/{uuid.uuid4().hex[:8]}"
        leadership = Leadership(store, holder, ttl_s=settings.runtime.lease_ttl_s)
        yield Runtime(instance, store, bus, bus_setup, feed, NodeChanges(store, feed), leadership, clock)
