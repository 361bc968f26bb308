"""Keys, certificates and credentials: what callers show and nodes are given."""

from __future__ import annotations

from dataclasses import dataclass

from corral.controller.access.active_nodes import ActiveNodes
from corral.controller.access.bootstrap import ensure_key_file, load_ca
from corral.controller.access.keys import Access
from corral.controller.access.principal import Role
from corral.controller.access.revocations import Revocations
from corral.controller.access.signing import IngressTokens, open_ingress_tokens
from corral.controller.registry.ingress_client import IngressClient
from corral.controller.settings import ControllerSettings
from corral.controller.wiring.runtime import Part, Runtime
from corral.kit.certificates import Ca


@dataclass(frozen=True)
class Trust:
    access: Access
    ca: Ca | None
    ingress_tokens: IngressTokens
    ingresses: IngressClient
    active_nodes: ActiveNodes
    revocations: Revocations

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.revocations, self.active_nodes

    @property
    def ca_pem(self) -> str:
        return self.ca.certificate_pem if self.ca else ""


async def open_trust(settings: ControllerSettings, runtime: Runtime) -> Trust:
    store, clock, bus_setup = runtime.store, runtime.clock, runtime.bus_setup
    ca = load_ca(settings.access.ca_cert, settings.access.ca_key)
    ingress_tokens = await open_ingress_tokens(store, clock)
    active_nodes = ActiveNodes(store, clock)
    await active_nodes.refresh()
    runtime.feed.on("nodes", active_nodes.wake.set)
    return Trust(
        access=await _open_access(settings, runtime),
        ca=ca,
        ingress_tokens=ingress_tokens,
        ingresses=IngressClient(
            ingress_tokens,
            timeout_s=settings.health.ingress_check_timeout_s,
            ca_pem=ca.certificate_pem if ca else "",
            shared_token=settings.localai.registration_token,
        ),
        active_nodes=active_nodes,
        revocations=Revocations(
            store,
            runtime.bus,
            clock,
            keys=bus_setup.keys,
            urls=bus_setup.urls,
            tls=bus_setup.tls,
            ttl_s=settings.bus.bus_credential_ttl_s,
        ),
    )


async def _open_access(settings: ControllerSettings, runtime: Runtime) -> Access:
    """With the two keys that live in files: the first administrator's and the gateways'."""
    access = Access(runtime.store, runtime.feed, runtime.clock, session_ttl_s=settings.access.session_ttl_s)
    admin = settings.access.admin_key_file or settings.data / "admin.key"
    gateway = settings.access.gateway_key_file or settings.data / "gateway.key"
    await access.ensure(ensure_key_file(admin), "admin", Role.ADMIN)
    await access.ensure(ensure_key_file(gateway), "gateway", Role.GATEWAY)
    return access
