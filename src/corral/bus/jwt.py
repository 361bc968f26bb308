"""Keys and tokens of NATS' decentralised auth, without `nsc`: seeds, public keys, signed claims.

Pure: the caller passes randomness and time. `auth.py` decides what the claims say.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_SEED = 18 << 3  # the first byte of a seed: it makes the text start with S
_HEADER = {"typ": "JWT", "alg": "ed25519-nkey"}


class KeyKind(IntEnum):
    """The byte that makes a public key start with O, A or U and a seed with SO, SA or SU."""

    OPERATOR = 14 << 3
    ACCOUNT = 0
    USER = 20 << 3


class BadKey(ValueError):
    """The text is not a seed or token, or has the wrong kind. The message never contains the text itself."""


def new_seed(kind: KeyKind, random_bytes: Callable[[int], bytes]) -> str:
    return seed_from_bytes(kind, random_bytes(32))


def seed_from_bytes(kind: KeyKind, raw: bytes) -> str:
    return _encode_key(bytes((_SEED | kind >> 5, (kind & 31) << 3)) + raw)


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
    kind, raw = _decode_seed(seed)
    return _encode_key(bytes((kind,)) + Ed25519PrivateKey.from_private_bytes(raw).public_key().public_bytes_raw())


def sign(seed: str, data: bytes) -> bytes:
    _, raw = _decode_seed(seed)
    return Ed25519PrivateKey.from_private_bytes(raw).sign(data)


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
        data = base64.b32decode(seed + "=" * (-len(seed) % 8))
    except (binascii.Error, ValueError) as error:
        raise BadKey("this is not an nkeys seed") from error
    body, checksum = data[:-2], data[-2:]
    if len(body) != 34 or _checksum(body) != checksum or body[0] & 0b11111000 != _SEED or body[1] & 7:
        raise BadKey("this is not an nkeys seed")
    return (body[0] & 7) << 5 | body[1] >> 3, body[2:]


def _encode_key(body: bytes) -> str:
    return _b32(body + _checksum(body))


def _checksum(body: bytes) -> bytes:
    """CRC-16/XMODEM, little-endian."""
    return binascii.crc_hqx(body, 0).to_bytes(2, "little")


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()


def _b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _b32(data: bytes) -> str:
    return base64.b32encode(data).decode().rstrip("=")
