"""A server certificate with its chain, as in a PEM file: which names it has, and what a client needs to verify it."""

from __future__ import annotations

import contextlib
import re
import ssl
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from corral.kit.certificates import covers, host_names_of

_PEM = re.compile("-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_SAMPLE_LABEL = "any"  # a host that a name with `*` covers


@dataclass(frozen=True)
class CertificateChain:
    """The certificate first, then those that the file has for its issuers, in order."""

    certificates: tuple[x509.Certificate, ...]

    @property
    def host_names(self) -> tuple[str, ...]:
        return host_names_of(_pem(self.certificates[0]))

    @property
    def top_pem(self) -> str:
        """A client that trusts this certificate can verify the server."""
        return _pem(self.certificates[-1])

    @property
    def is_alone(self) -> bool:
        """Whether nothing but the certificate itself can be pinned, so that a renewed one is another."""
        return len(self.certificates) == 1

    def covers(self, host: str) -> bool:
        return covers(self.host_names, host)

    def is_trusted_by_system(self) -> bool:
        """Whether clients with the CAs of this system need no other. Blocking."""
        names = self.host_names
        roots = list(_system_roots({each.issuer.public_bytes() for each in self.certificates}))
        if not names or not roots:
            return False
        subject = x509.DNSName(names[0].replace("*", _SAMPLE_LABEL))
        try:
            verifier = PolicyBuilder().store(Store(roots)).build_server_verifier(subject)
            verifier.verify(self.certificates[0], list(self.certificates[1:]))
        except (VerificationError, ValueError, x509.UnsupportedGeneralNameType):
            return False
        return True


def read_chain(pem: bytes) -> CertificateChain:
    """Raises ValueError. Certificates that issued none of the others are left out."""
    first, *rest = x509.load_pem_x509_certificates(pem)
    chain = [first]
    while issuer := next((each for each in rest if each not in chain and _issued(each, chain[-1])), None):
        chain.append(issuer)
    return CertificateChain(tuple(chain))


def _issued(issuer: x509.Certificate, certificate: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _system_roots(names: Collection[bytes]) -> Iterator[x509.Certificate]:
    """Those with one of these names, where Python's TLS finds them; SSL_CERT_FILE and SSL_CERT_DIR count."""
    paths = ssl.get_default_verify_paths()
    files = [Path(paths.cafile)] if paths.cafile else []
    if paths.capath:
        files += sorted(Path(paths.capath).glob("*.[0-9]"))  # named by the hash of the subject
    for file in files:
        with contextlib.suppress(OSError, ValueError):
            for pem in _PEM.findall(file.read_text(encoding="ascii", errors="replace")):
                der = ssl.PEM_cert_to_DER_cert(pem)
                # Only these are parsed: a system has hundreds, some of which a strict parser complains about.
                if any(name in der for name in names):
                    yield x509.load_der_x509_certificate(der)


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(Encoding.PEM).decode()
