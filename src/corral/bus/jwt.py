"""Keys and tokens of NATS' decentralised auth, without `nsc`: seeds, public keys, signed claims.

Pure: the caller passes randomness and time. `auth.py` decides what the claims say.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any

import nkeys

_HEADER = {"typ": "JWT", "alg": "ed25519-nkey"}


class KeyKind(IntEnum):
    """The byte that makes a public key start with O, A or U and a seed with SO, SA or SU."""

    OPERATOR = nkeys.PREFIX_BYTE_OPERATOR
    ACCOUNT = nkeys.PREFIX_BYTE_ACCOUNT
    USER = nkeys.PREFIX_BYTE_USER


class BadKey(ValueError):
    """The text is not a seed or token, or has the wrong kind. The message never contains the text itself."""


def new_seed(kind: KeyKind, random_bytes: Callable[[int], bytes]) -> str:
    return seed_from_bytes(kind, random_bytes(32))


def seed_from_bytes(kind: KeyKind, raw: bytes) -> str:
    encoded: bytes = nkeys.encode_seed(raw, int(kind))
    return encoded.decode()


def derive_seed(parent_seed: str, *purpose: str) -> str:
    """A user's seed, derived from its account's seed and its name, so that it need not be stored.

    The holder of the account seed can sign any user anyway, so this reveals nothing; and the public key to revoke
    follows from the name.
    """
    _, raw = _decode_seed(parent_seed)
    label = "\0".join(("corral bus user", *purpose)).encode()
    return seed_from_bytes(KeyKind.USER, hmac.digest(raw, label, "sha256"))


def check_seed(seed: str, kind: KeyKind) -> None:
    """Raise `BadKey` unless this is a seed of that kind."""
    found, _ = _decode_seed(seed)
    if found != int(kind):
        raise BadKey(f"this seed is not an {kind.name.lower()} seed")


def public_key(seed: str) -> str:
    _decode_seed(seed)
    key: bytes = nkeys.from_seed(seed.encode()).public_key
    return key.decode()


def sign(seed: str, data: bytes) -> bytes:
    _decode_seed(seed)
    signature: bytes = nkeys.from_seed(seed.encode()).sign(data)
    return signature


def encode_token(claims: Mapping[str, Any], issuer_seed: str) -> str:
    """Sign claims that have no `iss` and `jti` yet. The id is a hash of the rest, as the NATS tools make it."""
    body = {**claims, "iss": public_key(issuer_seed), "jti": ""}
    body["jti"] = _b32(hashlib.new("sha512_256", _json(body)).digest())
    signed = f"{_b64(_json(_HEADER))}.{_b64(_json(body))}"
    return f"{signed}.{_b64(sign(issuer_seed, signed.encode()))}"


def decode_claims(token: str) -> dict[str, Any]:
    """The claims of a token. The signature is not checked: the server does that."""
    try:
        _, body, _ = token.split(".")
        claims = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
    except ValueError as error:
        raise BadKey("this is not a NATS token") from error
    if not isinstance(claims, dict):
        raise BadKey("this is not a NATS token")
    return claims


def _decode_seed(seed: str) -> tuple[int, bytes]:
    try:
        prefix, raw = nkeys.decode_seed(seed.encode())
    except (nkeys.NkeysError, ValueError, IndexError) as error:
        raise BadKey("this is not an nkeys seed") from error
    if len(raw) != 32:
        raise BadKey("this is not an nkeys seed")
    return int(prefix), bytes(raw)


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()


def _b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _b32(data: bytes) -> str:
    return base64.b32encode(data).decode().rstrip("=")
