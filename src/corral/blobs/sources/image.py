"""An image from a registry: layers in parallel, each unpacked as soon as those below it are."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from corral.blobs.archives.bounds import Count
from corral.blobs.archives.decompress import read_plain
from corral.blobs.archives.open import watch_reads
from corral.blobs.archives.tar import read_tar
from corral.blobs.archives.unpack import Unpacker
from corral.blobs.oci.documents import Descriptor
from corral.blobs.oci.registry import Image
from corral.blobs.partial import Wanted
from corral.blobs.progress import Progress, Tally, Tell
from corral.blobs.sources.means import Means, count_in_thread, into_tally, require_unpack_room, together
from corral.blobs.store import Blob
from corral.contract.messages.backends import Phase
from corral.contract.sources import Source, parse_reference
from corral.kit.threads import StopToken, run_in_thread, run_uncancelled


async def open_image(means: Means, source: Source, tell: Tell) -> ImageContent:
    tell(Progress(Phase.RESOLVING, source.uri))
    reference = source.uri
    if source.digest:  # the order says exactly which one: the tag may point elsewhere by now
        parsed = parse_reference(source.uri)
        reference = f"{parsed.host}/{parsed.repository}@{source.digest}"
    image = await means.registry.resolve(reference, source.platform or means.platform)
    return ImageContent(means, image)


@dataclass(frozen=True)
class ImageContent:
    means: Means
    image: Image

    @property
    def digest(self) -> str:
        return self.image.digest

    @property
    def content_digest(self) -> str:
        return self.image.content_digest

    @property
    def blobs(self) -> tuple[str, ...]:
        return tuple(layer.digest for layer in self._layers())

    async def write_to(self, folder: Path, tell: Tell) -> None:
        layers = self._layers()
        size = sum(layer.size for layer in layers)
        missing = sum(layer.size for layer in layers if self.means.store.find(layer.digest) is None)
        require_unpack_room(self.means, folder, size, missing, str(self.image.reference))
        turn = asyncio.Semaphore(self.means.parallel)
        tally = Tally(Phase.DOWNLOADING, tell, time.monotonic, total_bytes=size)
        async with together() as tasks:
            fetched = {layer.digest: tasks.create_task(self._fetch(layer, turn, tally)) for layer in layers}
            await self._unpack(folder, fetched, size, tell)

    def _layers(self) -> tuple[Descriptor, ...]:
        """Each once, in order of first appearance: an image may use the same layer twice."""
        return tuple({layer.digest: layer for layer in self.image.layers}.values())

    async def _fetch(self, layer: Descriptor, turn: asyncio.Semaphore, tally: Tally) -> Blob:
        async with turn:
            part = layer.digest[:19]
            remote = self.means.registry.layer(self.image, layer)
            blob = await self.means.store.obtain(remote, Wanted(layer.digest, layer.size), into_tally(tally, part))
            tally.at(part, blob.size)
            return blob

    async def _unpack(self, folder: Path, fetched: dict[str, asyncio.Task[Blob]], size: int, tell: Tell) -> None:
        name = str(self.image.reference)
        unpacker = Unpacker(folder, Count(self.means.bounds, size), rootfs=True, room=self.means.room)
        all_here = False

        def watch(progress: Progress) -> None:
            # While layers still come in, that is what people want to see.
            nonlocal all_here
            if not all_here and all(task.done() for task in fetched.values()):
                all_here = True
                tell(Progress(Phase.VERIFYING, name, size, size))  # each layer was hashed as it came
            if all_here:
                tell(progress)

        tally = Tally(Phase.EXTRACTING, watch, time.monotonic, total_bytes=size)
        for number, layer in enumerate(self.image.layers, start=1):
            blob = await fetched[layer.digest]
            part = f"{name} {number}/{len(self.image.layers)}"
            await _unpack_layer(unpacker, blob.path, count_in_thread(tally, part))
            tally.at(part, blob.size)
        await run_uncancelled(unpacker.finish)


async def _unpack_layer(unpacker: Unpacker, path: Path, each: Callable[[int], None]) -> None:
    def work(stop: StopToken) -> None:
        with watch_reads(path, each) as file:
            unpacker.add(read_tar(read_plain(file)), stop)

    await run_in_thread(work)
