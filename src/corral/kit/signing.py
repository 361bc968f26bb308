"""Ed25519 signatures over small JSON claims: `base64url(claims).base64url(signature)`.

There is one algorithm, and no header that could select another.
"""

from __future__ import annotations

import base64
import binascii

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat


class BadSignature(Exception):
    """The text was not signed by this key, or is not a signed text."""


class Signer:
    def __init__(self, private_key_text: str) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(_decode(private_key_text))

    @staticmethod
    def new_private_key() -> str:
        key = Ed25519PrivateKey.generate()
        return _encode(key.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption()))

    @property
    def public_key(self) -> str:
        return _encode(self._key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw))

    def sign(self, claims: bytes, *, domain: bytes = b"") -> str:
        """`domain` is signed with the claims, and not part of the text: only who names the same domain accepts it."""
        return f"{_encode(claims)}.{_encode(self._key.sign(domain + claims))}"


class Verifier:
    def __init__(self, public_key_text: str) -> None:
        try:
            self._key = Ed25519PublicKey.from_public_bytes(_decode(public_key_text))
        except ValueError as error:
            raise BadSignature("not an ed25519 public key") from error

    def verify(self, text: str, *, domain: bytes = b"") -> bytes:
        """The claims' bytes, exactly as signed. Raises BadSignature."""
        claims_part, _, signature_part = text.partition(".")
        try:
            claims, signature = _decode(claims_part), _decode(signature_part)
            self._key.verify(signature, domain + claims)
        except (ValueError, binascii.Error, InvalidSignature) as error:
            raise BadSignature("the token was not signed by this cluster") from error
        return claims


def read_claims(text: str) -> bytes:
    """The claims of a signed text, without a check of the signature. Raises BadSignature for another text."""
    try:
        return _decode(text.partition(".")[0])
    except (ValueError, binascii.Error) as error:
        raise BadSignature("this is no signed text") from error


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _decode(text: str) -> bytes:
    try:
        raw = text.encode("ascii")
    except UnicodeEncodeError as error:
        raise ValueError("not base64") from error
    return base64.b64decode(raw + b"=" * (-len(raw) % 4), altchars=b"-_", validate=True)
