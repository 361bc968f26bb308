"""Tokens that open a worker's ingress (docs/reference/wire/files.md#access-tokens), and those of the playground: signed
with the cluster's one key."""

from __future__ import annotations

from collections.abc import Iterable

from corral.contract.access import ANY_NODE, CONTROLLERS, LONGEST_LIFE_S, AccessClaims, Scope
from corral.contract.codec import encode
from corral.contract.playground import AUDIENCE, PlaygroundClaims, session_id, token_text
from corral.contract.playground import LONGEST_LIFE_S as PLAYGROUND_LIFE_S
from corral.controller.access.principal import Principal
from corral.kit.clock import Clock
from corral.kit.signing import Signer
from corral.store.engine.transactions import Store
from corral.store.tables import cluster_secrets

_SECRET = "signing_key"


class IngressTokens:
    def __init__(self, signer: Signer, clock: Clock) -> None:
        self._signer = signer
        self._clock = clock

    @property
    def public_key(self) -> str:
        return self._signer.public_key

    def sign(
        self,
        sub: str,
        scopes: Iterable[Scope],
        *,
        aud: str = ANY_NODE,
        life_s: float = LONGEST_LIFE_S,
        digests: tuple[str, ...] = (),
    ) -> str:
        return self._sign(
            AccessClaims(sub=sub, aud=aud, scope=_names(scopes), exp=self._expiry(life_s), digests=digests)
        )

    def sign_for_node(self, node_id: str, credential: str) -> str:
        """What a node shows at controllers' blob listeners. It opens no other node, and ends with this credential."""
        return self._sign(
            AccessClaims(
                sub=node_id,
                aud=CONTROLLERS,
                scope=_names([Scope.BLOBS]),
                exp=self._expiry(LONGEST_LIFE_S),
                credential=credential,
            )
        )

    def sign_for_playground(self, principal: Principal) -> tuple[str, int]:
        """What the page of a web session shows at gateways, and its life in seconds: no longer than the session's."""
        now = self._clock.now().timestamp()
        exp = int(min(now + PLAYGROUND_LIFE_S, principal.session_ends_at))
        claims = PlaygroundClaims(principal.key_id, AUDIENCE, session_id(principal.session), exp)
        return token_text(self._signer.sign(encode(claims))), max(0, int(exp - now))

    def _sign(self, claims: AccessClaims) -> str:
        return self._signer.sign(encode(claims))

    def _expiry(self, life_s: float) -> int:
        return int(self._clock.now().timestamp() + min(life_s, LONGEST_LIFE_S))


def _names(scopes: Iterable[Scope]) -> tuple[str, ...]:
    return tuple(scope.value for scope in scopes)


async def open_ingress_tokens(store: Store, clock: Clock) -> IngressTokens:
    """The key lives in the database, so every controller signs with the same; the first to start makes it."""
    async with store.write() as tx:
        key = await cluster_secrets.get_or_create(tx, _SECRET, Signer.new_private_key)
    return IngressTokens(Signer(key), clock)
