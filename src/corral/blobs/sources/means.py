"""What all kinds of sources share: the tools they are given, and what they give back."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import aiohttp

from corral.blobs.archives.bounds import Bounds
from corral.blobs.errors import WrongDigest
from corral.blobs.oci.registry import RegistryClient
from corral.blobs.progress import Progress, Tally, Tell
from corral.blobs.space import Room
from corral.blobs.store import BlobStore
from corral.blobs.wheels import WheelTools
from corral.kit.tasks import leaves

UNPACKED_ESTIMATE = 2  # times the packed size: enough to refuse what cannot fit, too little to refuse what can
THREAD_TELL_S = 0.1


@dataclass(frozen=True)
class Means:
    store: BlobStore
    session: aiohttp.ClientSession
    registry: RegistryClient
    platform: str  # of this machine, os/arch
    bounds: Bounds = field(default_factory=Bounds)
    room: Room = field(default_factory=Room)
    wheel_tools: WheelTools = field(default_factory=WheelTools)
    parallel: int = 3  # transfers of one source at once


class Content(Protocol):
    """A source that was opened."""

    @property
    def digest(self) -> str:
        """As it is reported to the cluster: of the index, the archive, the tree, the list of wheels."""

    @property
    def content_digest(self) -> str:
        """Equal ones, equal files: what a version's folder is called after."""

    @property
    def blobs(self) -> tuple[str, ...]:
        """What of it is, or will be, in the store."""

    async def write_to(self, folder: Path, tell: Tell) -> None:
        """Into an empty folder. When it raises, what is in there is rubbish."""


def check_wanted(wanted: str, got: str, what: str) -> None:
    if wanted and wanted != got:
        raise WrongDigest(f"{what} is {got}, not {wanted}")


def require_unpack_room(means: Means, folder: Path, packed_bytes: int, missing_bytes: int, what: str) -> None:
    """Before the first byte: room for what is still to be fetched, and for what it will probably unpack to."""
    means.room.require(means.store.folder, missing_bytes, what)
    together = means.store.folder.stat().st_dev == folder.stat().st_dev
    need = packed_bytes * UNPACKED_ESTIMATE + (missing_bytes if together else 0)
    means.room.require(folder, need, f"unpacking {what}")


def into_tally(tally: Tally, part: str) -> Tell:
    """A single transfer's progress as a part of the whole. Its first word is what was there from earlier."""
    known = False

    def tell(progress: Progress) -> None:
        nonlocal known
        (tally.at if known else tally.there)(part, progress.current_bytes)
        known = True

    return tell


def count_in_thread(tally: Tally, part: str) -> Callable[[int], None]:
    """For work in a thread: adds up, and tells in the loop, now and then. Call this in the loop."""
    loop = asyncio.get_running_loop()
    done, told_s = 0, 0.0

    def each(size_bytes: int) -> None:
        nonlocal done, told_s
        done += size_bytes
        if time.monotonic() - told_s >= THREAD_TELL_S:
            told_s = time.monotonic()
            loop.call_soon_threadsafe(tally.at, part, done)

    return each


@contextlib.asynccontextmanager
async def together() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group whose first error comes out as itself: callers look at what kind it is."""
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except BaseExceptionGroup as group:
        raise leaves(group)[0] from group
