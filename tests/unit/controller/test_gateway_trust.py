"""What a join line pins, by the host of its URL."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from corral.cli.up.prepare import renewal_warning
from corral.controller.access.gateway_trust import GatewayTrust
from corral.kit.certificates import Ca, covers, fingerprint, make_ca
from corral.kit.errors import Invalid
from tests.support.own_certificates import OwnCa


@pytest.fixture
def fleet_ca() -> Ca:
    made = make_ca("the fleet", datetime.now(UTC))
    return Ca(made.certificate_pem, made.key_pem)


async def test_names_of_the_certificate_pin_its_chain_and_all_others_the_fleets_ca(
    tmp_path: Path, fleet_ca: Ca
) -> None:
    own = OwnCa(tmp_path)
    trust = GatewayTrust(fleet_ca, own.issue("fleet.example", "*.lab.example", "192.0.2.7")[0])
    assert await trust.pin("https://fleet.example:8080") == own.fingerprint
    assert await trust.pin("https://a.lab.example") == own.fingerprint
    for other in ("https://192.0.2.7:8080", "https://[fd00::1]:8080", "https://lab.example", "https://a.b.lab.example"):
        assert await trust.pin(other) == fleet_ca.fingerprint, other
    assert await trust.pin("http://fleet.example:8080") == ""
    assert await trust.bundle("https://fleet.example") == own.pem + fleet_ca.certificate_pem
    assert await trust.bundle("https://192.0.2.7") == fleet_ca.certificate_pem + own.pem


async def test_a_certificate_without_its_issuer_is_pinned_itself_with_a_warning(tmp_path: Path, fleet_ca: Ca) -> None:
    own = OwnCa(tmp_path)
    certificate, _ = own.issue("fleet.example", with_ca=False)
    trust = GatewayTrust(fleet_ca, certificate)
    assert await trust.pin("https://fleet.example") == fingerprint(certificate.read_text())
    assert "after a renewal they need the new fingerprint" in renewal_warning(certificate)
    own.issue("fleet.example")
    assert renewal_warning(certificate) == ""
    assert await trust.pin("https://fleet.example") == own.fingerprint, "a changed file is read again"


async def test_what_the_system_trusts_needs_no_pin(
    tmp_path: Path, fleet_ca: Ca, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = OwnCa(tmp_path)
    certificate, _ = own.issue("*.example", with_ca=False)
    monkeypatch.setenv("SSL_CERT_FILE", str(own.file))
    trust = GatewayTrust(fleet_ca, certificate)
    assert await trust.pin("https://fleet.example") == ""
    assert await trust.bundle("https://fleet.example") == fleet_ca.certificate_pem


async def test_a_broken_file_is_logged_and_the_old_one_stays(tmp_path: Path, fleet_ca: Ca) -> None:
    own = OwnCa(tmp_path)
    certificate, _ = own.issue("fleet.example")
    trust = GatewayTrust(fleet_ca, certificate)
    certificate.write_text("half of")
    with capture_logs() as logs:
        assert await trust.pin("https://fleet.example") == own.fingerprint
    assert [each["event"] for each in logs] == ["certificate cannot be used, the old one stays"]
    with pytest.raises(Invalid, match="--gateway-cert"):
        GatewayTrust(fleet_ca, certificate)


@pytest.mark.parametrize(
    ("host", "is_covered"),
    [
        ("fleet.example", True),
        ("FLEET.example.", True),
        ("x.fleet.example", False),
        ("a.lab.example", True),
        ("lab.example", False),
        ("10.0.0.1", False),
        ("", False),
    ],
)
def test_which_hosts_a_certificate_covers(host: str, is_covered: bool) -> None:
    assert covers(("fleet.example", "*.lab.example", "10.0.0.1"), host) is is_covered
