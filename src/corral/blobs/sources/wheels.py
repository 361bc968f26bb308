"""Locked wheels, installed into a Python environment. The digest is that of the list: hashes fix the wheels'
content."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

from corral.blobs.digests import PREFIX, digest_of_parts
from corral.blobs.progress import OnProgress, PartsProgress, Progress
from corral.blobs.sources.context import (
    ProvidedSource,
    SourceContext,
    report_into,
    require_unpack_space,
    unwrapped_task_group,
)
from corral.blobs.sources.python_environment import (
    build_environment,
    check_wheels,
    find_python,
    unpacked_bytes,
    written_bytes,
)
from corral.blobs.transfer.partial_file import ExpectedBlob
from corral.blobs.transfer.remote import UrlRemote
from corral.contract.messages.backends import Phase
from corral.contract.sources import Source, Wheel

_REPORT_EVERY_S = 0.5


async def open_wheels(
    context: SourceContext, source: Source, on_progress: OnProgress, provided: ProvidedSource | None = None
) -> WheelsContent:
    on_progress(Progress(Phase.RESOLVING, source.uri))
    check_wheels(source.wheels)
    await find_python(
        source.python, context.wheel_tools
    )  # before gigabytes are fetched for a Python that is not installed
    return WheelsContent(context, source, provided)


@dataclass(frozen=True)
class WheelsContent:
    context: SourceContext
    source: Source
    provided: ProvidedSource | None = None

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

    async def write_to(self, folder: Path, on_progress: OnProgress) -> None:
        wheels = self.source.wheels
        size = sum(wheel.size for wheel in wheels)
        missing = sum(wheel.size for wheel in wheels if self.context.store.find(PREFIX + wheel.sha256) is None)
        require_unpack_space(self.context, folder, size, missing, self.source.uri)
        turn = asyncio.Semaphore(self.context.parallel)
        tally = PartsProgress(Phase.DOWNLOADING, on_progress, time.monotonic, total_bytes=size)
        async with unwrapped_task_group() as tasks:
            fetched = [tasks.create_task(self._fetch(wheel, turn, tally)) for wheel in wheels]
        on_progress(
            Progress(Phase.VERIFYING, self.source.uri, size, size)
        )  # each wheel was hashed while it was fetched
        paths = [(wheel, task.result()) for wheel, task in zip(wheels, fetched, strict=True)]
        total = await asyncio.to_thread(unpacked_bytes, [path for _, path in paths])
        on_progress(Progress(Phase.EXTRACTING, self.source.uri, 0, total))
        async with unwrapped_task_group() as tasks:
            watching = tasks.create_task(self._watch(folder, total, on_progress))
            try:
                await build_environment(folder, paths, self.context.wheel_tools, python=self.source.python)
            finally:
                watching.cancel()
        on_progress(Progress(Phase.EXTRACTING, self.source.uri, total, total))

    async def _watch(self, folder: Path, total: int, on_progress: OnProgress) -> None:
        """Report progress by the size of the folder: uv and pip print no progress that a program could read."""
        while True:
            written = await asyncio.to_thread(written_bytes, folder)
            on_progress(Progress(Phase.EXTRACTING, self.source.uri, min(total, written), total))
            await asyncio.sleep(_REPORT_EVERY_S)

    async def _fetch(self, wheel: Wheel, turn: asyncio.Semaphore, tally: PartsProgress) -> Path:
        async with turn:
            wanted = ExpectedBlob(PREFIX + wheel.sha256, wheel.size)
            remote = UrlRemote(self.context.session, wheel.url)
            blob = await self.context.obtain(
                self.provided, remote, wanted, report_into(tally, wheel.name), name=wheel.name
            )
            tally.at(wheel.name, blob.size)
            return blob.path
