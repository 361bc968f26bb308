"""Tokens with which the playground of the web page calls `/v1`: signed by a controller, accepted by every gateway
(docs/reference/wire/internal.md#playground-tokens). Signing itself is `kit/signing.py`.

A token names a web session and its key. It grants what the key grants for inference, and ends with the session.
"""

from __future__ import annotations

import hashlib

from corral.contract.codec import Message, always
from corral.kit.secrets import PLAYGROUND

# The same key signs tokens for ingresses (`contract/access.py`): there no node has this name.
AUDIENCE = "playground"
LONGEST_LIFE_S = 300


class PlaygroundClaims(Message, frozen=True):
    sub: str = always(str)  # the id of the API key that signed in
    aud: str = always(str)  # AUDIENCE
    session: str = always(str)  # `session_id`
    exp: int = always(int)  # seconds since the epoch, on the controllers' clock


def session_id(id_hash: str) -> str:
    """The public name of a web session. It leads neither to the secret of the session nor to its row."""
    return hashlib.sha256(f"playground:{id_hash}".encode()).hexdigest()[:32]


def token_text(signed: str) -> str:
    return PLAYGROUND + signed


def signed_part(token: str) -> str | None:
    """What was signed; None: not a token of the playground."""
    return token.removeprefix(PLAYGROUND) if token.startswith(PLAYGROUND) else None


class PlaygroundToken(Message, frozen=True, omit_defaults=False):
    """`POST /api/playground/token`."""

    token: str
    expires_in_s: int


class PlaygroundModel(Message, frozen=True, omit_defaults=False):
    """A model that the caller may use: `GET /api/playground/models`."""

    name: str
    kinds: tuple[str, ...]  # chat, embeddings, rerank
    images: bool  # whether its definition says that it reads images
    ready: int  # replicas that can answer now
    description: str
    alias: str  # of this model
