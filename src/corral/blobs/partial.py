"""A file that is not all there yet: its bytes, their hash so far, and a note of what they are a part of.

The file and the note beside it are all the state there is, so any later process goes on from them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import msgspec

from corral.blobs.digests import BLOCK_BYTES, PREFIX
from corral.blobs.errors import TooLarge, WrongDigest
from corral.kit.humanize import format_bytes
from corral.kit.threads import StopToken

At = Callable[[int, int], None]  # so many bytes of so many (0: nobody knows)


@dataclass(frozen=True)
class Wanted:
    """What the bytes must be. Empty and 0: nobody said."""

    digest: str = ""
    size: int = 0


class Note(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the server called the thing these bytes are a part of."""

    etag: str = ""
    modified: str = ""

    @property
    def validator(self) -> str:
        # A weak ETag promises the same meaning, not the same bytes.
        return self.modified if not self.etag or self.etag.startswith("W/") else self.etag


@dataclass
class Partial:
    """One file being filled. Its blocking methods are called in a thread, one at a time."""

    path: Path
    name: str  # for people
    wanted: Wanted
    at: At  # only ever called in the loop: who listens sets timers there
    have: int = 0
    total: int = 0  # 0: nobody knows yet
    _file: BinaryIO | None = None
    _hash: hashlib._Hash = field(default_factory=hashlib.sha256)

    def open(self, stop: StopToken) -> None:
        """Go on with what an earlier process left. Its bytes are hashed again: nobody vouches for them."""
        self.total = self.wanted.size
        self._file = self.path.open("ab+")
        os.chmod(self.path, 0o600)
        self._file.seek(0)
        while block := self._file.read(BLOCK_BYTES):
            stop.check()
            self._hash.update(block)
            self.have += len(block)
        # With neither digest nor validator these could be bytes of another version.
        stray = self.have and not (self.wanted.digest or self._note().validator)
        if stray or (self.wanted.size and self.have > self.wanted.size):
            self.start_over(Note())

    @property
    def is_whole(self) -> bool:
        return 0 < self.total <= self.have

    def headers(self) -> dict[str, str]:
        """How to ask for the rest."""
        if not self.have:
            return {}
        span = {"Range": f"bytes={self.have}-"}
        # With a digest any server's bytes will do: they are checked in the end. Without, all must be of one piece.
        if self.wanted.digest:
            return span
        validator = self._note().validator
        return span | {"If-Range": validator} if validator else {}

    def expect(self, total: int, most: int) -> None:
        """The server says how much there is."""
        if self.wanted.size and total and total != self.wanted.size:
            raise WrongDigest(f"{self.name} has {total} bytes, not {self.wanted.size}")
        self.total = total or self.wanted.size
        if self.total > most:
            raise TooLarge(f"{self.name} has {format_bytes(self.total)}, more than {format_bytes(most)}")

    def check_size(self, size: int, most: int) -> None:
        """It may have said something else than it sends."""
        if self.total and size > self.total:
            raise WrongDigest(f"{self.name} sends more than the {self.total} bytes it has")
        if size > most:
            raise TooLarge(f"{self.name} is larger than {format_bytes(most)}")

    def write(self, pieces: list[bytes]) -> None:
        file = self._opened()
        for piece in pieces:
            file.write(piece)
            self._hash.update(piece)
            self.have += len(piece)
        file.flush()

    def start_over(self, note: Note) -> None:
        """Forget what is there; what comes next is the thing the note names."""
        self._opened().truncate(0)
        self._hash = hashlib.sha256()
        self.have = 0
        if not self.wanted.digest:
            note_path(self.path).write_bytes(msgspec.json.encode(note))

    def finish(self) -> str:
        """Safe on the disk; the digest of all of it."""
        file = self._opened()
        file.flush()
        os.fsync(file.fileno())
        return PREFIX + self._hash.hexdigest()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _opened(self) -> BinaryIO:
        if self._file is None:
            raise RuntimeError("a partial file is opened first")
        return self._file

    def _note(self) -> Note:
        try:
            return msgspec.json.decode(note_path(self.path).read_bytes(), type=Note)
        except (OSError, msgspec.MsgspecError):
            return Note()


def note_path(partial: Path) -> Path:
    return partial.with_name(partial.name + ".note")


def drop(partial: Path) -> None:
    partial.unlink(missing_ok=True)
    note_path(partial).unlink(missing_ok=True)
