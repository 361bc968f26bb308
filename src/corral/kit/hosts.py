"""Is it this machine, and can others read what is said there? Pure."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit


def is_loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_in_clear(url: str) -> bool:
    """Whether what is said to this URL can be read on a network."""
    return url.startswith("http://") and not is_loopback(urlsplit(url).hostname or "")
