"""Assembles the parts that install backends, for `main.py` and the handlers of the API."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from corral.blobs.oci.registry import RegistrySettings
from corral.bus.api import Bus
from corral.controller.backends.catalogue import Catalogue
from corral.controller.backends.galleries import gallery_folder
from corral.controller.backends.reconcile import Reconciler
from corral.controller.backends.upgrades import UpgradeCheck
from corral.controller.inventory.collector import InventoryCollector
from corral.controller.inventory.verify import BackendVerifier
from corral.controller.operations.accept import AcceptedOperation, OperationAcceptor
from corral.controller.operations.backend_views import BackendViews
from corral.controller.operations.progress import ProgressCollector, record_steps
from corral.controller.operations.requests import OperationKind, RequestResolver, parse_request
from corral.controller.operations.revert import revert_rollout
from corral.controller.operations.rollouts import Rollouts
from corral.controller.operations.service import Operations
from corral.controller.orders.backend_calls import BackendCalls, CallLimits
from corral.controller.registry.changes import NodeChanges
from corral.controller.runtime.change_feed import ChangeFeed
from corral.controller.runtime.leadership import Leadership
from corral.controller.settings import ControllerSettings
from corral.controller.settings.backends import BackendSettings
from corral.gallery.backends.factory import GalleryOptions
from corral.gallery.galleries import parse_galleries
from corral.gallery.index_cache import LibraryOptions
from corral.kit.clock import Clock
from corral.store.engine.transactions import Store
from corral.store.records import BackendRequest, Scope, ScopeKind


@dataclass(frozen=True)
class BackendPace:
    """Intervals and limits that depend on other settings, or that are none."""

    renew_s: float = 5.0  # between two renewals of the lease
    inventory_flush_s: float = 1.0
    silent_poll_s: float = 5.0  # at most, between two searches for nodes that do not report
    upgrade_rest_s: float = 10.0  # at most, between two checks for upgrades
    upgrade_poll_s: float = 60.0
    rest_s: float = 0.05  # after a pass of the reconciler
    second_try_s: float = 0.25  # after a call that no worker listened to
    limits: CallLimits = field(default_factory=CallLimits)

    @classmethod
    def of(cls, settings: ControllerSettings) -> BackendPace:
        return cls(renew_s=settings.runtime.lease_ttl_s / 3, inventory_flush_s=settings.health.heartbeat_flush_s)


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
        settings: BackendSettings,
        pace: BackendPace,
    ) -> None:
        calls = BackendCalls(
            bus,
            clock,
            settings,
            aliases=catalogue.aliases,
            galleries_with=catalogue.galleries_with,
            second_try_s=pace.second_try_s,
        )
        self.catalogue = catalogue
        self.progress = ProgressCollector(
            store,
            bus,
            leadership,
            feed,
            clock,
            publish_s=settings.progress_interval_s,
            write_s=settings.progress_write_interval_s,
        )
        self.reconciler = Reconciler(
            store,
            bus,
            calls,
            catalogue,
            leadership,
            changes,
            feed,
            clock,
            settings,
            record_steps=partial(record_steps, merge=self.progress.merge),
            revert_rollout=revert_rollout,
            renew_s=pace.renew_s,
            rest_s=pace.rest_s,
            limits=pace.limits,
        )
        self.inventories = InventoryCollector(
            store,
            calls,
            leadership,
            feed,
            clock,
            on_unreachable=changes.mark_unreachable,
            flush_s=pace.inventory_flush_s,
            read_every_s=settings.inventory_interval_s,
            poll_s=min(pace.silent_poll_s, settings.inventory_interval_s),
        )
        self.resolver = RequestResolver(store, catalogue, self.reconciler.targets, budget_s=settings.accept_budget_s)
        self.acceptor = OperationAcceptor(store, self.resolver, feed)
        self.operations = Operations(store, self.acceptor, self.progress, feed, clock)
        self.rollouts = Rollouts(store, feed)
        self.upgrades = UpgradeCheck(
            store,
            catalogue,
            leadership,
            feed,
            clock,
            interval_s=settings.upgrade_check_interval_s,
            rest_s=min(pace.upgrade_rest_s, settings.upgrade_check_interval_s),
            poll_s=pace.upgrade_poll_s,
            upgrade=self.upgrade_everywhere if settings.auto_upgrade else None,
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


def gallery_options(settings: ControllerSettings, galleries: str) -> GalleryOptions:
    """`galleries`: the setting that lists those of backends, or those of models."""
    data = settings.data.expanduser()
    return GalleryOptions(
        galleries=parse_galleries(galleries),
        base_folder=gallery_folder(data, settings.gallery.gallery_folder),
        cache_folder=data / "cache",
        library=LibraryOptions(
            fresh_s=settings.gallery.gallery_fresh_s, candidate_s=settings.gallery.gallery_timeout_s
        ),
        connect_s=min(10.0, settings.gallery.gallery_timeout_s),
    )


def registry_settings(settings: ControllerSettings) -> RegistrySettings:
    return RegistrySettings(insecure=frozenset(settings.gallery.insecure_registries))
