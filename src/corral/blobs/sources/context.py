"""What all kinds of sources share: the services they use (`SourceContext`) and what opening one returns (`Content`)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import aiohttp

from corral.blobs.archives.entries import Bounds
from corral.blobs.disk import DiskSpace
from corral.blobs.errors import WrongDigest
from corral.blobs.oci.registry import RegistryClient
from corral.blobs.progress import OnProgress, PartsProgress, Progress
from corral.blobs.sources.python_environment import WheelTools
from corral.blobs.store import Blob, BlobStore
from corral.blobs.transfer.partial_file import ExpectedBlob
from corral.blobs.transfer.remote import Remote
from corral.contract.sources import Source
from corral.kit.errors import CorralError
from corral.kit.tasks import flatten_errors

UNPACKED_ESTIMATE = 2  # times the packed size: refuses what cannot fit, accepts what can
REPORT_EVERY_S = 0.1


@dataclass(frozen=True)
class ProvidedBlob:
    digest: str
    size: int = 0  # 0: unknown


class ProvidedSource(Protocol):
    """A source whose blobs the fleet provides."""

    @property
    def digest(self) -> str:
        """The digest that inventories report."""

    @property
    def content_digest(self) -> str: ...

    @property
    def blobs(self) -> tuple[ProvidedBlob, ...]:
        """Layers in their order, an archive, or wheels."""

    async def obtain(
        self, store: BlobStore, wanted: ExpectedBlob, on_progress: OnProgress, *, name: str
    ) -> Blob | None:
        """None: the fleet cannot provide it, and only the origin is left. Raises NoSpace."""

    @property
    def refusal(self) -> str:
        """Why the fleet could not provide a blob; empty if it could provide all."""


class SourceProvider(Protocol):
    """Provides sources from the fleet, so that each artifact comes once from its origin."""

    def open(
        self, source: Source, platform: str, on_progress: OnProgress
    ) -> contextlib.AbstractAsyncContextManager[ProvidedSource | None]:
        """None: the fleet does not know this source."""


@dataclass(frozen=True)
class SourceContext:
    store: BlobStore
    session: aiohttp.ClientSession
    registry: RegistryClient
    platform: str  # of this machine, os/arch
    bounds: Bounds = field(default_factory=Bounds)
    space: DiskSpace = field(default_factory=DiskSpace)
    wheel_tools: WheelTools = field(default_factory=WheelTools)
    parallel: int = 3  # transfers of one source at once
    provider: SourceProvider | None = None  # None: every source is fetched from its origin
    # For the origins of sources that the fleet knows but cannot provide. Logins for them stay on the controller.
    anonymous_registry: RegistryClient | None = None

    async def obtain(
        self,
        provided: ProvidedSource | None,
        remote: Remote,
        wanted: ExpectedBlob,
        on_progress: OnProgress,
        *,
        name: str,
    ) -> Blob:
        """The blob from the fleet, else from its origin. Raises what fetching from the origin raises."""
        if provided is None:
            return await self.store.obtain(remote, wanted, on_progress)
        if (blob := await provided.obtain(self.store, wanted, on_progress, name=name)) is not None:
            return blob
        with name_refusal(provided):
            return await self.store.obtain(remote, wanted, on_progress)

    def registry_for(self, provided: ProvidedSource | None) -> RegistryClient:
        return self.anonymous_registry if provided is not None and self.anonymous_registry else self.registry


@contextlib.contextmanager
def name_refusal(provided: ProvidedSource | None) -> Iterator[None]:
    """Around an access to the origin of a source that the fleet could not provide: an error names both reasons."""
    try:
        yield
    except CorralError as error:
        if provided is not None and provided.refusal:
            error.message = f"{error.message}; through the controller: {provided.refusal}"
            error.args = (error.message,)
        raise


class Content(Protocol):
    """The content of an opened source."""

    @property
    def digest(self) -> str:
        """The digest that inventories report: of the image index, the archive, the listing or the list of wheels."""

    @property
    def content_digest(self) -> str:
        """Equal digests mean equal files. It names the version's folder."""

    @property
    def blobs(self) -> tuple[str, ...]:
        """Digests of its blobs in the store, fetched or still to be fetched."""

    async def write_to(self, folder: Path, on_progress: OnProgress) -> None:
        """Write the content into an empty folder. After an error the folder's content must not be used."""


def check_expected(wanted: str, got: str, what: str) -> None:
    if wanted and wanted != got:
        raise WrongDigest(f"{what} is {got}, not {wanted}")


def require_unpack_space(
    context: SourceContext, folder: Path, packed_bytes: int, missing_bytes: int, what: str
) -> None:
    """Raises NoSpace, before the first byte, unless there is space for the missing bytes and the estimated unpacked
    size."""
    context.space.require(context.store.folder, missing_bytes, what)
    same_disk = context.store.folder.stat().st_dev == folder.stat().st_dev
    need = packed_bytes * UNPACKED_ESTIMATE + (missing_bytes if same_disk else 0)
    context.space.require(folder, need, f"unpacking {what}")


def report_into(tally: PartsProgress, part: str) -> OnProgress:
    """A callback that adds one transfer to the sum. Its first report is the number of bytes that were on the disk
    before."""
    is_started = False

    def on_progress(progress: Progress) -> None:
        nonlocal is_started
        tally.received_from(part, progress)
        (tally.at if is_started else tally.resume)(part, progress.current_bytes)
        is_started = True

    return on_progress


def count_in_thread(tally: PartsProgress, part: str) -> Callable[[int], None]:
    """A callback for work in a thread; it adds up bytes and reports in the event loop, at most every REPORT_EVERY_S.
    Call this in the event loop."""
    loop = asyncio.get_running_loop()
    done, reported_s = 0, 0.0

    def on_bytes(size_bytes: int) -> None:
        nonlocal done, reported_s
        done += size_bytes
        if time.monotonic() - reported_s >= REPORT_EVERY_S:
            reported_s = time.monotonic()
            loop.call_soon_threadsafe(tally.at, part, done)

    return on_bytes


@contextlib.asynccontextmanager
async def unwrapped_task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group that raises its first error itself instead of an exception group: callers check the type."""
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except BaseExceptionGroup as group:
        raise flatten_errors(group)[0] from group
