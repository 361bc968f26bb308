"""May this caller come in? Tokens are signed by the controller (docs/reference/wire/files.md#access-tokens); here they
are verified once and remembered until they expire, so that a warm request costs a dict lookup. Their clock is the
controller's, not this machine's."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass

from corral.contract.access import LONGEST_LIFE_S, AccessClaims, Scope, refusal
from corral.contract.codec import Undecodable, decode
from corral.kit.log import get_log
from corral.kit.signing import BadSignature, Verifier

log = get_log(__name__)
LONGEST_TOKEN = 4096  # bytes; ours have about 250
_FOR_SHARED = (Scope.FILES, Scope.LOGS)


@dataclass(frozen=True)
class NotWelcome:
    status: int
    why: str


class TokenCheck:
    def __init__(self, now: Callable[[], float], *, remembered: int = 1024) -> None:
        """`now` is the controller's clock in seconds since the epoch."""
        self._now = now
        self._room = remembered
        self._node_id = ""
        self._signing_key = ""
        self._verifier: Verifier | None = None
        self._verified: dict[bytes, AccessClaims] = {}  # oldest first
        self._shared = b""

    def share(self, token: str) -> None:
        """A LocalAI controller signs nothing: it shows the fleet's registration token
        (docs/reference/wire/files.md#authentication). Empty, as with a controller of ours, opens nothing."""
        self._shared = token.encode()

    def trust(self, signing_key: str, node_id: str) -> None:
        """From now on believe this key, and be this node. Another key or node forgets what the old one vouched for."""
        if not signing_key or (signing_key, node_id) == (self._signing_key, self._node_id):
            return
        try:
            verifier = Verifier(signing_key)
        except BadSignature as error:
            log.error("the cluster's signing key cannot be used", reason=str(error))
            return
        self._verifier, self._signing_key, self._node_id = verifier, signing_key, node_id
        self._verified.clear()

    def good_for_s(self, authorization: bytes, scope: Scope) -> float:
        """How long this caller may still come in for this; 0: not at all."""
        if self.check(authorization, scope) is not None:
            return 0.0
        claims = self._verified.get(_bearer(authorization))
        return 0.0 if claims is None else max(0.0, claims.exp - self._now())

    def check(self, authorization: bytes | None, scope: Scope | None) -> NotWelcome | None:
        """None when the caller may come in for this. Without a scope, any token for this node will do."""
        if authorization is None:
            return NotWelcome(401, "a token is needed: Authorization: Bearer …")
        token = _bearer(authorization)
        if self._shared and scope in _FOR_SHARED and hmac.compare_digest(token, self._shared):
            return None
        if self._shared and self._verifier is None:
            return NotWelcome(401, "the token is not the registration token of the LocalAI fleet")
        claims = self._verified.get(token)
        if claims is None:
            found = self._verify(token)
            if isinstance(found, NotWelcome):
                return found
            claims = found
        now = self._now()
        why = refusal(claims, node=self._node_id, scope=scope or _first_scope(claims), now=now)
        if why is None:
            return None
        out_of_time = not now < claims.exp <= now + LONGEST_LIFE_S
        return NotWelcome(401 if out_of_time else 403, why)

    def _verify(self, token: bytes) -> AccessClaims | NotWelcome:
        if self._verifier is None:
            return NotWelcome(503, "this worker has not joined a cluster yet")
        if not token or len(token) > LONGEST_TOKEN:
            return NotWelcome(401, "the token is not one of ours")
        try:
            claims = decode(AccessClaims, self._verifier.verify(token.decode("ascii", "replace")))
        except (BadSignature, Undecodable):
            return NotWelcome(401, "the token was not signed by this cluster")
        self._remember(token, claims)
        return claims

    def _remember(self, token: bytes, claims: AccessClaims) -> None:
        """Only what was signed gets here, so nobody outside can push the good ones out."""
        if len(self._verified) >= self._room:
            now = self._now()
            self._verified = {known: told for known, told in self._verified.items() if told.exp > now}
            while len(self._verified) >= self._room:
                del self._verified[next(iter(self._verified))]
        self._verified[token] = claims


def _bearer(authorization: bytes) -> bytes:
    scheme, _, token = authorization.partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else b""


def _first_scope(claims: AccessClaims) -> Scope:
    """A scope the token has; one that opens nothing here when it names none we know."""
    return next((scope for scope in Scope if scope.value in claims.scope), Scope.PROBE)
