"""A certificate authority that is known by its fingerprint: the pin (`sha256:…`) of a join line.

The certificate is fetched without verification, compared with the pin, and only then trusted: an attacker in between
has no certificate that passes.
"""

from __future__ import annotations

import ssl

from corral.kit.errors import Denied, NotFound, Unreachable

PREFIX = "sha256:"
MAX_PEM_BYTES = 256 * 1024
_HEX = set("0123456789abcdef")


def is_pin(ca: str) -> bool:
    return ca.startswith(PREFIX)


def normalize_pin(pin: str) -> str:
    """`sha256:` and 64 hexadecimal digits in lower case; colons between the bytes are removed. Raises ValueError."""
    digits = pin.removeprefix(PREFIX).replace(":", "").lower()
    if not is_pin(pin) or len(digits) != 64 or set(digits) - _HEX:
        raise ValueError("the pin is not sha256: and 64 hexadecimal digits; copy it whole from the join line")
    return PREFIX + digits


def find_pinned(pem: bytes, pin: str) -> str:
    """The pinned certificate of a bundle, as PEM. Raises `Denied` where the bundle has no such certificate."""
    import hmac  # here, as the next: most commands need no pin, and it takes 0.1 s to load

    from cryptography import x509

    from corral.kit.certificates import fingerprint

    wanted = normalize_pin(pin)
    try:
        certificates = [_to_pem(each) for each in x509.load_pem_x509_certificates(pem)]
    except ValueError:
        certificates = []
    for certificate in certificates:
        if hmac.compare_digest(fingerprint(certificate), wanted):
            return certificate
    offered = ", ".join(map(fingerprint, certificates)) or "no certificate"
    raise Denied(
        f"the controller's CA is not the pinned one (it offers {offered}, --ca says {wanted}): copy the fingerprint "
        "again, `corral token create` prints it; if it is right, another machine answers in the controller's place"
    )


def trust_context(pem: str) -> ssl.SSLContext:
    """Trusts these certificates only. One that is no CA, or an intermediate one, can be pinned too. Raises SSLError."""
    context = ssl.create_default_context(cadata=pem)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


async def fetch_pinned_ca(url: str, pin: str, *, timeout_s: float) -> str:
    """The pinned certificate from `<url>/ca.pem`. Raises `Unreachable` (no usable answer now), `NotFound` (the cluster
    has no CA) or `Denied` (another CA)."""
    import aiohttp

    unverified = ssl.create_default_context()
    unverified.check_hostname = False
    unverified.verify_mode = ssl.CERT_NONE
    pem = b""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as session,
            session.get(f"{url}/ca.pem", ssl=unverified, allow_redirects=False) as answer,
        ):
            while len(pem) <= MAX_PEM_BYTES and (chunk := await answer.content.read(MAX_PEM_BYTES)):
                pem += chunk
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise Unreachable(f"{url} cannot be reached: {error or type(error).__name__}") from error
    if len(pem) > MAX_PEM_BYTES:
        raise Unreachable(f"{url}/ca.pem is longer than any CA")
    if answer.status >= 500:
        raise Unreachable(f"{url}/ca.pem answers HTTP {answer.status}")
    if answer.status != 200:
        raise NotFound(f"there is no CA certificate at {url}/ca.pem: HTTP {answer.status}; does this fleet use TLS?")
    return find_pinned(pem, pin)


def _to_pem(certificate: object) -> str:
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding

    assert isinstance(certificate, x509.Certificate)
    return certificate.public_bytes(Encoding.PEM).decode()
