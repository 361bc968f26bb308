"""The addresses of a node: as a person configured them, else as the controller saw them. Pure.

A node reports its addresses itself, and the controller and the gateways open URLs made of them. So an address is a host
and a port, without any part that could be read as a path, a query or credentials.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from corral.contract.messages.nodes import RegisterNode
from corral.kit.errors import Invalid

_NOT_IN_AN_ADDRESS = frozenset("/\\?#@ \"'<>")


def check_address(what: str, text: str) -> None:
    if not text.isprintable():
        raise Invalid(f"{what} must not hold control characters")
    if _NOT_IN_AN_ADDRESS & set(text):
        raise Invalid(f"{what} {text[:100]!r} is not HOST or HOST:PORT")


def place_of(offer: RegisterNode, seen_from: str, *, has_ca: bool) -> dict[str, Any]:
    """Columns to write; whether the ingress answers there is found out anew."""
    if offer.ingress is None:
        url = f"http://{offer.http_address}" if offer.http_address else ""
        return {"address": offer.address, "ingress_url": url, "ingress_ok": None, "ingress_error": ""}
    host, port = _host_and_port(offer.ingress.advertise, seen_from or "127.0.0.1", offer.ingress.port)
    scheme = "https" if offer.ingress.tls or (offer.ingress.csr and has_ca) else "http"
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return {
        "address": offer.address or place,
        "http_address": offer.http_address or place,
        "ingress_url": f"{scheme}://{place}",
        "ingress_ok": None,
        "ingress_error": "",
    }


def _host_and_port(advertise: str, seen_from: str, port: int) -> tuple[str, int]:
    if not advertise:
        return seen_from, port
    check_address("ingress.advertise", advertise)
    try:
        parts = urlsplit(f"//{advertise}")
        return parts.hostname or seen_from, parts.port or port
    except ValueError as error:
        raise Invalid(f"ingress.advertise {advertise[:100]!r} is not HOST or HOST:PORT") from error
