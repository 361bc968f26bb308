"""Addresses of hosts: `host:port` as people write it, loopback, URLs without encryption. Pure."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit


def is_loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_address(host: str) -> bool:
    """Whether this is an IP address, not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_in_clear(url: str) -> bool:
    """Whether requests to this URL cross a network without encryption."""
    return url.startswith("http://") and not is_loopback(urlsplit(url).hostname or "")


@dataclass(frozen=True)
class HostPort:
    host: str
    port: int | None
    is_chosen: bool = True  # by a person; else another port will do when this one is in use

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port is None else f"{host}:{self.port}"


def parse_host_port(text: str) -> HostPort:
    """`host`, `host:port`, `:port`, `[v6]:port` or a bare IPv6 address. Raises ValueError with a sentence."""
    text = text.strip()
    if not text or any(letter in text for letter in "/@?# \t\\"):
        raise ValueError(f"{text!r} is not an address; write host or host:port")
    if text.count(":") > 1 and not text.startswith("["):
        return HostPort(_checked_v6(text), None)
    if text.startswith("["):
        host, closing, rest = text[1:].partition("]")
        if not closing or (rest and not rest.startswith(":")):
            raise ValueError(f"{text!r} is not an address; write [IPv6]:port")
        return HostPort(_checked_v6(host), _read_port(rest[1:], text) if rest else None)
    host, colon, digits = text.partition(":")
    return HostPort(host, _read_port(digits, text) if colon else None)


def _checked_v6(host: str) -> str:
    try:
        return str(ipaddress.IPv6Address(host))
    except ValueError:
        raise ValueError(f"{host!r} is not an IPv6 address") from None


def _read_port(digits: str, whole: str) -> int:
    if not digits.isascii() or not digits.isdigit() or int(digits) > 65535:
        raise ValueError(f"{whole!r} has no usable port; write host:port with a port up to 65535")
    return int(digits)
