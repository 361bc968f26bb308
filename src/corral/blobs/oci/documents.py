"""Parses and checks image indexes and manifests, both OCI's and Docker's. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import msgspec

from corral.blobs.digests import check_digest
from corral.blobs.errors import BadArchive, NoBuild

T = TypeVar("T")

OCI_INDEX = "application/vnd.oci.image.index.v1+json"
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
DOCKER_LIST = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
INDEXES = (OCI_INDEX, DOCKER_LIST)
MANIFESTS = (OCI_MANIFEST, DOCKER_MANIFEST)
ACCEPT = ", ".join((*INDEXES, *MANIFESTS))

LAYERS = frozenset(
    {
        "application/vnd.oci.image.layer.v1.tar",
        "application/vnd.oci.image.layer.v1.tar+gzip",
        "application/vnd.oci.image.layer.v1.tar+zstd",
        "application/vnd.docker.image.rootfs.diff.tar",
        "application/vnd.docker.image.rootfs.diff.tar.gzip",
        "application/vnd.docker.image.rootfs.diff.tar.zstd",
    }
)
MAX_LAYERS = 512
UNKNOWN = "unknown"


class _Platform(msgspec.Struct, frozen=True):
    os: str = ""
    architecture: str = ""
    variant: str = ""

    def __str__(self) -> str:
        return "/".join(part for part in (self.os, self.architecture, self.variant) if part)


class Descriptor(msgspec.Struct, frozen=True, rename="camel"):
    digest: str
    size: int = 0
    media_type: str = ""
    platform: _Platform | None = None
    urls: tuple[str, ...] = ()
    annotations: dict[str, str] = {}


class _Document(msgspec.Struct, frozen=True, rename="camel"):
    schema_version: int = 0
    media_type: str = ""
    manifests: tuple[Descriptor, ...] | None = None
    config: Descriptor | None = None
    layers: tuple[Descriptor, ...] | None = None


class _Rootfs(msgspec.Struct, frozen=True):
    diff_ids: tuple[str, ...] = ()


class Config(msgspec.Struct, frozen=True):
    """The config document of an image."""

    os: str = ""
    architecture: str = ""
    variant: str = ""
    rootfs: _Rootfs = _Rootfs()

    @property
    def platform(self) -> str:
        return str(_Platform(self.os, self.architecture, self.variant))


@dataclass(frozen=True)
class Index:
    """Several images under one name, one per platform."""

    digest: str
    images: tuple[tuple[str, Descriptor], ...]  # platform, manifest

    @property
    def platforms(self) -> tuple[str, ...]:
        return tuple(platform for platform, _ in self.images)


@dataclass(frozen=True)
class Manifest:
    """One image."""

    digest: str
    config: Descriptor
    layers: tuple[Descriptor, ...]

    @property
    def size_bytes(self) -> int:
        return sum(layer.size for layer in self.layers)


def read_document(body: bytes, digest: str, what: str, *, any_kind: bool = False) -> Index | Manifest:
    """`digest`: of `body`; the caller has verified it. `any_kind`: layers may have any media type, as those of an
    artifact, which are not unpacked."""
    document = _decode(body, _Document, what)
    if document.schema_version != 2:
        raise BadArchive(f"{what} has schema version {document.schema_version}; only version 2 is supported")
    if document.manifests is not None and document.layers is not None:
        # One digest with two meanings: a checker may have read it as the other one.
        raise BadArchive(f"{what} is an index and an image at once")
    if document.manifests is not None:
        return Index(digest, _images(document.manifests))
    if document.layers is not None and document.config is not None:
        for layer in document.layers:
            _check_layer(layer, what, any_kind=any_kind)
        if len(document.layers) > MAX_LAYERS:
            raise BadArchive(f"{what} has {len(document.layers)} layers")
        return Manifest(digest, document.config, document.layers)
    raise BadArchive(f"{what} is neither an image nor an index")


def read_layout(body: bytes, what: str) -> tuple[Descriptor, ...]:
    """`index.json` of an OCI layout: unlike a registry's index it need not name platforms."""
    document = _decode(body, _Document, what)
    for descriptor in document.manifests or ():
        check_digest(descriptor.digest)
    return document.manifests or ()


def read_config(body: bytes, what: str) -> Config:
    return _decode(body, Config, what)


def choose_image(index: Index, platform: str, what: str) -> Descriptor:
    """The image for os/arch: an exact match first, otherwise one with a variant (arm64/v8)."""
    for exact in (True, False):
        for offered, manifest in index.images:
            if offered == platform or (not exact and offered.startswith(f"{platform}/")):
                return manifest
    raise NoBuild(what, platform, index.platforms)


def check_platform(config: Config, platform: str, what: str) -> None:
    """Raises NoBuild if the image's own config names another platform. A config without a platform is accepted."""
    if config.os and config.architecture and f"{config.os}/{config.architecture}" != platform:
        raise NoBuild(what, platform, [config.platform])


def _images(manifests: tuple[Descriptor, ...]) -> tuple[tuple[str, Descriptor], ...]:
    found = []
    for manifest in manifests:
        check_digest(manifest.digest)
        # Signatures and build records travel in the index too, for the platform unknown/unknown.
        if manifest.platform is not None and UNKNOWN not in (manifest.platform.os, manifest.platform.architecture):
            found.append((str(manifest.platform), manifest))
    return tuple(found)


def _check_layer(layer: Descriptor, what: str, *, any_kind: bool) -> None:
    check_digest(layer.digest)
    if layer.urls or "foreign" in layer.media_type or "nondistributable" in layer.media_type:
        raise BadArchive(f"{what} has a layer outside the registry ({layer.media_type}); such layers are not fetched")
    if layer.media_type not in LAYERS and not any_kind:
        raise BadArchive(f"{what} has a layer of an unsupported media type: {layer.media_type[:100]!r}")
    if layer.size < 0:
        raise BadArchive(f"{what} has a layer of {layer.size} bytes")


def _decode(body: bytes, kind: type[T], what: str) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadArchive(f"{what} cannot be read: {error}") from error
