"""From the settings to what the parts that install backends are told."""

from __future__ import annotations

from corral.blobs.oci.registry import RegistrySettings
from corral.controller.backends.galleries import gallery_folder
from corral.controller.backends.reconcile import ReconcileIntervals
from corral.controller.orders.backend_calls import CallTimeouts
from corral.controller.settings import ControllerSettings
from corral.controller.wiring.backends import BackendOptions
from corral.gallery.backends.factory import GalleryOptions
from corral.gallery.galleries import parse_galleries
from corral.gallery.index_cache import LibraryOptions


def backend_options(settings: ControllerSettings) -> BackendOptions:
    return BackendOptions(
        times=CallTimeouts(
            install_s=settings.backends.backend_install_timeout_s,
            upgrade_s=settings.backends.backend_upgrade_timeout_s,
            delete_s=settings.backends.backend_delete_timeout_s,
            accept_s=settings.backends.backend_accept_timeout_s,
            list_s=settings.backends.backend_list_timeout_s,
        ),
        pace=ReconcileIntervals(
            every_s=settings.backends.reconcile_interval_s,
            renew_s=settings.runtime.lease_ttl_s / 3,
            first_retry_s=settings.backends.retry_first_s,
            last_retry_s=settings.backends.retry_cap_s,
        ),
        inventory_flush_s=settings.health.heartbeat_flush_s,
        ask_inventory_every_s=settings.backends.inventory_interval_s,
        look_for_silent_every_s=min(5.0, settings.backends.inventory_interval_s),
        progress_tell_s=settings.backends.progress_interval_s,
        progress_write_s=settings.backends.progress_write_interval_s,
        accept_budget_s=settings.backends.accept_budget_s,
        upgrade_check_every_s=settings.backends.upgrade_check_interval_s,
        upgrade_check_rest_s=min(10.0, settings.backends.upgrade_check_interval_s),
        auto_upgrade=settings.backends.auto_upgrade,
    )


def gallery_options(settings: ControllerSettings) -> GalleryOptions:
    data = settings.data.expanduser()
    return GalleryOptions(
        galleries=parse_galleries(settings.gallery.galleries),
        base_folder=gallery_folder(data, settings.gallery.gallery_folder),
        cache_folder=data / "cache",
        library=LibraryOptions(
            fresh_s=settings.gallery.gallery_fresh_s, candidate_s=settings.gallery.gallery_timeout_s
        ),
        connect_s=min(10.0, settings.gallery.gallery_timeout_s),
    )


def registry_settings(settings: ControllerSettings) -> RegistrySettings:
    return RegistrySettings(insecure=frozenset(settings.gallery.insecure_registries))
