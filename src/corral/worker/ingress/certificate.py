"""The ingress's own key and certificate (docs/explanation/design.md#tls).

The key is made here and never leaves the machine. A signing request goes with each registration; where the cluster has
a CA, the answer carries a certificate, which is stored and put into the context that is already serving: connections
that are open stay, new ones see the new certificate.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from corral.kit.files import write_atomically
from corral.kit.log import get_log
from corral.worker.status import FatalError

log = get_log(__name__)
KEY_FILE = "ingress.key"
CERTIFICATE_FILE = "ingress.crt"


class IngressCertificate:
    """`context` is None while the cluster has given no certificate: the ingress is plain then."""

    def __init__(self, folder: Path) -> None:
        self._key_path = folder / KEY_FILE
        self._certificate_path = folder / CERTIFICATE_FILE
        self._key = _read_or_make_key(self._key_path)
        self.csr = _signing_request(self._key)
        self.context: ssl.SSLContext | None = None
        self._renew_at = 0.0
        if self._certificate_path.exists():
            self._load_stored()

    def accept(self, certificate_pem: str) -> None:
        """Take over what the controller signed. A certificate for another key is none of ours and is left alone."""
        try:
            leaf = x509.load_pem_x509_certificates(certificate_pem.encode())[0]
        except ValueError:
            log.error("the controller sent a certificate that cannot be read")
            return
        if not self._is_ours(leaf):
            log.error("the controller sent a certificate for another key")
            return
        try:
            write_atomically(self._certificate_path, certificate_pem.encode(), mode=0o600)
            self._use(leaf)
        except OSError as error:  # ssl.SSLError is one too
            path = self._certificate_path
            raise FatalError(f"cannot use {path}: {error.strerror}; free disk space or fix its permissions") from error
        log.info("ingress certificate in use", until=leaf.not_valid_after_utc.isoformat())

    def drop(self) -> None:
        """The cluster has no CA (any more)."""
        self._certificate_path.unlink(missing_ok=True)
        self.context = None

    def csr_if_due(self, now: float) -> str:
        """The signing request when two thirds of the certificate's life are over, else nothing."""
        return self.csr if self.context is not None and now >= self._renew_at else ""

    def _load_stored(self) -> None:
        try:
            leaf = x509.load_pem_x509_certificates(self._certificate_path.read_bytes())[0]
            if self._is_ours(leaf):
                self._use(leaf)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            log.warning("stored ingress certificate cannot be used", error=str(error))

    def _use(self, leaf: x509.Certificate) -> None:
        context = self.context or _server_context()
        context.load_cert_chain(self._certificate_path, self._key_path)
        self.context = context
        begin, end = leaf.not_valid_before_utc.timestamp(), leaf.not_valid_after_utc.timestamp()
        self._renew_at = begin + (end - begin) * 2 / 3

    def _is_ours(self, leaf: x509.Certificate) -> bool:
        form = Encoding.DER, PublicFormat.SubjectPublicKeyInfo
        return leaf.public_key().public_bytes(*form) == self._key.public_key().public_bytes(*form)


def _server_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _read_or_make_key(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        if not path.exists():
            key = ec.generate_private_key(ec.SECP256R1())
            pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
            write_atomically(path, pem, mode=0o600)
            return key
        known = load_pem_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise FatalError(f"cannot use {path}: {error.strerror}; free disk space or fix its permissions") from error
    except (ValueError, TypeError) as error:
        raise FatalError(f"{path} is damaged: remove it, a new key will be made") from error
    if not isinstance(known, ec.EllipticCurvePrivateKey):
        raise FatalError(f"{path} holds another kind of key than ours: remove it, a new key will be made")
    return known


def _signing_request(key: ec.EllipticCurvePrivateKey) -> str:
    """Without any name: the controller signs for the node it knows, whatever a request says."""
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    return request.public_bytes(Encoding.PEM).decode()
