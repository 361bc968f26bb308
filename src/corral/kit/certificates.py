"""The cluster's own certificate authority: create it, issue server certificates, sign a worker's request.

Keys are ECDSA P-256: every TLS library supports them, and a handshake costs little on small machines.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from corral.kit.hosts import is_address

_SKEW = timedelta(hours=1)  # clocks differ: a certificate must not be "not yet valid" on a machine that is behind
_CA_LIFE = timedelta(days=3650)


class BadCertificateRequest(ValueError):
    """The certificate request cannot be signed; the text says why."""


@dataclass(frozen=True)
class IssuedCertificate:
    certificate_pem: str
    key_pem: str


def make_ca(name: str, now: datetime) -> IssuedCertificate:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _named(name)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + _CA_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return IssuedCertificate(_pem(builder.sign(key, hashes.SHA256())), key_to_pem(key))


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def key_to_pem(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()


def fingerprint(certificate_pem: str) -> str:
    """`sha256:<hex of the DER>`, as a join line has it."""
    der = x509.load_pem_x509_certificate(certificate_pem.encode()).public_bytes(serialization.Encoding.DER)
    return f"sha256:{hashlib.sha256(der).hexdigest()}"


def expires_at(certificate_pem: str) -> datetime:
    return x509.load_pem_x509_certificate(certificate_pem.encode()).not_valid_after_utc


def subject_names(certificate_pem: str) -> frozenset[str]:
    """Host names and addresses for which the certificate is valid."""
    certificate = x509.load_pem_x509_certificate(certificate_pem.encode())
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return frozenset()
    dns = found.get_values_for_type(x509.DNSName)
    addresses = (str(address) for address in found.get_values_for_type(x509.IPAddress))
    return frozenset((*dns, *addresses))


def covers(names: Iterable[str], host: str) -> bool:
    """Whether a certificate with these names is valid for a host name; `*` stands for one label. Addresses are not
    covered: a client that asks for an address does not tell the server so."""
    wanted = host.rstrip(".").lower()
    if not wanted or is_address(wanted):
        return False
    known = {name.lower() for name in names}
    return wanted in known or f"*.{wanted.partition('.')[2]}" in known


def host_names_of(certificate_pem: str) -> tuple[str, ...]:
    """Without addresses; names with `*` come last."""
    found = (name.lower() for name in subject_names(certificate_pem) if not is_address(name))
    return tuple(sorted(found, key=lambda name: ("*" in name, name)))


class Ca:
    """A loaded authority."""

    def __init__(self, certificate_pem: str, key_pem: str) -> None:
        self.certificate_pem = certificate_pem
        self._certificate = x509.load_pem_x509_certificate(certificate_pem.encode())
        key = serialization.load_pem_private_key(key_pem.encode(), password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError("the CA's key is not an elliptic-curve key")
        if key.public_key().public_numbers() != _numbers(self._certificate.public_key()):
            raise ValueError("the CA's key does not belong to its certificate")
        self._key = key

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.certificate_pem)

    def issue_server(self, names: Iterable[str], now: datetime, *, life: timedelta) -> IssuedCertificate:
        """A fresh key and a certificate for these host names and addresses."""
        key = new_key()
        hosts = tuple(names)
        return IssuedCertificate(self._sign(key.public_key(), hosts[0], hosts, now, life), key_to_pem(key))

    def sign_request(
        self, csr_pem: str, common_name: str, names: Iterable[str], now: datetime, *, life: timedelta
    ) -> str:
        """A certificate for the requester's key, for `names`; the names in the request are ignored."""
        try:
            request = x509.load_pem_x509_csr(csr_pem.encode())
            key = request.public_key()
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise BadCertificateRequest("the certificate request cannot be read") from error
        if not isinstance(key, ec.EllipticCurvePublicKey) or not _is_self_signed(request):
            raise BadCertificateRequest("the certificate request is not signed by an elliptic-curve key of its own")
        return self._sign(key, common_name, tuple(names), now, life)

    def _sign(
        self, key: ec.EllipticCurvePublicKey, common_name: str, names: tuple[str, ...], now: datetime, life: timedelta
    ) -> str:
        builder = (
            x509.CertificateBuilder()
            .subject_name(_named(common_name))
            .issuer_name(self._certificate.subject)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _SKEW)
            .not_valid_after(min(now + life, self._certificate.not_valid_after_utc))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .add_extension(x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )
        return _pem(builder.sign(self._key, hashes.SHA256()))


def _is_self_signed(request: x509.CertificateSigningRequest) -> bool:
    try:
        return request.is_signature_valid
    except (InvalidSignature, UnsupportedAlgorithm, ValueError, TypeError):
        return False


def _numbers(key: object) -> object:
    return key.public_numbers() if isinstance(key, ec.EllipticCurvePublicKey) else None


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _named(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name[:64])])


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()
