"""Verifies the tokens of requests. The controller signs them (docs/reference/wire/files.md#access-tokens); the ingress
verifies each once and caches it until it expires, so a later request costs a dict lookup. Expiry times are on the
controller's clock, not this machine's."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass

from corral.contract.access import LONGEST_LIFE_S, AccessClaims, Scope, refusal
from corral.contract.codec import Undecodable, decode
from corral.kit.log import get_log
from corral.kit.signing import BadSignature, Verifier

log = get_log(__name__)
MAX_TOKEN_LENGTH = 4096  # bytes; ours have about 250
_SHARED_TOKEN_SCOPES = (Scope.FILES, Scope.LOGS)


@dataclass(frozen=True)
class TokenRejected:
    status: int
    why: str


class TokenVerifier:
    def __init__(self, now: Callable[[], float], *, max_cached: int = 1024) -> None:
        """`now` is the controller's clock in seconds since the epoch."""
        self._now = now
        self._max_cached = max_cached
        self._node_id = ""
        self._signing_key = ""
        self._verifier: Verifier | None = None
        self._verified: dict[bytes, AccessClaims] = {}  # oldest first
        self._shared = b""

    def share(self, token: str) -> None:
        """A LocalAI controller signs no tokens: it sends the fleet's registration token
        (docs/reference/wire/files.md#authentication). Empty, as for a Corral controller: no shared token."""
        self._shared = token.encode()

    def trust(self, signing_key: str, node_id: str) -> None:
        """Verify tokens for this node with this key from now on. Another key or node clears the cache."""
        if not signing_key or (signing_key, node_id) == (self._signing_key, self._node_id):
            return
        try:
            verifier = Verifier(signing_key)
        except BadSignature as error:
            log.error("the cluster's signing key cannot be used", reason=str(error))
            return
        self._verifier, self._signing_key, self._node_id = verifier, signing_key, node_id
        self._verified.clear()

    def valid_for_s(self, authorization: bytes, scope: Scope) -> float:
        """How long this token is still valid for this scope; 0: it is not."""
        if self.check(authorization, scope) is not None:
            return 0.0
        claims = self._verified.get(_bearer(authorization))
        return 0.0 if claims is None else max(0.0, claims.exp - self._now())

    def claims(self, authorization: bytes) -> AccessClaims | None:
        """The claims of a token that `check` accepted; None for another."""
        return self._verified.get(_bearer(authorization))

    def check(self, authorization: bytes | None, scope: Scope | None) -> TokenRejected | None:
        """None when the token is valid for this scope. Without a scope, any token for this node is."""
        if authorization is None:
            return TokenRejected(401, "a token is needed: Authorization: Bearer …")
        token = _bearer(authorization)
        if self._shared and scope in _SHARED_TOKEN_SCOPES and hmac.compare_digest(token, self._shared):
            return None
        if self._shared and self._verifier is None:
            return TokenRejected(401, "the token is not the registration token of the LocalAI fleet")
        claims = self._verified.get(token)
        if claims is None:
            found = self._verify(token)
            if isinstance(found, TokenRejected):
                return found
            claims = found
        now = self._now()
        why = refusal(claims, node=self._node_id, scope=scope or _first_scope(claims), now=now)
        if why is None:
            return None
        out_of_time = not now < claims.exp <= now + LONGEST_LIFE_S
        return TokenRejected(401 if out_of_time else 403, why)

    def _verify(self, token: bytes) -> AccessClaims | TokenRejected:
        if self._verifier is None:
            return TokenRejected(503, "this worker has not joined a cluster yet")
        if not token or len(token) > MAX_TOKEN_LENGTH:
            return TokenRejected(401, "the token is malformed")
        try:
            claims = decode(AccessClaims, self._verifier.verify(token.decode("ascii", "replace")))
        except (BadSignature, Undecodable):
            return TokenRejected(401, "the token was not signed by this cluster")
        self._cache(token, claims)
        return claims

    def _cache(self, token: bytes, claims: AccessClaims) -> None:
        """Cache a verified token. Only signed tokens get here, so a stranger cannot evict valid ones."""
        if len(self._verified) >= self._max_cached:
            now = self._now()
            self._verified = {known: cached for known, cached in self._verified.items() if cached.exp > now}
            while len(self._verified) >= self._max_cached:
                del self._verified[next(iter(self._verified))]
        self._verified[token] = claims


def _bearer(authorization: bytes) -> bytes:
    scheme, _, token = authorization.partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else b""


def _first_scope(claims: AccessClaims) -> Scope:
    """A scope of the token; if it has none that we know, one that allows nothing here."""
    return next((scope for scope in Scope if scope.value in claims.scope), Scope.PROBE)
