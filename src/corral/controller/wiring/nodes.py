"""The registry of nodes and their health."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from corral.contract.messages.nodes import BusHeartbeat
from corral.controller.health.classify import Guard
from corral.controller.health.ingress_check import IngressCheck
from corral.controller.health.monitor import HealthMonitor
from corral.controller.health.observation_window import ObservationWindow
from corral.controller.registry.admission import AdmissionRules, NodeApi
from corral.controller.registry.heartbeats import Heartbeats
from corral.controller.registry.nodes import NodeAdmin
from corral.controller.runtime.node_views import InFlightOf
from corral.controller.settings import ControllerSettings
from corral.controller.wiring.access import Trust
from corral.controller.wiring.runtime import Part, Runtime
from corral.kit.log import get_log

log = get_log(__name__)

_SHORT_SECRET = 16


@dataclass(frozen=True)
class NodeParts:
    admin: NodeAdmin
    api: NodeApi
    heartbeats: Heartbeats
    health: HealthMonitor
    ingress_check: IngressCheck

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.heartbeats, self.health, self.ingress_check


def assemble_nodes(
    settings: ControllerSettings,
    runtime: Runtime,
    trust: Trust,
    *,
    on_heartbeat: Callable[[str, BusHeartbeat], None],
    in_flight_of: InFlightOf,
    blob_url: str,
) -> NodeParts:
    store, clock, limits = runtime.store, runtime.clock, settings.health
    issuer, revocations = runtime.bus_setup.issuer, trust.revocations
    longest_gap_s = max(limits.stale_after_s / 2, 2 * limits.heartbeat_flush_s)
    window = ObservationWindow(runtime.bus, clock, longest_gap_s=longest_gap_s)
    health = HealthMonitor(
        store,
        runtime.changes,
        window,
        runtime.leadership,
        clock,
        interval_s=limits.health_interval_s,
        stale_after_s=limits.stale_after_s,
        guard=Guard(limits.guard_share, limits.guard_floor),
        live_for_s=settings.runtime.lease_ttl_s,
    )
    heartbeats = Heartbeats(
        store,
        runtime.bus,
        clock,
        flush_s=limits.heartbeat_flush_s,
        on_recorded=window.recorded,
        on_not_recorded=window.not_recorded,
        on_return=health.wake.set,
        on_heartbeat=on_heartbeat,
    )
    ingress_check = IngressCheck(
        store,
        trust.ingresses,
        runtime.leadership,
        clock,
        runtime.changes,
        interval_s=limits.ingress_check_interval_s,
        silent_after_s=limits.stale_after_s / 2,
    )
    runtime.changes.on_change(ingress_check.wake.set)
    runtime.feed.in_flight_of = in_flight_of
    return NodeParts(
        admin=NodeAdmin(store, runtime.changes, issuer, revocations, in_flight_of),
        api=NodeApi(
            store,
            runtime.changes,
            heartbeats,
            issuer,
            revocations,
            trust.ingress_tokens,
            trust.ca,
            clock,
            _admission_rules(settings),
            blob_url=blob_url,
            release_keys=trust.release_keys,
        ),
        heartbeats=heartbeats,
        health=health,
        ingress_check=ingress_check,
    )


def _admission_rules(settings: ControllerSettings) -> AdmissionRules:
    shared_token = settings.localai.registration_token if settings.localai.compat_localai else ""
    if settings.localai.compat_localai and len(shared_token) < _SHORT_SECRET:
        log.warning("the shared registration token is short enough to be guessed; make it longer")
    return AdmissionRules(
        settings.registration.auto_approve, shared_token, most_pending=settings.registration.pending_limit
    )
