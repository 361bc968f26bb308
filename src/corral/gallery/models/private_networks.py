"""Keeps URLs in untrusted indexes out of private networks (docs/reference/wire/gallery.md#model-entry)."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from urllib.parse import urlsplit

from corral.kit.errors import Invalid
from corral.kit.hosts import is_address


async def refuse_private(url: str) -> None:
    """Raises Invalid for a host that is, or resolves to, an address that is not global.

    A name could resolve to another address a moment later; only the owner of a configured index could make use of that.
    A name that cannot be resolved here is accepted: a proxy may resolve it."""
    host = urlsplit(url).hostname or ""
    try:
        addresses = [host] if is_address(host) else await _resolve(host)
    except OSError:
        return
    if any(not ipaddress.ip_address(address.partition("%")[0]).is_global for address in addresses):
        raise Invalid(f"{host} is in a private network: a gallery on another host must not refer to it")


def same_host(url: str, other: str) -> bool:
    """Whether both URLs have the same host: the host of an index may serve its documents."""
    return bool(urlsplit(url).hostname) and urlsplit(url).hostname == urlsplit(other).hostname


async def _resolve(host: str) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [str(place[4][0]) for place in found]
