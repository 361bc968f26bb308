"""The parts that install backends, put together: what `main.py` starts and the API's doors use."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from corral.bus.api import Bus
from corral.controller.backends.catalogue import Catalogue
from corral.controller.backends.reconcile import ReconcileIntervals, Reconciler
from corral.controller.backends.upgrades import UpgradeCheck
from corral.controller.inventory.collector import InventoryCollector
from corral.controller.inventory.verify import BackendVerifier
from corral.controller.operations.accept import AcceptedOperation, OperationAcceptor
from corral.controller.operations.backend_views import BackendViews
from corral.controller.operations.progress import ProgressCollector, record_steps
from corral.controller.operations.requests import OperationKind, RequestResolver, parse_request
from corral.controller.operations.service import Operations
from corral.controller.orders.backend_calls import BackendCalls, CallLimits, CallTimeouts
from corral.controller.registry.changes import NodeChanges
from corral.controller.runtime.change_feed import ChangeFeed
from corral.controller.runtime.leadership import Leadership
from corral.kit.clock import Clock
from corral.store.engine.transactions import Store
from corral.store.records import BackendRequest, Scope, ScopeKind


@dataclass(frozen=True)
class BackendOptions:
    times: CallTimeouts = field(default_factory=CallTimeouts)
    pace: ReconcileIntervals = field(default_factory=ReconcileIntervals)
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
            record_steps=record_steps,
            pace=options.pace,
            limits=options.limits,
        )
        self.inventories = InventoryCollector(
            store,
            calls,
            leadership,
            feed,
            clock,
            on_unreachable=changes.mark_unreachable,
            flush_s=options.inventory_flush_s,
            read_every_s=options.ask_inventory_every_s,
            poll_s=options.look_for_silent_every_s,
        )
        self.progress = ProgressCollector(
            store,
            bus,
            leadership,
            feed,
            clock,
            publish_s=options.progress_tell_s,
            write_s=options.progress_write_s,
        )
        self.resolver = RequestResolver(store, catalogue, self.reconciler.targets, budget_s=options.accept_budget_s)
        self.acceptor = OperationAcceptor(store, self.resolver, feed)
        self.operations = Operations(store, self.acceptor, self.progress, feed, clock)
        self.upgrades = UpgradeCheck(
            store,
            catalogue,
            leadership,
            feed,
            clock,
            interval_s=options.upgrade_check_every_s,
            rest_s=options.upgrade_check_rest_s,
            poll_s=options.upgrade_check_look_s,
            upgrade=self.upgrade_everywhere if options.auto_upgrade else None,
        )
        self.installed = BackendViews(store, self.upgrades)
        self.integrity = BackendVerifier(store, calls)
        changes.on_change(self.inventories.wake.set)

    @property
    def parts(self) -> tuple[Any, ...]:
        """Each has a name and a `run`."""
        return self.reconciler, self.inventories, self.progress, self.upgrades

    async def upgrade_everywhere(self, backend: str, by: str = "") -> AcceptedOperation:
        scope = Scope(ScopeKind.ALL)
        request = parse_request(OperationKind.UPGRADE, BackendRequest(backend), scope=scope, by=by)
        return await self.operations.accept(request)
