"""The fleet as the hot path wants it: prepared when the view changes, only looked up per request. Pure.

Reading the view from the controller is `keeper.py`; asking it who a client is, `admission.py`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from types import MappingProxyType

from corral.contract.codec import encode
from corral.contract.view import FleetView, KeyLimits, ViewKey, ViewModel

_INFER = frozenset({"inference", "admin"})
_LIST_MODELS = frozenset({"inference", "admin", "viewer"})
_WATCH = frozenset({"admin", "viewer"})


@dataclass(frozen=True, slots=True)
class Client:
    """Who shows a key, and what it opens."""

    key_id: str
    role: str
    may_infer: bool
    may_list: bool
    may_watch: bool
    expires_at: float  # infinity when it never does
    models: frozenset[str] | None  # None = every model
    listing: bytes  # the answer to GET /v1/models
    limits: KeyLimits | None = None

    def may_use(self, model: str) -> bool:
        return self.models is None or model in self.models


@dataclass(frozen=True, slots=True)
class Fleet:
    """One view, prepared."""

    revision: int
    clients: MappingProxyType[bytes, Client]  # by the SHA-256 of their secret
    models: MappingProxyType[str, bytes]  # each model's own JSON, by id

    def find_client(self, secret: bytes) -> Client | None:
        # A lookup by hash tells a guesser nothing by its timing: near misses of a secret are far apart as hashes.
        return self.clients.get(hashlib.sha256(secret).digest())


def prepare_fleet(view: FleetView) -> Fleet:
    listings: dict[frozenset[str] | None, bytes] = {}  # most keys share one of few model lists
    clients = {}
    models_shown = [model for model in view.models if not model.disabled]
    for key in view.keys:
        secret_hash = _read_hash(key.secret_hash)
        if secret_hash is None:
            continue  # no secret can have such a hash
        models = None if key.models is None else frozenset(key.models)
        if models not in listings:
            listings[models] = _listing(m for m in models_shown if models is None or m.id in models)
        clients[secret_hash] = _client(key, models, listings[models])
    return Fleet(
        revision=view.revision,
        clients=MappingProxyType(clients),
        models=MappingProxyType({model.id: encode(_model_object(model)) for model in models_shown}),
    )


def _client(key: ViewKey, models: frozenset[str] | None, listing: bytes) -> Client:
    return Client(
        key_id=key.id,
        role=key.role,
        may_infer=key.role in _INFER,
        may_list=key.role in _LIST_MODELS,
        may_watch=key.role in _WATCH,
        expires_at=math.inf if key.expires_at is None else key.expires_at,
        models=models,
        listing=listing,
        limits=key.limits,
    )


def _read_hash(text: str) -> bytes | None:
    try:
        value = bytes.fromhex(text)
    except ValueError:
        return None
    return value if len(value) == 32 else None


def _listing(models: Iterable[ViewModel]) -> bytes:
    return encode({"object": "list", "data": [_model_object(model) for model in models]})


def _model_object(model: ViewModel) -> dict[str, object]:
    return {"id": model.id, "object": "model", "created": model.created, "owned_by": model.owned_by}
