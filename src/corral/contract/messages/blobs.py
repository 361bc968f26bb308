"""Blobs between workers: who has which chunks, and whom to ask (docs/reference/wire/files.md#blobs-between-workers)."""

from __future__ import annotations

import msgspec

from corral.contract.codec import Message, always
from corral.contract.subjects import event


class AnnounceBlobs(Message, frozen=True):
    """`POST /api/node/{id}/blobs`: the blobs that a worker has and wants."""

    have: dict[str, str] = msgspec.field(default_factory=lambda: dict[str, str]())  # by digest: `all`, or a bitmap
    want: dict[str, int] = msgspec.field(default_factory=lambda: dict[str, int]())  # by digest: number of chunks
    is_full: bool = False  # `have` lists all blobs of the worker: those not listed are gone
    free_slots: int = always(int)  # uploads that the worker could begin now


class BlobPeer(Message, frozen=True):
    """A worker that has chunks of the blob."""

    node_id: str = always(str)  # also the name in its certificate
    name: str = always(str)
    url: str = always(str)
    token: str = always(str)
    have: str = always(str)


class BlobSources(Message, frozen=True):
    peers: tuple[BlobPeer, ...] = ()
    assigned: tuple[int, ...] = ()  # chunks that only this worker should request from the controller
    is_unrestricted: bool = False  # no other worker wants the blob: the controller sends any chunk
    stored: str = ""  # a signed URL of the blob in an object storage; chunks are assigned for it as for the controller


class BlobHints(Message, frozen=True):
    blobs: dict[str, BlobSources] = msgspec.field(default_factory=lambda: dict[str, BlobSources]())
    ca: str = ""  # PEM of the CA that signed the certificates of the peers; empty: they have none
    next_s: float = always(float)  # when to announce again while blobs are wanted


class RevokeBlobTokens(Message, frozen=True):
    """Tokens that a node showed to other workers are no longer valid."""

    node_id: str = always(str)
    until: int = always(int)  # tokens that expire at this time or earlier, seconds since the epoch


REVOKE_BLOB_TOKENS = event("nodes.{node}.blobs.revoke", RevokeBlobTokens)
