"""Controller-signed tokens that callers show at a worker's ingress (docs/reference/wire/files.md#access-tokens).
Signing itself is `kit/signing.py`."""

from __future__ import annotations

from enum import StrEnum

from corral.contract.codec import Message, always

ANY_NODE = "*"
CONTROLLERS = "controllers"  # audience of tokens that open controllers' own listeners, and no node's
LONGEST_LIFE_S = 3600
PEER_LIFE_S = 300  # of tokens that one worker shows to another


class Scope(StrEnum):
    REPLICAS = "replicas"
    BLOBS = "blobs"
    LOGS = "logs"
    FILES = "files"
    PROBE = "probe"  # "is it you?": lets the controller check that an ingress is the node it should be


class AccessClaims(Message, frozen=True):
    sub: str = always(str)  # who shows it: `gateway`, `controller`, a node id
    aud: str = always(str)  # the node it is for, or `*`
    scope: tuple[str, ...] = always(tuple)
    exp: int = always(int)  # seconds since the epoch, on the controllers' clock
    credential: str = ""  # of tokens made for a node: which of its credentials it held then; they end together
    digests: tuple[str, ...] = ()  # of tokens that a worker shows to another: the blobs that it may read there


def refusal(claims: AccessClaims, *, node: str, scope: Scope, now: float) -> str | None:
    """Why a token with these claims is refused for the node and the scope; None when it is accepted."""
    if claims.aud not in (ANY_NODE, node):
        return "the token is for another node"
    if scope not in claims.scope:
        return f"the token does not allow {scope.value}"
    if claims.exp <= now:
        return "the token has expired"
    if claims.exp > now + LONGEST_LIFE_S + 300:  # 5 min for clocks: a token for ever must not pass
        return "the token lives longer than any we sign"
    return None
