"""Files that live as long as a request: what a client sends for a backend to read, what a backend writes for a client.

gRPC passes paths, so such files lie on the disk of the machine the backend runs on, in a folder of the request's own,
which goes with it. Here is how that looks where the backend is on this very machine; for one elsewhere, whoever mounts
the bridge brings another `Files`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

_OURS = re.compile(r"(\d+)-[A-Za-z0-9_]+\Z")
_EXTENSION = re.compile(r"\.[A-Za-z0-9]{1,8}\Z")


class Folder(Protocol):
    """Of one request."""

    @property
    def here(self) -> Path:
        """Where we put what came, and find what was fetched."""

    async def hand_over(self, path: Path) -> str:
        """A file of `here` for the backend to read: its path as the backend knows it."""

    async def there(self, name: str) -> str:
        """A path the backend may write to."""

    async def fetch(self, name: str) -> Path:
        """What it wrote there. Raises FileNotFoundError."""


class Files(Protocol):
    def open(self) -> contextlib.AbstractAsyncContextManager[Folder]:
        """A folder, gone when the block is left."""


class LocalFolder:
    def __init__(self, here: Path, owner: tuple[int, int] | None) -> None:
        self.here = here
        self._owner = owner

    async def hand_over(self, path: Path) -> str:
        if self._owner is not None:
            await asyncio.to_thread(os.chown, path, *self._owner)
        return str(path)

    async def there(self, name: str) -> str:
        return str(self.here / name)

    async def fetch(self, name: str) -> Path:
        path = self.here / name
        await asyncio.to_thread(os.stat, path)
        return path


class LocalFiles:
    """`owner`: user and group the backends run as, where that is not who we are."""

    def __init__(self, folder: Path, owner: tuple[int, int] | None = None) -> None:
        self._folder = folder
        self._owner = owner

    def sweep(self) -> None:
        """Remove what those left who are no more. A worker that hands over to this one is still there."""
        with contextlib.suppress(OSError):
            for path in self._folder.iterdir():
                found = _OURS.match(path.name)
                if found and not _runs(int(found[1])):
                    shutil.rmtree(path, ignore_errors=True)

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Folder]:
        folder = self._make()  # in a thread, whoever left meanwhile would leave it behind
        try:
            yield LocalFolder(folder, self._owner)
        finally:
            shutil.rmtree(folder, ignore_errors=True)  # two files at most: quicker than a thread, and never left undone

    def _make(self) -> Path:
        """Only we and the backend can read it."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=self._folder))
        if self._owner is not None:
            self._folder.chmod(0o711)  # to pass through, not to look around
            os.chown(folder, *self._owner)
        return folder


def extension_of(filename: str | None) -> str:
    """Of a client's file name all but its ending is theirs alone; backends tell formats by it."""
    found = _EXTENSION.search(filename or "")
    return found[0].lower() if found else ".bin"


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
