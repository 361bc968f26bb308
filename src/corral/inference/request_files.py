"""Files of one request: input that a client sends to the backend, and output that the backend writes for the client.

gRPC passes paths, so these files are on the backend's machine, in a folder per request that is removed with it.
`LocalFiles` is for a backend on this machine; the controller has another `RequestFiles` for backends elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

_OURS = re.compile(r"(\d+)-[A-Za-z0-9_]+\Z")
_EXTENSION = re.compile(r"\.[A-Za-z0-9]{1,8}\Z")


class RequestFolder(Protocol):
    """The folder of one request."""

    @property
    def here(self) -> Path:
        """The local folder for received and fetched files."""

    async def hand_over(self, path: Path) -> str:
        """Make a file of `here` readable for the backend. Returns its path on the backend's machine."""

    async def output_path(self, name: str) -> str:
        """A path the backend may write to."""

    async def output_folder(self, name: str) -> str:
        """A folder the backend may write files into."""

    async def list_outputs(self, name: str) -> tuple[str, ...]:
        """The files in an output folder, by their paths from there."""

    async def fetch(self, name: str) -> Path:
        """The file that the backend wrote, as a local file; `folder/…` for one of an output folder. Raises
        FileNotFoundError."""


class RequestFiles(Protocol):
    def open(self) -> contextlib.AbstractAsyncContextManager[RequestFolder]:
        """A folder that is removed when the block is left."""


class LocalFolder:
    def __init__(self, here: Path, owner: tuple[int, int] | None) -> None:
        self.here = here
        self._owner = owner

    async def hand_over(self, path: Path) -> str:
        if self._owner is not None:
            await asyncio.to_thread(os.chown, path, *self._owner)
        return str(path)

    async def output_path(self, name: str) -> str:
        return str(self.here / name)

    async def output_folder(self, name: str) -> str:
        path = self.here / name
        path.mkdir(mode=0o700)
        if self._owner is not None:
            os.chown(path, *self._owner)
        return str(path)

    async def list_outputs(self, name: str) -> tuple[str, ...]:
        return await asyncio.to_thread(_files_below, self.here / name)

    async def fetch(self, name: str) -> Path:
        path = self.here / name
        found = await asyncio.to_thread(os.lstat, path)
        if not stat.S_ISREG(found.st_mode):  # a link would give the client a file that only this process can read
            raise FileNotFoundError(name)
        return path


class LocalFiles:
    """`owner`: user and group of the backends, if they differ from this process's."""

    def __init__(self, folder: Path, owner: tuple[int, int] | None = None) -> None:
        self._folder = folder
        self._owner = owner

    def sweep(self) -> None:
        """Remove folders of ended processes. A worker that hands over to this one still runs."""
        with contextlib.suppress(OSError):
            for path in self._folder.iterdir():
                found = _OURS.match(path.name)
                if found and not _runs(int(found[1])):
                    shutil.rmtree(path, ignore_errors=True)

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[RequestFolder]:
        folder = self._make()  # not in a thread: a cancelled caller would leave the folder behind
        try:
            yield LocalFolder(folder, self._owner)
        finally:
            shutil.rmtree(folder, ignore_errors=True)  # a few files: faster than a thread, and never skipped

    def _make(self) -> Path:
        """Only this process and the backend can read it."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=self._folder))
        if self._owner is not None:
            self._folder.chmod(0o711)  # may be passed through, but not listed
            os.chown(folder, *self._owner)
        return folder


def _files_below(folder: Path) -> tuple[str, ...]:
    """Links are not followed, neither to files nor to folders."""
    walked = os.walk(folder, followlinks=False)
    found = (Path(parent, name) for parent, _, names in walked for name in names)
    return tuple(sorted(str(path.relative_to(folder)) for path in found if stat.S_ISREG(path.lstat().st_mode)))


def extension_of(filename: str | None) -> str:
    """The extension of a client's file name, by which backends recognise formats; the rest of the name is not used."""
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
