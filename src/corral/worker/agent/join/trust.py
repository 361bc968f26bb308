"""Which certificates prove the controller's identity: the system's roots, a PEM file, or a pinned CA
(docs/explanation/design.md#tls).

The pin is part of the join line. So `GET /ca.pem` needs no trusted connection: only the certificate whose SHA-256 is
the pin is accepted, and from then on it is the only root.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from cryptography import x509
from msgspec.structs import replace

from corral.kit.ca_pin import fetch_pinned_ca, find_pinned, is_pin, trust_context
from corral.kit.clock import Clock
from corral.kit.errors import Denied, NotFound, Unreachable
from corral.kit.log import get_log
from corral.kit.retry import Backoff
from corral.worker.agent.join.identity import IdentityFile
from corral.worker.status import FatalError

log = get_log(__name__)


def read_ca_file(path: Path) -> str:
    try:
        pem = path.expanduser().read_bytes()
        x509.load_pem_x509_certificates(pem)
    except OSError as error:
        raise FatalError(f"--ca: cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise FatalError(f"--ca: {path} holds no PEM certificate") from error
    return pem.decode()


async def fetch_ca(controller_url: str, pin: str, *, timeout_s: float) -> str:
    """The pinned CA of the controller. Raises `Unreachable` (retry) or `FatalError`."""
    try:
        return await fetch_pinned_ca(controller_url, pin, timeout_s=timeout_s)
    except NotFound as error:
        raise FatalError(f"{error.message} (if not, leave --ca out)") from error
    except Denied as error:
        raise FatalError(error.message) from error


async def establish_trust(
    ca: str, controller_url: str, identity: IdentityFile, *, timeout_s: float, backoff: Backoff, clock: Clock
) -> ssl.SSLContext | None:
    """The TLS context for the controller; None: the system's roots. `ca` is the setting; the certificate is stored."""
    if not controller_url.startswith("https://"):
        return None
    if ca and not is_pin(ca):
        _remember(identity, read_ca_file(Path(ca)))
    elif ca and not _matches(identity.current.ca, ca):
        while True:
            try:
                _remember(identity, await fetch_ca(controller_url, ca, timeout_s=timeout_s))
                break
            except Unreachable as error:
                wait_s = backoff.next_s()
                log.warning("the cluster's CA will be asked for again", reason=error.message, wait_s=round(wait_s, 1))
                await clock.sleep(wait_s)
    return trust_only(identity.current.ca) if identity.current.ca else None


def _matches(ca_pem: str, pin: str) -> bool:
    try:
        return bool(find_pinned(ca_pem.encode(), pin))
    except Denied:
        return False


def _remember(identity: IdentityFile, ca_pem: str) -> None:
    identity.store(replace(identity.current, ca=ca_pem))


def trust_only(ca_pem: str) -> ssl.SSLContext:
    """Verifies chain and name: the same CA signs every worker's certificate, and none of them is the controller."""
    return trust_context(ca_pem)
