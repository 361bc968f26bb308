"""Contents and an installer on folders of a test, with short waits.

async with open_source_context(tmp_path) as means: ...
async with open_installer(tmp_path) as (installer, means): ...
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Collection
from pathlib import Path

from corral.blobs.archives.entries import Bounds
from corral.blobs.contents import Contents
from corral.blobs.disk import DiskSpace
from corral.blobs.oci.credentials import FixedLogins
from corral.blobs.oci.registry import RegistryClient, RegistrySettings
from corral.blobs.sources.context import SourceContext
from corral.blobs.sources.python_environment import WheelTools
from corral.blobs.store import BlobStore
from corral.blobs.transfer.fetcher import Fetcher, FetchLimits
from corral.blobs.transfer.remote import HttpTimeouts, open_session
from corral.contract.sources import INLINE, OCI, Source, TextFile
from corral.kit.clock import Clock
from corral.worker.installer.installer import Installer
from corral.worker.installer.requests import InstallFolders, InstallRequest

LIMITS = FetchLimits(tries=3, first_wait_s=0.01, cap_wait_s=0.05)
ROOM = DiskSpace(reserve_bytes=0)


@contextlib.asynccontextmanager
async def open_source_context(
    folder: Path,
    *,
    platform: str = "linux/amd64",
    limits: FetchLimits = LIMITS,
    bounds: Bounds | None = None,
    room: DiskSpace = ROOM,
    logins: FixedLogins | None = None,
    tools: WheelTools | None = None,
    stall_s: float = 20.0,
) -> AsyncIterator[SourceContext]:
    async with open_session(HttpTimeouts(connect_s=20.0, stall_s=stall_s)) as session:
        registry = RegistryClient(
            session, credentials=logins, settings=RegistrySettings(tries=limits.tries, first_wait_s=0.01)
        )
        store = BlobStore(folder / "blobs", Fetcher(limits, space=room))
        yield SourceContext(
            store, session, registry, platform, bounds or Bounds(), room, tools or WheelTools(timeout_s=50.0)
        )


@contextlib.asynccontextmanager
async def open_installer(
    folder: Path,
    *,
    in_use: Callable[[], Collection[Path]] = tuple,
    capability: str = "",
    clock: Clock | None = None,
    started: bool = True,
    means: SourceContext | None = None,
) -> AsyncIterator[tuple[Installer, SourceContext]]:
    async with contextlib.AsyncExitStack() as stack:
        found = means if means is not None else await stack.enter_async_context(open_source_context(folder))
        folders = InstallFolders(folder / "backends", folder / "system")
        installer = Installer(Contents(found), folders, in_use=in_use, capability=lambda: capability, clock=clock)
        if started:
            await installer.start()
        yield installer, found


def inline(text: str = "one", *, digest: str = "") -> Source:
    return Source(INLINE, "inline", digest=digest, files=(TextFile("run.sh", f"#!/bin/sh\n# {text}\n", True),))


def image(reference: str, *, digest: str = "") -> Source:
    return Source(OCI, reference, digest=digest)


def request(name: str = "demo", *sources: Source, **more: object) -> InstallRequest:
    return InstallRequest(name=name, sources=sources or (inline(),), **more)  # type: ignore[arg-type]


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
