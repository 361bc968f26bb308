"""Operator, account and user tokens: who issues what to whom, and for how long.

Pure: the caller passes the time as `now`. Node and gateway users have keys derived from the account's seed and their
name, so any controller that holds the seed can mint, renew and revoke them without a table of keys. Files are
read and written by `keys.py`; `revocation.py` pushes accounts to the server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from corral.bus.api import BusCredentials
from corral.bus.jwt import BadKey, KeyKind, decode_claims, derive_seed, encode_token, new_seed, public_key
from corral.bus.permissions import (
    EVERYTHING,
    INBOX,
    Permissions,
    gateway_inbox,
    gateway_permissions,
    inbox_prefix,
    localai_node_permissions,
    node_permissions,
    service_permissions,
    system_permissions,
)

SERVICE = "service"
SYSTEM = "system"
_NO_LIMIT = -1


@dataclass(frozen=True)
class BusKeys:
    """Everything the embedded server's owner holds. Seeds never leave the controller's secrets folder."""

    operator_seed: str = field(repr=False)
    operator_jwt: str = field(repr=False)  # kept as text: a running server refuses an operator that changed
    account_seed: str = field(repr=False)
    system_account_seed: str = field(repr=False)
    system_user_seed: str = field(repr=False)
    service_user_seed: str = field(repr=False)

    @staticmethod
    def generate(random_bytes: Callable[[int], bytes], now: datetime) -> BusKeys:
        operator = new_seed(KeyKind.OPERATOR, random_bytes)
        system_account = new_seed(KeyKind.ACCOUNT, random_bytes)
        return BusKeys(
            operator_seed=operator,
            operator_jwt=operator_jwt(operator, public_key(system_account), now),
            account_seed=new_seed(KeyKind.ACCOUNT, random_bytes),
            system_account_seed=system_account,
            system_user_seed=new_seed(KeyKind.USER, random_bytes),
            service_user_seed=new_seed(KeyKind.USER, random_bytes),
        )

    @property
    def account(self) -> str:
        return public_key(self.account_seed)

    @property
    def system_account(self) -> str:
        return public_key(self.system_account_seed)


@dataclass(frozen=True)
class MintedUser:
    """Credentials for one user, with their key, inbox and lifetime."""

    jwt: str = field(repr=False)
    seed: str = field(repr=False)
    public_key: str
    inbox: str
    expires_in_s: float | None

    def credentials(self) -> BusCredentials:
        return BusCredentials(jwt=self.jwt, seed=self.seed, expires_in_s=self.expires_in_s)


def operator_jwt(operator_seed: str, system_account: str, now: datetime) -> str:
    key = public_key(operator_seed)
    nats = {"type": "operator", "version": 2, "system_account": system_account}
    return encode_token({"sub": key, "name": "corral", "iat": _unix(now), "nats": nats}, operator_seed)


def account_jwt(
    operator_seed: str,
    account: str,
    *,
    name: str,
    now: datetime,
    revocations: Mapping[str, int] | None = None,
) -> str:
    """`revocations`: user key → unix time; the server refuses that user's tokens issued up to then."""
    nats: dict[str, Any] = {"type": "account", "version": 2, "limits": _ACCOUNT_LIMITS}
    if revocations:
        nats["revocations"] = dict(revocations)
    return encode_token({"sub": account, "name": name, "iat": _unix(now), "nats": nats}, operator_seed)


def revise_account_jwt(current: str, operator_seed: str, *, now: datetime, revocations: Mapping[str, int]) -> str:
    """The same account with other revocations. For accounts that another tool made: all other claims are kept."""
    claims = decode_claims(current)
    claims["nats"] = {**claims["nats"], "revocations": dict(revocations)}
    claims["iat"] = _unix(now)
    return encode_token(claims, operator_seed)


def user_jwt(
    account_seed: str,
    user: str,
    permissions: Permissions,
    *,
    name: str,
    now: datetime,
    ttl_s: float | None,
) -> str:
    nats: dict[str, Any] = {
        "type": "user",
        "version": 2,
        "pub": _allow(permissions.publish),
        "sub": _allow(permissions.subscribe, deny=permissions.denied_subscriptions),
        "subs": _NO_LIMIT,
        "data": _NO_LIMIT,
        "payload": _NO_LIMIT,
        "allowed_connection_types": ["STANDARD"],
    }
    if permissions.reply_ttl_s:
        nats["resp"] = {"max": 1, "ttl": round(permissions.reply_ttl_s * 1_000_000_000)}
    claims: dict[str, Any] = {"sub": user, "name": name, "iat": _unix(now), "nats": nats}
    if ttl_s is not None:
        claims["exp"] = _unix(now) + round(ttl_s)
    return encode_token(claims, account_seed)


