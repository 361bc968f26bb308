"""The cluster's CA, tried with real TLS handshakes."""

from __future__ import annotations

import asyncio
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID

from corral.kit.certificates import (
    BadCertificateRequest,
    Ca,
    IssuedCertificate,
    fingerprint,
    key_to_pem,
    make_ca,
    new_key,
    subject_names,
)

NOW = datetime.now(UTC)
LIFE = timedelta(days=30)


def request_pem(names: list[str] | None = None) -> tuple[str, str]:
    key = new_key()
    builder = x509.CertificateSigningRequestBuilder().subject_name(
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "I say so")])
    )
    if names:
        builder = builder.add_extension(
            x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), critical=False
        )
    request = builder.sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM).decode(), key_to_pem(key)


def server_context(folder: Path, issued: IssuedCertificate) -> ssl.SSLContext:
    (folder / "crt").write_text(issued.certificate_pem)
    (folder / "key").write_text(issued.key_pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "crt", folder / "key")
    return context


async def handshake(server: ssl.SSLContext, ca_pem: str, name: str) -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    listener = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=server)
    async with listener:
        port = listener.sockets[0].getsockname()[1]
        trust = ssl.create_default_context(cadata=ca_pem)
        trust.verify_flags |= ssl.VERIFY_X509_STRICT
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust, server_hostname=name)
        writer.close()


@pytest.mark.parametrize("name", ["node-1", "127.0.0.1"])
async def test_a_signed_request_makes_a_working_server(tmp_path: Path, name: str) -> None:
    made = make_ca("corral test", NOW)
    csr, key = request_pem()
    certificate = Ca(made.certificate_pem, made.key_pem).sign_request(
        csr, "node-1", ["node-1", "127.0.0.1"], NOW, life=LIFE
    )
    await handshake(server_context(tmp_path, IssuedCertificate(certificate, key)), made.certificate_pem, name)


async def test_another_name_or_another_ca_is_refused(tmp_path: Path) -> None:
    made = make_ca("corral test", NOW)
    issued = Ca(made.certificate_pem, made.key_pem).issue_server(["localhost"], NOW, life=LIFE)
    context = server_context(tmp_path, issued)
    with pytest.raises(ssl.SSLCertVerificationError):
        await handshake(context, made.certificate_pem, "elsewhere")
    with pytest.raises(ssl.SSLCertVerificationError):
        await handshake(context, make_ca("another", NOW).certificate_pem, "localhost")


def test_the_names_in_a_request_are_ignored() -> None:
    made = make_ca("corral test", NOW)
    csr, _ = request_pem(["the-gateway"])
    certificate = Ca(made.certificate_pem, made.key_pem).sign_request(csr, "node-1", ["node-1"], NOW, life=LIFE)
    assert subject_names(certificate) == {"node-1"}


def test_requests_that_cannot_be_honoured_say_why() -> None:
    made = make_ca("corral test", NOW)
    ca = Ca(made.certificate_pem, made.key_pem)
    with pytest.raises(BadCertificateRequest, match="cannot be read"):
        ca.sign_request(
            "-----BEGIN CERTIFICATE REQUEST-----\nAA==\n-----END CERTIFICATE REQUEST-----", "n", ["n"], NOW, life=LIFE
        )
    key = rsa.generate_private_key(65537, 2048)
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    with pytest.raises(BadCertificateRequest, match="elliptic-curve"):
        ca.sign_request(request.public_bytes(serialization.Encoding.PEM).decode(), "n", ["n"], NOW, life=LIFE)


def test_a_key_of_another_ca_is_refused_at_load() -> None:
    one, other = make_ca("one", NOW), make_ca("other", NOW)
    with pytest.raises(ValueError, match="does not belong"):
        Ca(one.certificate_pem, other.key_pem)


def test_the_fingerprint_is_of_the_certificate_not_of_its_text() -> None:
    made = make_ca("corral test", NOW)
    assert fingerprint(made.certificate_pem) == fingerprint("\n" + made.certificate_pem.replace("\n", "\r\n"))
    assert fingerprint(made.certificate_pem).startswith("sha256:")
