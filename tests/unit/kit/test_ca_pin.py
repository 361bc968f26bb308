"""A pinned CA: spellings of the pin, bundles, and certificates that do not match."""

from __future__ import annotations

import hashlib

import pytest
from cryptography.hazmat.primitives.serialization import Encoding

from corral.kit.ca_pin import find_pinned, normalize_pin
from corral.kit.certificates import fingerprint
from corral.kit.errors import Denied
from tests.support.certificates import TestCa


def test_the_pin_is_the_sha256_of_the_certificates_der() -> None:
    ca = TestCa()
    pin = "sha256:" + hashlib.sha256(ca.certificate.public_bytes(Encoding.DER)).hexdigest()
    assert fingerprint(ca.pem) == pin
    assert find_pinned(ca.pem.encode(), pin) == ca.pem


def test_the_pin_in_other_spellings_and_in_a_bundle() -> None:
    ca, other = TestCa(), TestCa()
    digits = fingerprint(ca.pem).removeprefix("sha256:").upper()
    spelled = "sha256:" + ":".join(digits[at : at + 2] for at in range(0, 64, 2))
    assert normalize_pin(spelled) == fingerprint(ca.pem)
    assert find_pinned((other.pem + ca.pem).encode(), spelled) == ca.pem


@pytest.mark.parametrize("pin", ["", "sha256:", "sha256:abc", "sha256:" + "g" * 64, "ab" * 32])
def test_a_text_that_is_no_pin(pin: str) -> None:
    with pytest.raises(ValueError, match="64 hexadecimal digits"):
        normalize_pin(pin)


@pytest.mark.parametrize("offered", [b"", b"<html>sign in to the hotel's network</html>"])
def test_no_certificate_is_no_ca(offered: bytes) -> None:
    with pytest.raises(Denied, match="no certificate"):
        find_pinned(offered, "sha256:" + "00" * 32)


def test_another_ca_is_refused_with_both_fingerprints() -> None:
    ca, other = TestCa(), TestCa()
    with pytest.raises(Denied) as caught:
        find_pinned(other.pem.encode(), fingerprint(ca.pem))
    assert fingerprint(ca.pem) in caught.value.message
    assert fingerprint(other.pem) in caught.value.message
    assert "\n" not in caught.value.message