def mint_node_credentials(
    account_seed: str,
    node_id: str,
    *,
    now: datetime,
    ttl_s: float,
    reply_ttl_s: float,
    localai: bool = False,
    generation: str = "",
) -> MintedUser:
    """For one node. `reply_ttl_s` is the longest time between an order and its reply. Another `generation`
    is another user: a revocation of one does not affect the other."""
    if localai:
        permissions = localai_node_permissions(node_id, reply_ttl_s=reply_ttl_s)
    else:
        permissions = node_permissions(node_id, reply_ttl_s=reply_ttl_s)
    seed = _node_seed(account_seed, node_id, generation)
    inbox = "" if localai else inbox_prefix(node_id)
    name = f"corral-node-{node_id}"
    return _mint(account_seed, seed, name, permissions, inbox=inbox, now=now, ttl_s=ttl_s)


def mint_gateway_credentials(account_seed: str, name: str, *, now: datetime, ttl_s: float) -> MintedUser:
    seed = derive_seed(account_seed, "gateway", name)
    permissions, inbox = gateway_permissions(name), gateway_inbox(name)
    return _mint(account_seed, seed, f"corral-gateway-{name}", permissions, inbox=inbox, now=now, ttl_s=ttl_s)


def mint_service_credentials(
    account_seed: str,
    user_seed: str,
    *,
    now: datetime,
    ttl_s: float | None,
    reply_ttl_s: float,
    name: str = SERVICE,
) -> MintedUser:
    """For controllers."""
    permissions = service_permissions(name, reply_ttl_s=reply_ttl_s)
    inbox = inbox_prefix(name)
    return _mint(account_seed, user_seed, f"corral-{name}", permissions, inbox=inbox, now=now, ttl_s=ttl_s)


def mint_system_credentials(keys: BusKeys, *, now: datetime, ttl_s: float | None) -> MintedUser:
    """For pushing the account to the server."""
    permissions, inbox = system_permissions(SYSTEM), inbox_prefix(SYSTEM)
    account_seed, seed = keys.system_account_seed, keys.system_user_seed
    return _mint(account_seed, seed, f"corral-{SYSTEM}", permissions, inbox=inbox, now=now, ttl_s=ttl_s)


def inbox_of(user_jwt: str) -> str:
    """The inbox to which a foreign token lets its user subscribe: the one in its allow list, else the default.
    Raises `BadKey` for a token that is not a user's."""
    nats = decode_claims(user_jwt).get("nats")
    if not isinstance(nats, dict) or nats.get("type") != "user":
        raise BadKey("this token is not a user's")
    allowed = (nats.get("sub") or {}).get("allow") or []
    own = [subject.removesuffix(".>") for subject in allowed if subject.startswith(f"{INBOX}_")]
    return own[0] if own else INBOX


def node_user_key(account_seed: str, node_id: str, generation: str = "") -> str:
    """The key to revoke for a node. All credentials of one generation of the node have this key."""
    return public_key(_node_seed(account_seed, node_id, generation))


def _node_seed(account_seed: str, node_id: str, generation: str) -> str:
    return derive_seed(account_seed, "node", node_id, *((generation,) if generation else ()))


def gateway_user_key(account_seed: str, name: str) -> str:
    return public_key(derive_seed(account_seed, "gateway", name))


def _mint(
    account_seed: str,
    user_seed: str,
    name: str,
    permissions: Permissions,
    *,
    inbox: str,
    now: datetime,
    ttl_s: float | None,
) -> MintedUser:
    user = public_key(user_seed)
    # The server counts in whole seconds; `expires_in_s` must not be longer than the server's lifetime.
    expires_in_s = None if ttl_s is None else max(0.0, _unix(now) + round(ttl_s) - now.timestamp())
    return MintedUser(
        jwt=user_jwt(account_seed, user, permissions, name=name, now=now, ttl_s=ttl_s),
        seed=user_seed,
        public_key=user,
        inbox=inbox,
        expires_in_s=expires_in_s,
    )


def _allow(subjects: tuple[str, ...], *, deny: tuple[str, ...] = ()) -> dict[str, list[str]]:
    if not subjects:
        return {"deny": [EVERYTHING]}
    return {"allow": list(subjects), **({"deny": list(deny)} if deny else {})}


def _unix(moment: datetime) -> int:
    return int(moment.timestamp())


# An absent limit is 0 to the server, and 0 connections would refuse everybody. Corral uses no leaf nodes, imports or
# exports.
_ACCOUNT_LIMITS: Mapping[str, Any] = {
    "conn": _NO_LIMIT,
    "data": _NO_LIMIT,
    "payload": _NO_LIMIT,
    "subs": _NO_LIMIT,
    "imports": 0,
    "exports": 0,
    "leaf": 0,
    "wildcards": True,
    "disallow_bearer": True,
}
