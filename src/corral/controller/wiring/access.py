"""Keys, certificates and credentials: what callers show and nodes are given."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from corral.controller.access.active_nodes import ActiveNodes
from corral.controller.access.gateway_trust import GatewayTrust
from corral.controller.access.keys import Access
from corral.controller.access.principal import Role
from corral.controller.access.release_keys import COUNTER as RELEASES
from corral.controller.access.release_keys import ReleaseKeys
from corral.controller.access.revocations import Revocations
from corral.controller.access.signing import IngressTokens, open_ingress_tokens
from corral.controller.registry.ingress_client import IngressClient
from corral.controller.settings import ControllerSettings
from corral.controller.wiring.runtime import Part, Runtime
from corral.kit.certificates import Ca
from corral.kit.errors import Invalid
from corral.kit.files import read_text, write_secret
from corral.kit.secrets import API_KEY, new_secret
from corral.kit.settings import BadSettings


@dataclass(frozen=True)
class Trust:
    access: Access
    ca: Ca | None
    gateways: GatewayTrust
    ingress_tokens: IngressTokens
    ingresses: IngressClient
    active_nodes: ActiveNodes
    revocations: Revocations
    release_keys: ReleaseKeys

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.revocations, self.active_nodes, self.release_keys

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
    release_keys = ReleaseKeys(store, clock)
    await release_keys.open()
    runtime.feed.on(RELEASES, release_keys.wake.set)
    return Trust(
        access=await _open_access(settings, runtime),
        ca=ca,
        gateways=open_gateway_trust(ca, settings.access.gateway_cert),
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
        release_keys=release_keys,
    )


async def _open_access(settings: ControllerSettings, runtime: Runtime) -> Access:
    """With the two keys that live in files: the first administrator's and the gateways'."""
    access = Access(runtime.store, runtime.feed, runtime.clock, session_ttl_s=settings.access.session_ttl_s)
    admin = settings.access.admin_key_file or settings.data / "admin.key"
    gateway = settings.access.gateway_key_file or settings.data / "gateway.key"
    await access.ensure(ensure_key_file(admin), "admin", Role.ADMIN)
    await access.ensure(ensure_key_file(gateway), "gateway", Role.GATEWAY)
    return access


def ensure_key_file(path: Path) -> str:
    """The key in the file; a new one where there is no file."""
    path = path.expanduser()
    try:
        found = read_text(path)
        if found is None:
            found = new_secret(API_KEY)
            write_secret(path, found + "\n")
    except OSError as error:
        raise BadSettings([f"{path}: {error.strerror}"]) from error
    if not found.startswith(API_KEY) or len(found) < 30:
        raise BadSettings([f"{path} does not hold an API key (they start with {API_KEY})"])
    return found


def open_gateway_trust(ca: Ca | None, certificate: Path | None) -> GatewayTrust:
    try:
        return GatewayTrust(ca, certificate)
    except Invalid as error:
        raise BadSettings([error.message]) from error


def load_ca(certificate: Path | None, key: Path | None) -> Ca | None:
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise BadSettings(["--ca-cert and --ca-key must be given together"])
    try:
        return Ca(certificate.read_text(), key.read_text())
    except OSError as error:
        raise BadSettings([f"{error.filename}: {error.strerror}"]) from error
    except ValueError as error:
        raise BadSettings([f"{certificate}, {key}: {error}"]) from error
