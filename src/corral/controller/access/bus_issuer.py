"""Bus credentials for nodes and gateways, and their end.

Three ways to run the bus (docs/explanation/design.md#bus-users): the embedded server whose keys we hold, an external
server whose account seed we were given, or plain shared credentials, which isolate no node and must be enabled.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

from corral.bus.auth import MintedUser, mint_gateway_credentials, mint_node_credentials, node_user_key
from corral.contract.messages.nodes import BusAccess
from corral.kit.clock import Clock

_REPLY_SLACK_S = 300.0


@dataclass(frozen=True)
class BusEndpoint:
    """Where others reach the bus. `{host}` in a URL stands for the host they used to reach us."""

    urls: tuple[str, ...]
    ca_pem: str = ""


@dataclass(frozen=True)
class SharedUser:
    user: str
    password: str


class BusIssuer:
    def __init__(
        self,
        place: BusEndpoint,
        clock: Clock,
        *,
        account_seed: str = "",
        shared: SharedUser | None = None,
        ttl_s: float,
        install_timeout_s: float,
    ) -> None:
        self._place = place
        self._clock = clock
        self._account_seed = account_seed
        self._shared = shared
        self._ttl_s = ttl_s
        self._reply_ttl_s = install_timeout_s + _REPLY_SLACK_S

    @property
    def isolates(self) -> bool:
        """Whether one node is kept from another's subjects."""
        return bool(self._account_seed)

    def for_node(self, node_id: str, generation: str, *, localai: bool) -> MintedUser | None:
        """`generation` is the hash of the node's token: with a new token it is another user on the bus, so ending the
        old one's credentials never touches the new one's."""
        if not self._account_seed:
            return None
        return mint_node_credentials(
            self._account_seed,
            node_id,
            generation=generation,
            now=self._clock.now(),
            ttl_s=self._ttl_s,
            reply_ttl_s=self._reply_ttl_s,
            localai=localai,
        )

    def for_gateway(self, name: str) -> MintedUser | None:
        if not self._account_seed:
            return None
        return mint_gateway_credentials(self._account_seed, name, now=self._clock.now(), ttl_s=self._ttl_s)

    def user_key(self, node_id: str, generation: str) -> str:
        """What to revoke when the node goes; empty where nothing can be revoked."""
        return node_user_key(self._account_seed, node_id, generation) if self._account_seed else ""

    def access(self, minted: MintedUser | None, reached_us_at: str) -> BusAccess:
        urls = tuple(with_host(url, reached_us_at) for url in self._place.urls)
        if minted is None and self._shared is not None:
            return BusAccess(urls=urls, ca=self._place.ca_pem, user=self._shared.user, password=self._shared.password)
        return BusAccess(urls=urls, ca=self._place.ca_pem, inbox=minted.inbox if minted else "")


def with_host(url: str, reached_us_at: str) -> str:
    """Fill `{host}` with the host part of what the other side called us."""
    if "{host}" not in url:
        return url
    try:
        host = urlsplit(f"//{reached_us_at}").hostname or "127.0.0.1"
    except ValueError:  # a Host header is anybody's text
        host = "127.0.0.1"
    return url.replace("{host}", f"[{host}]" if ":" in host else host)


def split_user(url: str) -> tuple[str, SharedUser | None]:
    """A bus URL without its credentials, and these apart: they are handed out on purpose, not by accident."""
    parts = urlsplit(url)
    if parts.username is None:
        return url, None
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=host)), SharedUser(parts.username, parts.password or "")
