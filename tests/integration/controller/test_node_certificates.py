"""What a node's certificate says, and that nobody can use it to stand in for somebody else."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from corral.contract.messages.nodes import IngressOffer
from corral.kit.certificates import Ca, make_ca, new_key, subject_names
from tests.support.registry import caller, open_registry
from tests.support.sqlite import sqlite_url


def request_pem(*names: str) -> str:
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(n) for n in names]), critical=False)
    return builder.sign(new_key(), hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()


@pytest.mark.parametrize(
    ("name", "advertise"),
    [("gateway.lan", ""), ("barn", "gateway.lan:50050"), ("10.0.0.1", "10.0.0.1"), ("ü" * 200, "")],
)
async def test_a_certificate_is_for_the_nodes_id_whatever_it_calls_itself(
    tmp_path: Path, name: str, advertise: str
) -> None:
    """Names and addresses are the node's own word. A certificate for the gateway's name would let an approved node
    answer in its place to everybody who pinned the CA."""
    made = make_ca("test", datetime.now(UTC))
    ca = Ca(made.certificate_pem, made.key_pem)
    async with open_registry(sqlite_url(tmp_path), ca=ca) as registry:
        offer = IngressOffer(port=50050, advertise=advertise, csr=request_pem("gateway.lan"))
        told = await registry.join(name, pre_approved=True, ingress=offer)
        assert told.ingress is not None
        assert subject_names(told.ingress.certificate) == {told.id}
        again = await registry.node_api.refresh(told.id, request_pem("gateway.lan"), caller(told.node_token))
        assert again.ingress is not None
        assert subject_names(again.ingress.certificate) == {told.id}


async def test_a_pending_node_gets_no_certificate(tmp_path: Path) -> None:
    made = make_ca("test", datetime.now(UTC))
    ca = Ca(made.certificate_pem, made.key_pem)
    async with open_registry(sqlite_url(tmp_path), ca=ca) as registry:
        told = await registry.join("barn", ingress=IngressOffer(port=50050, csr=request_pem()))
        assert told.status == "pending"
        assert told.ingress is not None
        assert told.ingress.certificate == ""
