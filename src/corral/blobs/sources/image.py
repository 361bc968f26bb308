"""An image from a registry: layers are fetched in parallel; each is unpacked after the layers below it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from corral.blobs.archives.decompress import decompress_blocks
from corral.blobs.archives.entries import UnpackCounter
from corral.blobs.archives.open import watch_reads
from corral.blobs.archives.tar import read_tar
from corral.blobs.archives.unpack import Unpacker
from corral.blobs.oci.documents import Descriptor
from corral.blobs.oci.registry import Image
from corral.blobs.progress import OnProgress, PartsProgress, Progress
from corral.blobs.sources.context import (
    ProvidedSource,
    SourceContext,
    count_in_thread,
    name_refusal,
    report_into,
    require_unpack_space,
    unwrapped_task_group,
)
from corral.blobs.store import Blob
from corral.blobs.transfer.partial_file import ExpectedBlob
from corral.contract.messages.backends import Phase
from corral.contract.sources import Source, parse_reference
from corral.kit.threads import StopToken, run_in_thread, run_uncancelled


async def open_image(
    context: SourceContext, source: Source, on_progress: OnProgress, provided: ProvidedSource | None = None
) -> ImageContent:
    on_progress(Progress(Phase.RESOLVING, source.uri))
    parsed = parse_reference(source.uri)
    if provided is not None and provided.blobs:
        layers = tuple(Descriptor(blob.digest, blob.size) for blob in provided.blobs)
        return ImageContent(context, Image(parsed, provided.digest, provided.content_digest, layers, ()), provided)
    reference = source.uri
    if source.digest:  # the order names the digest: the tag may point to another image by now
        reference = f"{parsed.host}/{parsed.repository}@{source.digest}"
    with name_refusal(provided):
        image = await context.registry_for(provided).resolve(reference, source.platform or context.platform)
    return ImageContent(context, image, provided)


@dataclass(frozen=True)
class ImageContent:
    context: SourceContext
    image: Image
    provided: ProvidedSource | None = None

    @property
    def digest(self) -> str:
        return self.image.digest

    @property
    def content_digest(self) -> str:
        return self.image.content_digest

    @property
    def blobs(self) -> tuple[str, ...]:
        return tuple(layer.digest for layer in self._layers())

    async def write_to(self, folder: Path, on_progress: OnProgress) -> None:
        layers = self._layers()
        size = sum(layer.size for layer in layers)
        missing = sum(layer.size for layer in layers if self.context.store.find(layer.digest) is None)
        require_unpack_space(self.context, folder, size, missing, str(self.image.reference))
        turn = asyncio.Semaphore(self.context.parallel)
        tally = PartsProgress(Phase.DOWNLOADING, on_progress, time.monotonic, total_bytes=size)
        async with unwrapped_task_group() as tasks:
            fetched = {layer.digest: tasks.create_task(self._fetch(layer, turn, tally)) for layer in layers}
            await self._unpack(folder, fetched, size, on_progress)

    def _layers(self) -> tuple[Descriptor, ...]:
        """Each layer once, in order of first appearance: an image may use a layer twice."""
        return tuple({layer.digest: layer for layer in self.image.layers}.values())

    async def _fetch(self, layer: Descriptor, turn: asyncio.Semaphore, tally: PartsProgress) -> Blob:
        async with turn:
            part = layer.digest[:19]
            remote = self.context.registry_for(self.provided).layer(self.image, layer)
            blob = await self.context.obtain(
                self.provided,
                remote,
                ExpectedBlob(layer.digest, layer.size),
                report_into(tally, part),
                name=part,
            )
            tally.at(part, blob.size)
            return blob

    async def _unpack(
        self, folder: Path, fetched: dict[str, asyncio.Task[Blob]], size: int, on_progress: OnProgress
    ) -> None:
        name = str(self.image.reference)
        unpacker = Unpacker(folder, UnpackCounter(self.context.bounds, size), rootfs=True, space=self.context.space)
        all_here = False

        def watch(progress: Progress) -> None:
            # While layers are still being fetched, the download progress is reported instead.
            nonlocal all_here
            if not all_here and all(task.done() for task in fetched.values()):
                all_here = True
                on_progress(Progress(Phase.VERIFYING, name, size, size))  # each layer was hashed while it was fetched
            if all_here:
                on_progress(progress)

        tally = PartsProgress(Phase.EXTRACTING, watch, time.monotonic, total_bytes=size)
        for number, layer in enumerate(self.image.layers, start=1):
            blob = await fetched[layer.digest]
            part = f"{name} {number}/{len(self.image.layers)}"
            await _unpack_layer(unpacker, blob.path, count_in_thread(tally, part))
            tally.at(part, blob.size)
        await run_uncancelled(unpacker.finish)


async def _unpack_layer(unpacker: Unpacker, path: Path, on_bytes: Callable[[int], None]) -> None:
    def work(stop: StopToken) -> None:
        with watch_reads(path, on_bytes) as file:
            unpacker.add(read_tar(decompress_blocks(file)), stop)

    await run_in_thread(work)
