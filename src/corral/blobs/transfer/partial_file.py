"""A partial download: its bytes, their hash so far, and what is needed to resume it.

The partial file and the resume info beside it are the whole state, so a later process can resume the download.
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

OnBytes = Callable[[int, int], None]  # received bytes, total bytes (0: unknown)


@dataclass(frozen=True)
class ExpectedBlob:
    """The digest and size that the bytes must have. Empty and 0: unknown."""

    digest: str = ""
    size: int = 0


class ResumeInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """The validators (ETag, Last-Modified) of the resource that these bytes are a part of."""

    etag: str = ""
    modified: str = ""

    @property
    def validator(self) -> str:
        # A weak ETag promises equivalent content, not equal bytes.
        return self.modified if not self.etag or self.etag.startswith("W/") else self.etag


@dataclass
class PartialFile:
    """One file being downloaded. Its blocking methods are called in a thread, one at a time."""

    path: Path
    name: str  # for messages
    expected: ExpectedBlob
    on_bytes: OnBytes  # always called in the event loop
    have: int = 0
    total: int = 0  # 0: unknown
    _file: BinaryIO | None = None
    _hash: hashlib._Hash = field(default_factory=hashlib.sha256)

    def open(self, stop: StopToken) -> None:
        """Continue with the bytes that an earlier process left. They are hashed again: they may be damaged."""
        self.total = self.expected.size
        self._file = self.path.open("ab+")
        os.chmod(self.path, 0o600)
        self._file.seek(0)
        while block := self._file.read(BLOCK_BYTES):
            stop.check()
            self._hash.update(block)
            self.have += len(block)
        # Without a digest and a validator these could be bytes of another version.
        is_foreign = self.have and not (self.expected.digest or self._resume_info().validator)
        if is_foreign or (self.expected.size and self.have > self.expected.size):
            self.start_over(ResumeInfo())

    @property
    def is_whole(self) -> bool:
        return 0 < self.total <= self.have

    def headers(self) -> dict[str, str]:
        """Request headers for the missing bytes."""
        if not self.have:
            return {}
        span = {"Range": f"bytes={self.have}-"}
        # With a digest the bytes of any server will do: they are verified at the end. Without a digest, all bytes must
        # be of one version of the resource.
        if self.expected.digest:
            return span
        validator = self._resume_info().validator
        return span | {"If-Range": validator} if validator else {}

    def expect(self, total: int, max_bytes: int) -> None:
        """Check the size that the server announces."""
        if self.expected.size and total and total != self.expected.size:
            raise WrongDigest(f"{self.name} has {total} bytes, not {self.expected.size}")
        self.total = total or self.expected.size
        if self.total > max_bytes:
            raise TooLarge(f"{self.name} has {format_bytes(self.total)}, more than {format_bytes(max_bytes)}")

    def check_size(self, size: int, max_bytes: int) -> None:
        """Check the received size: a server may send more than it announced."""
        if self.total and size > self.total:
            raise WrongDigest(f"{self.name} sends more than the {self.total} bytes it announced")
        if size > max_bytes:
            raise TooLarge(f"{self.name} is larger than {format_bytes(max_bytes)}")

    def write(self, pieces: list[bytes]) -> None:
        file = self._opened()
        for piece in pieces:
            file.write(piece)
            self._hash.update(piece)
            self.have += len(piece)
        file.flush()

    def start_over(self, info: ResumeInfo) -> None:
        """Discard all bytes; the following bytes belong to the resource described by `info`."""
        self._opened().truncate(0)
        self._hash = hashlib.sha256()
        self.have = 0
        if not self.expected.digest:
            resume_info_path(self.path).write_bytes(msgspec.json.encode(info))

    def finish(self) -> str:
        """Sync the file to the disk. Returns the digest of all bytes."""
        file = self._opened()
        file.flush()
        os.fsync(file.fileno())
        return PREFIX + self._hash.hexdigest()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _opened(self) -> BinaryIO:
        if self._file is None:
            raise RuntimeError("open the partial file first")
        return self._file

    def _resume_info(self) -> ResumeInfo:
        try:
            return msgspec.json.decode(resume_info_path(self.path).read_bytes(), type=ResumeInfo)
        except (OSError, msgspec.MsgspecError):
            return ResumeInfo()


def resume_info_path(partial: Path) -> Path:
    return partial.with_name(partial.name + ".note")


def remove_partial(partial: Path) -> None:
    partial.unlink(missing_ok=True)
    resume_info_path(partial).unlink(missing_ok=True)
