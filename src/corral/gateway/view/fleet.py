"""The fleet for the request path: prepared when the view changes, only looked up per request. Pure.

`cache.py` reads the view from the controller; `http/auth.py` authenticates clients with it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Protocol

from corral.contract.codec import encode
from corral.contract.view import FleetView, KeyLimits, ViewKey, ViewModel
from corral.gateway.view.playground import PlaygroundTokens

_INFER = frozenset({"inference", "admin"})
_LIST_MODELS = frozenset({"inference", "admin", "viewer"})
_WATCH = frozenset({"admin", "viewer"})


@dataclass(frozen=True, slots=True)
class Client:
    """The owner of a key, and the permissions of the key."""

    key_id: str
    role: str
    may_infer: bool
    may_list: bool
    may_watch: bool
    expires_at: float  # infinity: never
    models: frozenset[str] | None  # None = every model
    model_list: bytes  # the body of GET /v1/models
    limits: KeyLimits | None = None

    def may_use(self, model: str) -> bool:
        return self.models is None or model in self.models


class TokenRefusal(Enum):
    INVALID = "invalid"
    EXPIRED = "expired"
    NO_SESSION = "no session"  # it has ended, or it began after this view was read


@dataclass(frozen=True, slots=True)
class Fleet:
    """One prepared view."""

    revision: int
    clients: MappingProxyType[bytes, Client]  # by the SHA-256 of their secret
    models: MappingProxyType[str, bytes]  # each model's own JSON, by id
    sessions: Mapping[str, Client] = field(default_factory=dict)  # clients by the ids of their web sessions
    playground_tokens: PlaygroundTokens = field(default_factory=lambda: PlaygroundTokens(""))

    def find_client(self, secret: bytes) -> Client | None:
        # The time of a lookup by hash reveals nothing: the hashes of similar secrets are not similar.
        return self.clients.get(hashlib.sha256(secret).digest())

    def find_playground_client(self, token: bytes, now: float) -> Client | TokenRefusal:
        """The rights of the key that signed in, for inference, until the token expires. Not those of today's other
        sessions: a token ends with the session that it was signed for."""
        claims = self.playground_tokens.read(token, now)
        if claims is None:
            return TokenRefusal.INVALID
        if claims.exp <= now:
            return TokenRefusal.EXPIRED
        client = self.sessions.get(claims.session)
        if client is None or client.key_id != claims.sub:
            return TokenRefusal.NO_SESSION
        return dataclasses.replace(client, may_watch=False, expires_at=min(client.expires_at, claims.exp))


class FleetSource(Protocol):
    """Implemented by `ViewCache`, and by the link to the parent in a gateway with several processes."""

    @property
    def fleet(self) -> Fleet | None:
        """The newest view; None before the first."""

    def server_now(self) -> float:
        """Seconds since the epoch on the controller's clock."""

    async def refresh(self) -> None:
        """Wait a short time for a view that is read from now on."""


def prepare_fleet(view: FleetView) -> Fleet:
    model_lists: dict[frozenset[str] | None, bytes] = {}  # many keys share few lists
    clients = {}
    enabled_models = [model for model in view.models if not model.disabled]
    for key in view.keys:
        secret_hash = _read_hash(key.secret_hash)
        if secret_hash is None:
            continue  # no secret can have such a hash
        models = None if key.models is None else frozenset(key.models)
        if models not in model_lists:
            model_lists[models] = _model_list(m for m in enabled_models if models is None or m.id in models)
        clients[secret_hash] = _client(key, models, model_lists[models])
    return Fleet(
        revision=view.revision,
        clients=MappingProxyType(clients),
        models=MappingProxyType({model.id: encode(_model_object(model)) for model in enabled_models}),
        sessions=_by_session(view, clients.values()),
        playground_tokens=PlaygroundTokens(view.signing_key),
    )


def _by_session(view: FleetView, clients: Iterable[Client]) -> dict[str, Client]:
    by_key = {client.key_id: client for client in clients} if view.sessions else {}
    return {session.id: by_key[session.key_id] for session in view.sessions if session.key_id in by_key}


def _client(key: ViewKey, models: frozenset[str] | None, model_list: bytes) -> Client:
    return Client(
        key_id=key.id,
        role=key.role,
        may_infer=key.role in _INFER,
        may_list=key.role in _LIST_MODELS,
        may_watch=key.role in _WATCH,
        expires_at=math.inf if key.expires_at is None else key.expires_at,
        models=models,
        model_list=model_list,
        limits=key.limits,
    )


def _read_hash(text: str) -> bytes | None:
    try:
        value = bytes.fromhex(text)
    except ValueError:
        return None
    return value if len(value) == 32 else None


def _model_list(models: Iterable[ViewModel]) -> bytes:
    return encode({"object": "list", "data": [_model_object(model) for model in models]})


def _model_object(model: ViewModel) -> dict[str, object]:
    return {"id": model.id, "object": "model", "created": model.created, "owned_by": model.owned_by}
