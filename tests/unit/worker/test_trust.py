"""Pinning the cluster's CA, and the ingress's own key and certificate."""

from __future__ import annotations

import ssl
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from corral.worker.agent.join.trust import read_ca_file, trust_only
from corral.worker.ingress.certificate import IngressCertificate
from corral.worker.status import FatalError
from tests.support.certificates import TestCa


def test_a_ca_file(tmp_path: Path) -> None:
    ca = TestCa()
    (tmp_path / "ca.pem").write_text(ca.pem)
    (tmp_path / "not.pem").write_text("x")
    assert read_ca_file(tmp_path / "ca.pem") == ca.pem
    with pytest.raises(FatalError, match="holds no PEM certificate"):
        read_ca_file(tmp_path / "not.pem")
    with pytest.raises(FatalError, match="cannot read"):
        read_ca_file(tmp_path / "none.pem")


def test_a_file_may_have_the_ca_of_the_fleet_and_that_of_a_certificate_of_your_own(tmp_path: Path) -> None:
    fleet, public = TestCa(), TestCa()
    (tmp_path / "both.pem").write_text(f"{fleet.pem}{public.pem}")
    assert len(trust_only(read_ca_file(tmp_path / "both.pem")).get_ca_certs()) == 2


def test_only_the_pinned_root_is_trusted() -> None:
    context = trust_only(TestCa().pem)
    assert len(context.get_ca_certs()) == 1
    assert context.check_hostname
    assert context.verify_mode is ssl.CERT_REQUIRED


def test_the_key_is_made_once_and_stays_private(tmp_path: Path) -> None:
    first = IngressCertificate(tmp_path)
    key = (tmp_path / "ingress.key").read_bytes()
    assert stat.S_IMODE((tmp_path / "ingress.key").stat().st_mode) == 0o600
    assert first.context is None
    IngressCertificate(tmp_path)
    assert (tmp_path / "ingress.key").read_bytes() == key
    request = x509.load_pem_x509_csr(first.csr.encode())
    assert request.is_signature_valid
    assert b"PRIVATE" not in first.csr.encode()


def test_a_granted_certificate_is_used_stored_and_renewed_in_place(tmp_path: Path) -> None:
    ca, mine = TestCa(), IngressCertificate(tmp_path)
    now = datetime.now(UTC)
    mine.accept(ca.sign(mine.csr, life=timedelta(days=3)))
    context = mine.context
    assert context is not None
    again = IngressCertificate(tmp_path)
    assert again.context is not None
    assert mine.csr_if_due((now + timedelta(days=1)).timestamp()) == ""
    assert mine.csr_if_due((now + timedelta(days=2, minutes=5)).timestamp()) == mine.csr
    mine.accept(ca.sign(mine.csr, life=timedelta(days=30)))
    assert mine.context is context  # the one that is serving
    assert mine.csr_if_due((now + timedelta(days=3)).timestamp()) == ""
    mine.drop()
    assert IngressCertificate(tmp_path).context is None
    assert mine.csr_if_due((now + timedelta(days=300)).timestamp()) == ""


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    ca, mine, theirs = (
        TestCa(),
        IngressCertificate(tmp_path / "a"),
        IngressCertificate(tmp_path / "b"),
    )
    mine.accept(ca.sign(theirs.csr))
    assert mine.context is None
    mine.accept("not a certificate")
    assert mine.context is None


def test_a_damaged_key_or_certificate(tmp_path: Path) -> None:
    ca, mine = TestCa(), IngressCertificate(tmp_path)
    mine.accept(ca.sign(mine.csr))
    (tmp_path / "ingress.crt").write_text("half")
    assert IngressCertificate(tmp_path).context is None
    (tmp_path / "ingress.key").write_text("half")
    with pytest.raises(FatalError, match="is damaged"):
        IngressCertificate(tmp_path)


def test_a_request_names_nobody(tmp_path: Path) -> None:
    """The controller knows whom it signs for. A name here could only be wrong, or too long for a certificate."""
    request = x509.load_pem_x509_csr(IngressCertificate(tmp_path).csr.encode())
    assert list(request.subject) == []
    assert list(request.extensions) == []
