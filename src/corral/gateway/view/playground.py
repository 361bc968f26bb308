"""Verifies tokens of the playground with the cluster's public key. Pure; `fleet.py` matches them with web sessions.

Only a secret that is no API key and begins like such a token comes here, so requests with API keys pay nothing.
"""

from __future__ import annotations

from corral.contract.codec import Undecodable, decode
from corral.contract.playground import AUDIENCE, LONGEST_LIFE_S, PlaygroundClaims, signed_part
from corral.kit.signing import BadSignature, Verifier

MAX_VERIFIED = 1024
_CLOCKS_S = 60  # for clocks that differ
_LONGEST = 1024  # of a token


class PlaygroundTokens:
    def __init__(self, signing_key: str) -> None:
        """Without a signing key no token is valid."""
        self._verifier = _verifier(signing_key)
        self._verified: dict[bytes, PlaygroundClaims] = {}

    def read(self, token: bytes, now: float) -> PlaygroundClaims | None:
        """The claims, of a token that may have expired; None: this cluster signs no such token."""
        claims = self._verified.get(token) or self._verify(token)
        if claims is None or claims.exp > now + LONGEST_LIFE_S + _CLOCKS_S:
            return None
        return claims

    def _verify(self, token: bytes) -> PlaygroundClaims | None:
        signed = signed_part(token.decode("latin-1")) if len(token) <= _LONGEST else None
        if signed is None or self._verifier is None:
            return None
        try:
            claims = decode(PlaygroundClaims, self._verifier.verify(signed))
        except (BadSignature, Undecodable):
            return None
        if claims.aud != AUDIENCE:  # signed by this cluster, for something else
            return None
        if len(self._verified) >= MAX_VERIFIED:
            self._verified.clear()
        self._verified[token] = claims
        return claims


def _verifier(signing_key: str) -> Verifier | None:
    try:
        return Verifier(signing_key) if signing_key else None
    except BadSignature:
        return None
