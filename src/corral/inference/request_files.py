"""Files that live as long as a request: what a client sends for a backend to read, what a backend writes for a client.

gRPC passes paths, so such files lie on the disk of the machine the backend runs on, in a folder of the request's own,
which goes with it. A worker that was killed leaves some behind: the next one removes them.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_OURS = re.compile(r"(\d+)-[A-Za-z0-9_]+\Z")
_EXTENSION = re.compile(r"\.[A-Za-z0-9]{1,8}\Z")


class RequestFiles:
    def __init__(self, folder: Path, owner: tuple[int, int] | None = None) -> None:
        """`owner`: user and group the backends run as, where that is not who we are."""
        self._folder = folder
        self._owner = owner

    def sweep(self) -> None:
        """Remove what those left who are no more. A worker that hands over to this one is still there."""
        with contextlib.suppress(OSError):
            for path in self._folder.iterdir():
                found = _OURS.match(path.name)
                if found and not _runs(int(found[1])):
                    shutil.rmtree(path, ignore_errors=True)

    @contextlib.contextmanager
    def open(self) -> Iterator[Path]:
        """A folder only we and the backend can read. Blocking, but never for long."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self._owner is not None:
            self._folder.chmod(0o711)  # to pass through, not to look around
        folder = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=self._folder))
        try:
            self.hand_over(folder)
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def hand_over(self, path: Path) -> None:
        if self._owner is not None:
            os.chown(path, *self._owner)


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
