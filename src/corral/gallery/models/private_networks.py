"""Whom an index written by somebody else may send us to: not into our own network
(docs/reference/wire/gallery.md#model-entry)."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from urllib.parse import urlsplit

from corral.kit.errors import Invalid


async def refuse_private(url: str) -> None:
    """Raises Invalid for a host that is, or resolves to, an address that is not everybody's.

    A name could resolve to something else a moment later; whoever can do that already has an index that was configured
    by hand. A name nobody here can resolve may be one for a proxy: whoever asks for it finds out."""
    host = urlsplit(url).hostname or ""
    try:
        addresses = [host] if _is_address(host) else await _resolve(host)
    except OSError:
        return
    if any(not ipaddress.ip_address(address.partition("%")[0]).is_global for address in addresses):
        raise Invalid(f"{host} is in a private network: a gallery elsewhere may not send us there")


def same_host(url: str, other: str) -> bool:
    """Whoever serves the index may serve what it refers to."""
    return bool(urlsplit(url).hostname) and urlsplit(url).hostname == urlsplit(other).hostname


async def _resolve(host: str) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [str(place[4][0]) for place in found]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
