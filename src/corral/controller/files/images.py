"""Files in registries: `oci://host/repository:tag`.

An artifact's layers are files, each with its name in an annotation (ORAS, and those who package models that way); an
image's are archives, and the file is looked for in them, the topmost first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from corral.blobs.archives.decompress import decompress_blocks
from corral.blobs.archives.entries import EntryKind
from corral.blobs.archives.tar import read_tar
from corral.blobs.oci.documents import LAYERS, Descriptor
from corral.blobs.oci.registry import Image, RegistryClient
from corral.blobs.progress import OnProgress
from corral.blobs.store import Blob, BlobStore
from corral.blobs.transfer.partial_file import ExpectedBlob
from corral.contract.messages.backends import Phase
from corral.kit.errors import NotFound

TITLE = "org.opencontainers.image.title"


@dataclass(frozen=True)
class LayerFile:
    """A layer that is the file itself."""

    registry: RegistryClient
    image: Image
    layer: Descriptor
    name: str

    @property
    def resolved(self) -> str:
        return _exactly(self.image)

    @property
    def digest(self) -> str:
        return self.layer.digest

    @property
    def size_bytes(self) -> int:
        return self.layer.size

    async def fetch(self, store: BlobStore, wanted: ExpectedBlob, tell: OnProgress) -> Blob:
        size = wanted.size or self.layer.size
        return await store.obtain(
            self.registry.layer(self.image, self.layer), ExpectedBlob(wanted.digest or self.layer.digest, size), tell
        )


@dataclass(frozen=True)
class ImageFile:
    """A file inside an image's layers."""

    registry: RegistryClient
    image: Image
    name: str
    digest: str = ""

    @property
    def resolved(self) -> str:
        return _exactly(self.image)

    @property
    def size_bytes(self) -> int:
        return self.image.size_bytes

    async def fetch(self, store: BlobStore, wanted: ExpectedBlob, tell: OnProgress) -> Blob:
        for layer in reversed(self.image.layers):
            with store.hold(layer.digest):
                remote = self.registry.layer(self.image, layer)
                packed = await store.obtain(remote, ExpectedBlob(layer.digest, layer.size), tell)
                inside = _InLayer(packed.path, self.name)
                # The size only tells how far it is.
                sized = ExpectedBlob(wanted.digest, wanted.size or layer.size)
                try:
                    blob = await store.write(
                        f"{layer.digest}/{self.name}", inside, sized, self.name, tell, phase=Phase.EXTRACTING
                    )
                except _NotInThisOne:
                    blob = None
            store.discard(layer.digest)
            if blob is not None:
                return blob
        raise NotFound(f"there is no {self.name} in {self.image.reference}")


class Images:
    def __init__(self, registry: RegistryClient, *, platform: str) -> None:
        self._registry = registry
        self._platform = platform

    async def find(self, reference: str, path: str) -> LayerFile | ImageFile:
        """`path` is what the model calls the file. Raises NotFound, NoBuild, Denied, Unreachable, Failed."""
        image = await self._registry.artifact(reference, self._platform)
        layer = choose_layer(image.layers, path)
        if layer is not None:
            return LayerFile(self._registry, image, layer, path)
        if any(each.media_type not in LAYERS for each in image.layers):
            titles = [each.annotations.get(TITLE, each.media_type) for each in image.layers]
            raise NotFound(f"{reference} has no file {path}; it has {', '.join(titles[:10])}")
        return ImageFile(self._registry, image, path)


def choose_layer(layers: Sequence[Descriptor], path: str) -> Descriptor | None:
    """The layer that is the file: by its name, else the only one there is, else the only one that says it is a model.
    None where layers are archives. Pure."""
    files = [layer for layer in layers if layer.media_type not in LAYERS or TITLE in layer.annotations]
    for name in (path, path.rpartition("/")[2]):
        for layer in files:
            if layer.annotations.get(TITLE) == name:
                return layer
    plain = [layer for layer in files if layer.media_type not in LAYERS]
    if len(plain) == 1:
        return plain[0]
    models = [layer for layer in plain if "model" in layer.media_type or "gguf" in layer.media_type]
    return models[0] if len(models) == 1 else None


class _NotInThisOne(Exception):
    pass


@dataclass(frozen=True)
class _InLayer:
    layer: Path
    name: str

    def __call__(self) -> Iterator[bytes]:
        with self.layer.open("rb") as file:
            for entry in read_tar(decompress_blocks(file)):
                if entry.kind is EntryKind.FILE and entry.name.removeprefix("./").lstrip("/") == self.name:
                    yield from map(bytes, entry.data)
                    return
        raise _NotInThisOne


def _exactly(image: Image) -> str:
    return f"oci://{image.reference.host}/{image.reference.repository}@{image.content_digest}"
