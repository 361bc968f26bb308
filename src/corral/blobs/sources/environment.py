"""Locked wheels, into an environment. The digest is that of the list: what the wheels are is fixed by their hashes."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

from corral.blobs.digests import PREFIX, digest_of_parts
from corral.blobs.partial import Wanted
from corral.blobs.progress import Progress, Tally, Tell
from corral.blobs.remote import Page
from corral.blobs.sources.means import Means, into_tally, require_unpack_room, together
from corral.blobs.wheels import build_environment, check_wheels, find_python, unpacked_bytes, written_bytes
from corral.contract.messages.backends import Phase
from corral.contract.sources import Source, Wheel

_LOOK_EVERY_S = 0.5


async def open_wheels(means: Means, source: Source, tell: Tell) -> WheelsContent:
    tell(Progress(Phase.RESOLVING, source.uri))
    check_wheels(source.wheels)
    await find_python(source.python, means.wheel_tools)  # before gigabytes are fetched for one that is not here
    return WheelsContent(means, source)


@dataclass(frozen=True)
class WheelsContent:
    means: Means
    source: Source

    @property
    def digest(self) -> str:
        return self.source.digest or self.content_digest

    @property
    def content_digest(self) -> str:
        lines = sorted(f"{wheel.name} {wheel.sha256}" for wheel in self.source.wheels)
        return digest_of_parts("wheels", self.source.python, *lines)

    @property
    def blobs(self) -> tuple[str, ...]:
        return tuple(PREFIX + wheel.sha256 for wheel in self.source.wheels)

    async def write_to(self, folder: Path, tell: Tell) -> None:
        wheels = self.source.wheels
        size = sum(wheel.size for wheel in wheels)
        missing = sum(wheel.size for wheel in wheels if self.means.store.find(PREFIX + wheel.sha256) is None)
        require_unpack_room(self.means, folder, size, missing, self.source.uri)
        turn = asyncio.Semaphore(self.means.parallel)
        tally = Tally(Phase.DOWNLOADING, tell, time.monotonic, total_bytes=size)
        async with together() as tasks:
            fetched = [tasks.create_task(self._fetch(wheel, turn, tally)) for wheel in wheels]
        tell(Progress(Phase.VERIFYING, self.source.uri, size, size))  # each wheel was hashed as it came
        paths = [(wheel, task.result()) for wheel, task in zip(wheels, fetched, strict=True)]
        total = await asyncio.to_thread(unpacked_bytes, [path for _, path in paths])
        tell(Progress(Phase.EXTRACTING, self.source.uri, 0, total))
        async with together() as tasks:
            watching = tasks.create_task(self._watch(folder, total, tell))
            try:
                await build_environment(folder, paths, self.means.wheel_tools, python=self.source.python)
            finally:
                watching.cancel()
        tell(Progress(Phase.EXTRACTING, self.source.uri, total, total))

    async def _watch(self, folder: Path, total: int, tell: Tell) -> None:
        """uv and pip say nothing a program could read: how far they are is what lies in the folder."""
        while True:
            written = await asyncio.to_thread(written_bytes, folder)
            tell(Progress(Phase.EXTRACTING, self.source.uri, min(total, written), total))
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _fetch(self, wheel: Wheel, turn: asyncio.Semaphore, tally: Tally) -> Path:
        async with turn:
            wanted = Wanted(PREFIX + wheel.sha256, wheel.size)
            blob = await self.means.store.obtain(
                Page(self.means.session, wheel.url), wanted, into_tally(tally, wheel.name)
            )
            tally.at(wheel.name, blob.size)
            return blob.path
