"""An upload on the disk: bytes under a temporary name, renamed when they are verified, so that a backend never opens
half a model. Blocking: call it in threads, one call at a time.

    <folder>/<name>                          the file, whole
    <folder>/<name>.sha256                   its hash, as LocalAI's workers write it
    <folder>/.corral-upload-<hash of name>   bytes that have arrived
    <folder>/.corral-upload-….json           what they will be
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from corral.blobs.digests import BLOCK_BYTES
from corral.kit.files import sync_folder
from corral.kit.threads import StopToken
from corral.worker.localai.file_keys import SIDECAR, UPLOAD
from corral.worker.localai.ranges import PartialState, parse_sha256

FILE_MODE, FOLDER_MODE = 0o640, 0o750  # as the contract has them
_NOTE = ".json"
_TICKS, _TICK_S = 20, 0.002
Owner = tuple[int, int] | None  # user and group of the backends, where those differ from the worker's


class UploadNote(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str
    target: str = ""
    total: int = 0


class WrongHash(Exception):
    """The bytes are not those that were declared; they have been removed."""

    def __init__(self, expected: str, got: str) -> None:
        super().__init__(f"sha256 mismatch: expected {expected} got {got}")


class UploadBusy(Exception):
    """Another process receives this file: a worker that hands over to this one."""


class Upload:
    """One upload of one file. `owner`: who may read it besides the worker; `owned`: and write it."""

    def __init__(self, target: Path, owner: Owner = None, *, owned: bool = False) -> None:
        self.target = target
        self._owner = owner
        self._owned = owned
        # Not the name itself: that may be as long as names can be.
        name = UPLOAD + hashlib.sha256(os.fsencode(target.name)).hexdigest()[:32]
        self._partial = target.with_name(name)
        self._note = target.with_name(name + _NOTE)
        self._file: BinaryIO | None = None
        self._hash = hashlib.sha256()
        self._hashed_all = False
        self.have = 0

    def state(self) -> PartialState | None:
        """None if no upload was begun."""
        try:
            have = self._partial.stat(follow_symlinks=False).st_size
        except FileNotFoundError:
            return None
        try:
            note = msgspec.json.decode(self._note.read_bytes(), type=UploadNote)
        except (OSError, msgspec.MsgspecError):
            return PartialState(have)
        return PartialState(have, parse_sha256(note.target) or "", note.total)

    def check_free(self) -> None:
        """Raises `UploadBusy`. Uploads of one process wait for each other before this."""
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(self._partial, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                _lock(descriptor)
            finally:
                os.close(descriptor)

    def drop(self) -> None:
        self.close()
        for path in (self._partial, self._note):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()

    def open(self, *, append: bool, target: str = "", total: int = 0) -> None:
        """Open the bytes for writing. `target`, `total`: what the whole will be, as far as it is known."""
        make_folders(self.target.parent, self._owner, owned=self._owned)
        note = UploadNote(self.target.name.encode("utf-8", "backslashreplace").decode(), target, total)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.fdopen(os.open(self._partial, flags, FILE_MODE), "wb", buffering=0)
        _lock(self._file.fileno())
        _write_note(self._note, msgspec.json.encode(note))
        if not append:
            os.ftruncate(self._file.fileno(), 0)
        self.have = os.fstat(self._file.fileno()).st_size
        self._hash, self._hashed_all = hashlib.sha256(), self.have == 0

    def write(self, pieces: Sequence[bytes]) -> None:
        assert self._file is not None
        for piece in pieces:
            rest = memoryview(piece)
            while rest:  # a nearly full disk takes a part
                rest = rest[self._file.write(rest) :]
            if self._hashed_all:
                self._hash.update(piece)
            self.have += len(piece)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def verify(self, declared: str, stop: StopToken) -> str:
        """The hash of all bytes. Raises `WrongHash` if it is not the declared one, and removes the bytes."""
        digest = self._hash.hexdigest() if self._hashed_all else hash_of(self._partial, stop)
        if declared and digest != declared:
            self.drop()
            raise WrongHash(declared, digest)
        return digest

    def commit(self, digest: str) -> None:
        """The verified bytes become the file, in one step and for good."""
        descriptor = os.open(self._partial, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
            give_to(descriptor, self._owner, owned=self._owned)
        finally:
            os.close(descriptor)
        self.close()
        os.replace(self._partial, self.target)
        self._note.unlink(missing_ok=True)
        write_sidecar(self.target, digest)
        sync_folder(self.target.parent)


def _write_note(path: Path, content: bytes) -> None:
    """A link in its place is not followed: backends may write into this folder, as another user."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


