"""How often one address may try a key. Pure: the caller says what time it is.

The keys are far too long to guess; this keeps a guesser from filling the log and the database's time.
"""

from __future__ import annotations

import ipaddress
from collections import OrderedDict


class Attempts:
    """`burst` tries at once, then one every `every_s`. Remembers at most `addresses` of them, the latest."""

    def __init__(self, *, burst: int = 10, every_s: float = 6.0, addresses: int = 4096) -> None:
        self._burst_s = burst * every_s
        self._every_s = every_s
        self._addresses = addresses
        self._paid_until: OrderedDict[str, float] = OrderedDict()  # when the address's tries would be forgotten

    def spend(self, address: str, now: float) -> float:
        """Take one try. More than zero: none is left, come back in so many seconds. Taken before the key is looked at,
        so that a thousand tries at the same moment are counted too."""
        who = network_of(address)
        paid_until = max(self._paid_until.get(who, now), now) + self._every_s
        if paid_until - now > self._burst_s:
            return paid_until - now - self._burst_s
        self._paid_until[who] = paid_until
        self._paid_until.move_to_end(who)
        while len(self._paid_until) > self._addresses:
            self._paid_until.popitem(last=False)
        return 0.0

    def give_back(self, address: str) -> None:
        """The key was right: only failures count."""
        who = network_of(address)
        if who in self._paid_until:
            self._paid_until[who] -= self._every_s

    def __len__(self) -> int:
        return len(self._paid_until)


def network_of(address: str) -> str:
    """Whoever has one IPv6 address has the 2⁶⁴ around it, so those count as one."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return ""
    if ip.version == 6:
        return str(ip.ipv4_mapped) if ip.ipv4_mapped else str(ipaddress.ip_network((ip, 64), strict=False))
    return str(ip)
