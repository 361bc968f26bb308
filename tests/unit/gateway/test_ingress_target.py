"""What a node says of its address is read, or left alone; it never fails."""

from __future__ import annotations

import pytest

from corral.contract.http import Target
from corral.gateway.routing.replicas import ingress_target


def test_an_address() -> None:
    assert ingress_target("http://10.0.0.7:50050", "n1") == Target(host="10.0.0.7", port=50050)
    assert ingress_target("http://barn", "n1") == Target(host="barn", port=80)


def test_over_tls_the_certificate_is_for_the_node() -> None:
    assert ingress_target("https://[fd00::7]:9", "n1") == Target(host="fd00::7", port=9, tls=True, server_name="n1")


@pytest.mark.parametrize(
    "url", ["", "barn:50050", "ftp://barn", "http://", "http://barn:port", "http://[fd00::7", "http://[x]/"]
)
def test_what_is_no_address_is_nowhere(url: str) -> None:
    assert ingress_target(url, "n1") is None