def _lock(descriptor: int) -> None:
    """Until the descriptor is closed, also by the end of the process."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UploadBusy from error


# Hashes beside files.


def is_trusted(file: os.stat_result, sidecar: os.stat_result) -> bool:
    """Whether a hash still belongs to its file. Upstream looks whether the hash is the newer one, which a file restored
    with an old time passes. We give the hash the time of its file; and no program can set the time of the last change
    of an inode, which is no longer the earlier one as soon as the file is written, renamed or replaced."""
    return sidecar.st_mtime_ns == file.st_mtime_ns and sidecar.st_ctime_ns > file.st_ctime_ns


def read_sidecar(path: Path) -> str:
    """The known hash of a file; empty if there is none, or none that can be trusted."""
    sidecar = path.with_name(path.name + SIDECAR)
    try:
        if not is_trusted(path.stat(), sidecar.stat(follow_symlinks=False)):
            return ""
        return parse_sha256(sidecar.read_bytes()[:100].decode("ascii", "replace")) or ""
    except OSError:
        return ""


def write_sidecar(path: Path, digest: str) -> None:
    """A folder that is only read, or a name that is too long, costs the next reader another hash."""
    sidecar = path.with_name(path.name + SIDECAR)
    with contextlib.suppress(OSError):
        before = path.stat()
        sidecar.unlink(missing_ok=True)
        descriptor = os.open(sidecar, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        try:
            os.write(descriptor, digest.encode())
            for _ in range(_TICKS):  # the clock of a file system has ticks of some milliseconds
                os.utime(descriptor, ns=(before.st_mtime_ns, before.st_mtime_ns))
                if os.fstat(descriptor).st_ctime_ns > before.st_ctime_ns:
                    break
                time.sleep(_TICK_S)
        finally:
            os.close(descriptor)


def hash_and_store(path: Path, stop: StopToken) -> str:
    """The hash of a file, from beside it or computed and stored there. A file that changes meanwhile has none yet."""
    if known := read_sidecar(path):
        return known
    before = path.stat()
    digest = hash_of(path, stop)
    after = path.stat()
    if (before.st_mtime_ns, before.st_size, before.st_ino) != (after.st_mtime_ns, after.st_size, after.st_ino):
        return ""
    write_sidecar(path, digest)
    return digest


def hash_of(path: Path, stop: StopToken) -> str:
    whole = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK_BYTES):
            stop.check()
            whole.update(block)
    return whole.hexdigest()


# Permissions.


def make_folders(folder: Path, owner: Owner, *, owned: bool) -> None:
    """Create the missing folders so that backends can enter them, and, if `owned`, write into them."""
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for each in reversed(missing):
        with contextlib.suppress(FileExistsError):  # of another upload, a moment ago
            each.mkdir(mode=FOLDER_MODE)
            descriptor = os.open(each, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                give_to(descriptor, owner, owned=owned)
            finally:
                os.close(descriptor)


def give_to(descriptor: int, owner: Owner, *, owned: bool) -> None:
    if owner is not None:
        os.fchown(descriptor, owner[0] if owned else -1, owner[1])
    is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
    os.fchmod(descriptor, FOLDER_MODE if is_folder else FILE_MODE)  # whatever the umask is
