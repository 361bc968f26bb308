"""Artifacts of backends (layers, archives, wheels) that a worker fetches through its controller
(docs/reference/wire/artifacts.md).

A worker names a source of an order that it received. The controller answers with the blobs of that source and fetches
those that it lacks; their bytes travel over the blob listener, by digest."""

from __future__ import annotations

from corral.contract.codec import Message, always
from corral.contract.sources import Source


class ArtifactRequest(Message, frozen=True):
    """The source as the order names it. Its wheels and files are left out: the controller has them."""

    kind: str = always(str)
    uri: str = always(str)
    digest: str = ""
    platform: str = ""  # of the image; empty in the order: the worker's own
    wanted: bool = True  # False: this worker needs the source no more, and the controller may stop its download


class ArtifactBlob(Message, frozen=True):
    digest: str = always(str)
    size_bytes: int = 0  # 0: unknown
    have_bytes: int = 0  # received by the controller so far; `size_bytes` once it has all of them
    error: str = ""  # why the controller cannot provide this blob now


class ArtifactOffer(Message, frozen=True):
    """`blobs` is empty until the controller knows them: it asks the registry first, and of an archive without a known
    digest it needs all bytes. `have_bytes` and `size_bytes` then tell how far that is."""

    digest: str = ""  # that inventories report
    content_digest: str = ""  # equal digests mean equal files
    blobs: tuple[ArtifactBlob, ...] = ()  # layers in their order; an image may name a layer twice
    have_bytes: int = 0
    size_bytes: int = 0  # 0: unknown
    error: str = ""  # why the controller cannot provide this source now
    sources: tuple[str, ...] = ()  # URLs of controllers' blob listeners, best first; may contain `{host}`
    token: str = ""  # opens them


def request_for(source: Source, platform: str) -> ArtifactRequest:
    return ArtifactRequest(kind=source.kind, uri=source.uri, digest=source.digest, platform=source.platform or platform)
