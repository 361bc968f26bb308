"""The certificate that a new connection gets, by handshakes in memory."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from corral.kit.errors import Invalid
from corral.kit.server_certificate import ServerCertificate
from tests.integration.gateway.certificates import self_signed


def presented(context: ssl.SSLContext) -> bytes:
    """What a client is shown."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    client = trusting.wrap_bio(to_client, to_server)
    server = context.wrap_bio(to_server, to_client, server_side=True)
    for side in (client, server, client, server):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    shown = client.getpeercert(binary_form=True)
    assert shown is not None
    return shown


def der(certificate: Path) -> bytes:
    return ssl.PEM_cert_to_DER_cert(certificate.read_text())


async def test_a_renewed_pair_is_used_by_the_next_connection(tmp_path: Path) -> None:
    files = self_signed(tmp_path)
    first, served = der(files[0]), ServerCertificate(*files)
    assert presented(served.context) == first
    assert await served.reload_if_changed() is False
    self_signed(tmp_path)
    assert await served.reload_if_changed() is True
    assert presented(served.context) == der(files[0]) != first
    assert await served.reload_if_changed() is False


@pytest.mark.parametrize("broken", ["key of another", "half a file", "no certificate", "no file"])
async def test_a_broken_pair_is_logged_once_and_the_old_one_stays(tmp_path: Path, broken: str) -> None:
    certificate, key = self_signed(tmp_path)
    first, served = der(certificate), ServerCertificate(certificate, key)
    kept = key.read_bytes()
    self_signed(tmp_path)
    whole = certificate.read_bytes(), key.read_bytes()
    match broken:
        case "key of another":
            key.write_bytes(kept)
        case "half a file":
            certificate.write_bytes(whole[0][: len(whole[0]) // 2])
        case "no certificate":
            certificate.write_text("nonsense")
        case "no file":
            certificate.unlink()
    with capture_logs() as logged:
        for _ in range(3):
            assert await served.reload_if_changed() is False
    assert [each["event"] for each in logged] == ["certificate cannot be used, the old one stays"]
    assert presented(served.context) == first
    certificate.write_bytes(whole[0])
    key.write_bytes(whole[1])
    assert await served.reload_if_changed() is True
    assert presented(served.context) == der(certificate) != first


def test_at_the_start_a_broken_pair_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="TLS certificate and key cannot be used"):
        ServerCertificate(tmp_path / "absent.crt", tmp_path / "absent.key")
