"""What a LocalAI worker calls its processes, and where they are (docs/reference/wire/processes.md#process-key).
Pure."""

from __future__ import annotations

from urllib.parse import urlsplit

from corral.kit.errors import Failed
from corral.kit.hosts import is_loopback

_NOT_IN_AN_ADDRESS = frozenset("/\\?#@ \"'<>%,")


def process_key(model: str, replica: int) -> str:
    return f"{model}#{replica}"


def port_of(address: str) -> int | None:
    """None: that is no address."""
    try:
        return urlsplit(f"//{address}").port
    except ValueError:
        return None


def reachable_address(reported: str, node_address: str) -> str:
    """Where a process is, from what its worker answered. It answers nothing when it means its own address, and the
    loopback when it could not make sense of how it is to be reached. Raises Failed for what is no address at all."""
    address = reported or node_address
    port = port_of(address)
    if port is None or _NOT_IN_AN_ADDRESS & set(address) or not address.isprintable():
        raise Failed(f"its worker says that the process is at {address[:100]!r}, and that is no host:port")
    host, own = urlsplit(f"//{address}").hostname or "", urlsplit(f"//{node_address}").hostname or ""
    if not host or (is_loopback(host) and own and not is_loopback(own)):
        host = own
    if not host:
        raise Failed(f"its worker says that the process is at {address[:100]!r}, and nobody knows on which host")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
