"""A simulated controller: the real parts on one process's view of the store and the bus, that may end at any step."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime
from random import Random
from typing import Any, Protocol, cast

from corral.blobs.store import BlobStore
from corral.bus.local import LocalBus
from corral.controller.access.release_keys import ReleaseKeys
from corral.controller.backends.catalogue import Catalogue
from corral.controller.health.classify import Guard
from corral.controller.health.monitor import HealthMonitor
from corral.controller.health.observation_window import ObservationWindow
from corral.controller.registry.changes import NodeChanges
from corral.controller.registry.heartbeats import Heartbeats
from corral.controller.releases.calls import ReleaseCalls
from corral.controller.releases.upgrades import CorralUpgrades, UpgradePace
from corral.controller.replicas.reconcile import LEASE, ReplicaPace
from corral.controller.runtime.change_feed import ChangeFeed
from corral.controller.runtime.leadership import Leadership
from corral.controller.runtime.presence import Presence
from corral.controller.scheduler.world import Policy
from corral.controller.settings.backends import BackendSettings
from corral.controller.settings.models import ReplicaSettings
from corral.controller.wiring.backends import BackendPace, Backends
from corral.controller.wiring.replicas import ReplicaDependencies, Replicas
from corral.kit.clock import Clock
from corral.kit.errors import OutcomeUnknown, Unavailable
from corral.kit.settings import Seconds
from corral.store.engine.inline_sqlite import StepHook, TransactionStep
from corral.store.engine.transactions import Store
from corral.store.tables.nodes import Heartbeat
from tests.simulation.catalogue import SimulatedFiles, SimulatedModels, SimulatedPackages
from tests.simulation.census import Census
from tests.simulation.processes import LOAD_AGAIN_S

GUARD = Guard(40, 3)
STALE_AFTER_S = 60.0
_LEASE_S = 30.0
# Loops that look rarely make a run quick; what matters is their order, and hints and heartbeats wake them anyway.
BACKENDS = BackendSettings(
    backend_install_timeout_s=Seconds(60),
    backend_upgrade_timeout_s=Seconds(60),
    backend_delete_timeout_s=Seconds(30),
    backend_list_timeout_s=Seconds(10),
    progress_interval_s=Seconds(5),
    progress_write_interval_s=Seconds(3),
    upgrade_check_interval_s=Seconds(600),
)
PACE = BackendPace(renew_s=14.0, inventory_flush_s=6.0, silent_poll_s=30.0, upgrade_rest_s=60.0, rest_s=0.1)


UPGRADE_PACE = UpgradePace(interval_s=20.0, poll_s=6.0, silent_s=120.0)
REPLICAS = ReplicaSettings(replica_interval_s=Seconds(30))
REPLICA_PACE = ReplicaPace(
    busy_interval_s=6.0,
    rest_s=1.5,
    orphan_interval_s=60.0,
    policy=Policy(down_after_s=60.0),
    fresh_s=3.5 * LOAD_AGAIN_S,
    usage_interval_s=300.0,
)


class WatchedHeartbeats(Heartbeats):
    """Once a flush has succeeded, whatever was heard before it is on file, also what an earlier one failed to write."""

    def __init__(self, around: Surroundings, *words: Any, **known: Any) -> None:
        super().__init__(*words, **known)
        self._around = around
        self._received_at: dict[str, datetime] = {}

    def _keep(self, beat: Heartbeat) -> None:
        super()._keep(beat)
        self._received_at[beat.node_id] = self._around.clock.now()

    async def flush(self) -> None:
        due, self._received_at = self._received_at, {}
        try:
            await super().flush()
        except BaseException:
            self._received_at = due | self._received_at
            raise
        on_file = self._around.last_heartbeats() if due else {}
        for node_id, at in due.items():
            last = on_file.get(node_id, at)  # else it was deleted
            if last is None or last < at:
                self._around.failed(f"the heartbeat of {node_id} from {at:%H:%M:%S} is not on file after a flush")


class Died(Exception):
    """The controller a person was talking to is gone: nobody knows whether it was heard."""


class StoreLuck:
    """What may come between two steps of any transaction."""

    def __init__(self, chance: Random) -> None:
        self.chance = chance
        self.away = False  # the database, for everybody
        self.waits = 0.3  # chance that others come first
        self.fails = 0.0  # chance of a step to fail
        self.dies = 0.0  # chance of the process to end
        self.doubt = ""  # the next commit that writes this table is done, and its writer never hears that it was
        self.in_doubt = False


class Surroundings(Protocol):
    """What a controller needs of the simulation."""

    store_luck: StoreLuck

    @property
    def clock(self) -> Clock: ...

    def last_heartbeats(self) -> dict[str, datetime | None]: ...

    @property
    def catalogue(self) -> Catalogue: ...

    @property
    def files(self) -> SimulatedFiles: ...

    @property
    def packages(self) -> SimulatedPackages: ...

    @property
    def releases(self) -> object | None:
        """None: nobody upgrades Corral in this run."""

    def clock_of(self, name: str) -> Clock: ...

    def join_bus(self, name: str) -> LocalBus: ...

    def open_store(self, between: StepHook) -> Store: ...

    @property
    def census(self) -> Census: ...

    def note(self, *what: object) -> None: ...

    def failed(self, why: str) -> None: ...

    def controller_dies(self, controller: Controller) -> None: ...


class Controller:
    """One life of one controller."""

    def __init__(self, around: Surroundings, name: str, life: int) -> None:
        self.name = name
        self.alive = True
        self.store_away = False  # for this controller only
        self._around = around
        self._gone = asyncio.Event()
        clock = around.clock_of(name)
        self.bus = around.join_bus(f"{name}-{life}")
        self.store = store = around.open_store(self._between)
        self.feed = ChangeFeed(store, self.bus, clock, interval_s=15.0)
        self.changes = NodeChanges(store, self.feed)
        leadership = Leadership(store, f"{name}/{life}", ttl_s=_LEASE_S)
        self.backends = Backends(
            store, self.bus, around.catalogue, leadership, self.changes, self.feed, clock, BACKENDS, PACE
        )
        dependencies = ReplicaDependencies(
            SimulatedModels(store), around.files, around.catalogue, self.backends.acceptor, self.changes
        )
        self.replicas = Replicas(store, self.bus, leadership, self.feed, clock, dependencies, REPLICAS, REPLICA_PACE)
        listening = ObservationWindow(self.bus, clock, longest_gap_s=STALE_AFTER_S / 2)
        self.health = HealthMonitor(
            store,
            self.changes,
            listening,
            leadership,
            clock,
            interval_s=15.0,
            stale_after_s=STALE_AFTER_S,
            guard=GUARD,
            live_for_s=_LEASE_S,
        )
        self.heartbeats = WatchedHeartbeats(
            around,
            store,
            self.bus,
            clock,
            flush_s=9.0,
            on_recorded=listening.recorded,
            on_not_recorded=listening.not_recorded,
            on_return=self.health.wake.set,
            on_heartbeat=self.backends.inventories.on_heartbeat,
        )
        self.upgrades = CorralUpgrades(
            store,
            ReleaseKeys(store, clock),  # only a soak would need it
            ReleaseCalls(self.bus, timeout_s=10.0),
            around.packages,
            cast(BlobStore, around.packages),
            around.files,
            leadership,
            self.feed,
            clock,
            BACKENDS,
            lease=LEASE,
            pace=UPGRADE_PACE,
        )
        presence = Presence(store, f"{name}", clock, interval_s=_LEASE_S / 2)
        parts: tuple[Any, ...] = (
            self.feed,
            self.heartbeats,
            self.health,
            presence,
            *self.backends.parts,
            *self.replicas.parts,
        )
        if around.releases is not None:
            parts = (*parts, self.upgrades)
        self._tasks = [asyncio.get_running_loop().create_task(self._part(part)) for part in parts]

    async def asked(self, work: Callable[[], Awaitable[Any]]) -> Any:
        """Somebody's request, over HTTP. Raises Died when the answer will never come."""
        if not self.alive:
            raise Died
        task = asyncio.ensure_future(work())
        gone = asyncio.ensure_future(self._gone.wait())
        try:
            await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Died
            return task.result()
        finally:
            task.cancel()
            gone.cancel()

    def end(self) -> None:
        """As kill -9 ends it: from here on nothing it does reaches anybody."""
        self.alive = False
        self._gone.set()
        self.bus.frozen = True

    async def bury(self) -> None:
        """What is left of it in memory goes."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.bus.close()

    async def _part(self, part: Any) -> None:
        try:
            await part.run()
        except Exception as error:
            self._around.failed(f"{self.name}: {part.name} ended with {error!r}")
            raise
        self._around.failed(f"{self.name}: {part.name} ended by itself")

    async def _between(self, step: TransactionStep) -> None:
        luck = self._around.store_luck
        roll = luck.chance.random()
        if roll < luck.dies and self.alive:
            self._around.note(self.name, "dies at", step)
            self._around.controller_dies(self)
        if not self.alive:
            await asyncio.Event().wait()  # nothing comes after this
        if step is TransactionStep.STATEMENT:
            return
        if roll < luck.waits:
            await asyncio.sleep(luck.chance.choice((0.0, 0.0, 0.001, 0.05)))
            if not self.alive:
                await asyncio.Event().wait()
        if step is TransactionStep.COMMITTED and luck.in_doubt:
            luck.in_doubt = False
            self._raise(step, "the connection to the database broke")
        if luck.away or self.store_away:
            self._raise(step, "the database is away")
        if luck.chance.random() < luck.fails:
            self._raise(step, "the connection to the database broke")

    def _raise(self, step: TransactionStep, why: str) -> None:
        self._around.census.faults["transaction failed"] += 1
        if step is TransactionStep.COMMITTED:
            raise OutcomeUnknown(f"{why} while committing")
        raise Unavailable(why)
