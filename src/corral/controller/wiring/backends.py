"""The parts that install backends, put together: what `main.py` starts and the API's doors use."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from corral.bus.api import Bus
from corral.controller.backends.catalogue import Catalogue
from corral.controller.backends.reconcile import Pace, Reconciler
from corral.controller.backends.upgrades import UpgradeCheck
from corral.controller.inventory.collector import Inventories
from corral.controller.operations.accepting import Accepted, Accepting
from corral.controller.operations.bookkeeping import keep_rows
from corral.controller.operations.installed import InstalledBackends
from corral.controller.operations.integrity import Integrity
from corral.controller.operations.live import Progress
from corral.controller.operations.prepare import Preparing
from corral.controller.operations.requests import OperationKind, make_wish
from corral.controller.operations.service import Operations
from corral.controller.orders.backend_calls import BackendCalls, CallTimes
from corral.controller.orders.dispatch import CallLimits
from corral.controller.registry.changes import NodeChanges
from corral.controller.runtime.change_feed import ChangeFeed
from corral.controller.runtime.leadership import Leadership
from corral.kit.clock import Clock
from corral.store.engine.transactions import Store
from corral.store.records import BackendRequest, Scope, ScopeKind


@dataclass(frozen=True)
class BackendOptions:
    times: CallTimes = field(default_factory=CallTimes)
    pace: Pace = field(default_factory=Pace)
    limits: CallLimits = field(default_factory=CallLimits)
    inventory_flush_s: float = 1.0
    ask_inventory_every_s: float = 60.0
    look_for_silent_every_s: float = 5.0
    progress_tell_s: float = 0.25
    progress_write_s: float = 1.0
    accept_budget_s: float = 5.0
    upgrade_check_every_s: float = 6 * 3600.0
    upgrade_check_rest_s: float = 10.0
    upgrade_check_look_s: float = 60.0
    auto_upgrade: bool = False


class Backends:
    def __init__(
        self,
        store: Store,
        bus: Bus,
        catalogue: Catalogue,
        leadership: Leadership,
        changes: NodeChanges,
        feed: ChangeFeed,
        clock: Clock,
        options: BackendOptions,
    ) -> None:
        calls = BackendCalls(
            bus, clock, options.times, aliases=catalogue.aliases, galleries_with=catalogue.galleries_with
        )
        self.catalogue = catalogue
        self.reconciler = Reconciler(
            store,
            bus,
            calls,
            catalogue,
            leadership,
            changes,
            feed,
            clock,
            record_steps=keep_rows,
            pace=options.pace,
            limits=options.limits,
        )
        self.inventories = Inventories(
            store,
            calls,
            leadership,
            feed,
            clock,
            on_unreachable=changes.mark_unreachable,
            flush_s=options.inventory_flush_s,
            ask_every_s=options.ask_inventory_every_s,
            look_every_s=options.look_for_silent_every_s,
        )
        self.progress = Progress(
            store,
            bus,
            leadership,
            feed,
            clock,
            tell_s=options.progress_tell_s,
            write_s=options.progress_write_s,
        )
        self.preparing = Preparing(store, catalogue, self.reconciler.targets, budget_s=options.accept_budget_s)
        self.accepting = Accepting(store, self.preparing, feed)
        self.operations = Operations(store, self.accepting, self.progress, feed, clock)
        self.upgrades = UpgradeCheck(
            store,
            catalogue,
            leadership,
            feed,
            clock,
            interval_s=options.upgrade_check_every_s,
            rest_s=options.upgrade_check_rest_s,
            look_s=options.upgrade_check_look_s,
            upgrade=self.upgrade_everywhere if options.auto_upgrade else None,
        )
        self.installed = InstalledBackends(store, self.upgrades)
        self.integrity = Integrity(store, calls)
        changes.on_change(self.inventories.wake.set)

    @property
    def parts(self) -> tuple[Any, ...]:
        """Each has a name and a `run`."""
        return self.reconciler, self.inventories, self.progress, self.upgrades

    async def upgrade_everywhere(self, backend: str, by: str = "") -> Accepted:
        scope = Scope(ScopeKind.ALL)
        wish = make_wish(OperationKind.UPGRADE, BackendRequest(backend), scope=scope, by=by)
        return await self.operations.accept(wish)
