"""Which certificates prove the controller's identity: the system's roots, a PEM file, or a pinned CA
(docs/explanation/design.md#tls).

The pin is part of the join line. So `GET /ca.pem` needs no trusted connection: only the certificate whose SHA-256 is
the pin is accepted, and from then on it is the only root.
"""

from __future__ import annotations

import hashlib
import hmac
import ssl
from pathlib import Path

import aiohttp
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from msgspec.structs import replace

from corral.kit.backoff import Backoff
from corral.kit.clock import Clock
from corral.kit.log import get_log
from corral.worker.agent.join.identity import IdentityFile
from corral.worker.status import FatalError

log = get_log(__name__)

PIN = "sha256:"
_PEM_LIMIT = 1 << 18


class CaUnreachable(Exception):
    """`/ca.pem` could not be fetched; a retry may succeed."""


class WrongCa(FatalError):
    """The pin does not match: a typing mistake, or an attacker in between."""


def is_pin(ca: str) -> bool:
    return ca.startswith(PIN)


def fingerprint(certificate: x509.Certificate) -> str:
    """As it stands in the join line: the SHA-256 of the certificate's DER."""
    return PIN + hashlib.sha256(certificate.public_bytes(Encoding.DER)).hexdigest()


def pick_pinned(pem: bytes, pin: str) -> str:
    """The pinned certificate out of a bundle, as PEM. Raises `WrongCa`."""
    wanted = PIN + pin.removeprefix(PIN).replace(":", "").lower()
    try:
        offered = x509.load_pem_x509_certificates(pem)
    except ValueError:
        offered = []
    for certificate in offered:
        if hmac.compare_digest(fingerprint(certificate), wanted):
            return certificate.public_bytes(Encoding.PEM).decode()
    seen = ", ".join(fingerprint(certificate) for certificate in offered) or "no certificate"
    raise WrongCa(
        f"the controller's CA is not the pinned one (it shows {seen}, --ca says {wanted}): "
        "copy the join line again; if it is right, another machine answers in place of the controller"
    )


def read_ca_file(path: Path) -> str:
    try:
        pem = path.expanduser().read_bytes()
        x509.load_pem_x509_certificates(pem)
    except OSError as error:
        raise FatalError(f"--ca: cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise FatalError(f"--ca: {path} holds no PEM certificate") from error
    return pem.decode()


async def fetch_pinned_ca(controller_url: str, pin: str, *, timeout_s: float) -> str:
    """Fetch without TLS verification, accept only the pinned certificate. Raises `CaUnreachable` or `WrongCa`."""
    unverified = ssl.create_default_context()
    unverified.check_hostname = False
    unverified.verify_mode = ssl.CERT_NONE
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"{controller_url}/ca.pem", ssl=unverified, allow_redirects=False) as answer,
        ):
            content = await answer.content.read(_PEM_LIMIT)
            while piece := await answer.content.read(_PEM_LIMIT):
                content += piece
                if len(content) > _PEM_LIMIT:
                    raise CaUnreachable(f"{controller_url}/ca.pem is longer than any CA")
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise CaUnreachable(f"{controller_url} cannot be reached: {error or type(error).__name__}") from error
    if answer.status >= 500:
        raise CaUnreachable(f"{controller_url}/ca.pem answers {answer.status}")
    if answer.status != 200:
        raise FatalError(
            f"{controller_url}/ca.pem answers {answer.status}: does this cluster have a CA? (leave --ca out)"
        )
    return pick_pinned(content, pin)


async def establish_trust(
    ca: str, controller_url: str, identity: IdentityFile, *, timeout_s: float, backoff: Backoff, clock: Clock
) -> ssl.SSLContext | None:
    """The TLS context for the controller; None: the system's roots. `ca` is the setting; the certificate is stored."""
    if not controller_url.startswith("https://"):
        return None
    if ca and not is_pin(ca):
        _remember(identity, read_ca_file(Path(ca)))
    elif ca and not _fits(identity.current.ca, ca):
        while True:
            try:
                _remember(identity, await fetch_pinned_ca(controller_url, ca, timeout_s=timeout_s))
                break
            except CaUnreachable as away:
                wait_s = backoff.next_s()
                log.warning("the cluster's CA will be asked for again", reason=str(away), wait_s=round(wait_s, 1))
                await clock.sleep(wait_s)
    return trust_only(identity.current.ca) if identity.current.ca else None


def _fits(ca_pem: str, pin: str) -> bool:
    try:
        return bool(pick_pinned(ca_pem.encode(), pin))
    except WrongCa:
        return False


def _remember(identity: IdentityFile, ca_pem: str) -> None:
    identity.store(replace(identity.current, ca=ca_pem))


def trust_only(ca_pem: str) -> ssl.SSLContext:
    """Verifies chain and name: the same CA signs every worker's certificate, and none of them is the controller."""
    context = ssl.create_default_context(cadata=ca_pem)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context
