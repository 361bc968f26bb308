"""The file of a backup: a line that names the format, a line of JSON (the header), and a compressed tar.

The first member of the tar, `contents.json`, lists every other one with its size and SHA-256. With a passphrase the tar
is sealed (`seal.py`); without one, 32 bytes with the SHA-256 of the file follow it, and `tail -n +3 FILE | tar xz`
unpacks it with a warning about them.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import os
import stat
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

import msgspec
from msgspec.structs import replace

from corral.cli.backup.seal import (
    CHUNK_BYTES,
    DAMAGED,
    Reader,
    Seal,
    SealingWriter,
    SummingReader,
    SummingWriter,
    UnsealingReader,
    Writer,
    make_key,
    open_key,
)
from corral.kit.errors import Denied, Invalid

MAGIC = b"corral backup\n"
FORMAT = 1
CONTENTS = "contents.json"
_MAX_HEADER_BYTES = 64 * 1024
_MAX_CONTENTS_BYTES = 16 * 1024 * 1024
_LEVEL = 6


class BackupHeader(msgspec.Struct, frozen=True, kw_only=True):
    format: int = FORMAT
    id: str
    created_at: datetime
    corral: str  # version that made it
    schema: str  # of its database
    store: str  # kind of database that it was: sqlite, postgresql
    host: str
    machine: str  # a hash of the machine's id: on the same machine its worker keeps its identity
    has_secrets: bool
    seal: dict[str, Any] | None = None


class Member(msgspec.Struct, frozen=True):
    name: str
    size_bytes: int
    sha256: str


class Contents(msgspec.Struct, frozen=True):
    members: tuple[Member, ...]


Source = Path | bytes
IsKnown = Callable[[str], bool]


def write_backup(
    file: IO[bytes],
    header: BackupHeader,
    sources: Mapping[str, Source],
    *,
    passphrase: str | None,
    seal: Seal | None = None,
) -> Contents:
    """Write the whole file. With a passphrase it is sealed; `seal` has the costs of the key."""
    key = b""
    if passphrase is not None:
        seal = seal or Seal()
        key, check = make_key(passphrase, seal)
        header = replace(header, seal={**asdict(seal), "check": check})
    first = MAGIC + msgspec.json.encode(header) + b"\n"
    file.write(first)
    body: Writer = SealingWriter(file, key, first) if passphrase is not None else SummingWriter(file, first)
    contents = Contents(tuple(_describe(name, source) for name, source in sources.items()))
    with (
        gzip.GzipFile(filename="", mode="wb", compresslevel=_LEVEL, fileobj=body, mtime=0) as packed,
        tarfile.open(mode="w|", fileobj=packed, format=tarfile.PAX_FORMAT) as tar,
    ):
        _add(tar, CONTENTS, msgspec.json.encode(contents))
        for name, source in sources.items():
            _add(tar, name, source)
    body.finish()
    return contents


class BackupFile:
    """A backup that is read: first its header, then its members, in one pass."""

    def __init__(self, file: IO[bytes], header: BackupHeader, first: bytes) -> None:
        self.header = header
        self._file = file
        self._first = first
        self._key = b""

    @classmethod
    @contextlib.contextmanager
    def open(cls, path: Path) -> Iterator[BackupFile]:
        """Raises `Invalid` for a file that is no backup, or one of a newer format."""
        try:
            file = path.open("rb")
        except OSError as error:
            raise Invalid(f"{path} cannot be read: {error.strerror}") from error
        with file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise Invalid(f"{path} is not a file: give the file that `corral backup` wrote")
            first = file.readline(len(MAGIC))
            if first != MAGIC:
                raise Invalid(f"{path} is not a backup of Corral: give the file that `corral backup` wrote")
            first += file.readline(_MAX_HEADER_BYTES)
            yield cls(file, _read_header(first[len(MAGIC) :]), first)

    @property
    def is_sealed(self) -> bool:
        return self.header.seal is not None

    def verify(self, passphrase: str | None, is_known: IsKnown) -> Contents:
        """Read the whole file, and write nothing. Raises `Denied` for a wrong passphrase, and `Invalid` if a byte of
        the file was changed or `is_known` refuses the name of a member."""
        return self._read(passphrase, is_known, None)

    def extract(self, passphrase: str | None, is_known: IsKnown, folder: Path) -> Contents:
        """Verify, and write every member below `folder`. What was written before an error must not be used."""
        return self._read(passphrase, is_known, folder)

    def _read(self, passphrase: str | None, is_known: IsKnown, folder: Path | None) -> Contents:
        self._file.seek(len(self._first))
        body = self._open_body(passphrase)
        try:
            with (
                gzip.GzipFile(mode="rb", fileobj=cast(IO[bytes], body)) as packed,
                tarfile.open(mode="r|", fileobj=packed) as tar,
            ):
                contents = _read_members(tar, folder, is_known)
        except (tarfile.TarError, zlib.error, gzip.BadGzipFile, EOFError, UnicodeError, ValueError) as error:
            raise Invalid(DAMAGED) from error
        body.finish()
        return contents

    def _open_body(self, passphrase: str | None) -> Reader:
        if self.header.seal is None:
            return SummingReader(self._file, self._first)
        if passphrase is None:
            raise Denied("the backup is sealed: give its passphrase (--passphrase-file or CORRAL_BACKUP_PASSPHRASE)")
        try:
            seal = msgspec.convert(self.header.seal, Seal)
        except msgspec.ValidationError as error:
            raise Invalid(DAMAGED) from error
        self._key = self._key or open_key(passphrase, seal)
        return UnsealingReader(self._file, self._key, self._first)


def _read_header(line: bytes) -> BackupHeader:
    try:
        if msgspec.json.decode(line, type=dict[str, Any]).get("format") not in range(FORMAT + 1):
            raise Invalid("this backup was made by a newer Corral, in a format that this one cannot read: upgrade")
        return msgspec.json.decode(line, type=BackupHeader)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise Invalid(DAMAGED) from error


def _describe(name: str, source: Source) -> Member:
    if isinstance(source, bytes):
        return Member(name, len(source), hashlib.sha256(source).hexdigest())
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return Member(name, file.tell(), digest)


def _add(tar: tarfile.TarFile, name: str, source: Source) -> None:
    entry = tarfile.TarInfo(name)
    entry.mode = 0o600
    if isinstance(source, bytes):
        entry.size = len(source)
        tar.addfile(entry, io.BytesIO(source))
        return
    with source.open("rb") as file:
        entry.size = os.fstat(file.fileno()).st_size
        tar.addfile(entry, file)


def _read_members(tar: tarfile.TarFile, folder: Path | None, is_known: IsKnown) -> Contents:
    contents: Contents | None = None
    expected: dict[str, Member] = {}
    for entry in tar:
        file = tar.extractfile(entry) if entry.isreg() else None
        if file is None:
            raise Invalid(DAMAGED)
        if contents is None:
            contents = _read_contents(entry, file)
            expected = {member.name: member for member in contents.members}
            for name in expected:
                if not is_safe(name) or not is_known(name):
                    raise Invalid(f"the backup contains {name!r}, which this corral does not know: upgrade corral")
            continue
        member = expected.pop(entry.name, None)
        if member is None or entry.size != member.size_bytes:
            raise Invalid(DAMAGED)
        with _open_target(folder, entry.name) as written:
            _copy(file, written, member)
    if contents is None or expected:
        raise Invalid(DAMAGED)
    return contents


def _read_contents(entry: tarfile.TarInfo, file: IO[bytes]) -> Contents:
    if entry.name != CONTENTS or entry.size > _MAX_CONTENTS_BYTES:
        raise Invalid(DAMAGED)
    try:
        return msgspec.json.decode(file.read(), type=Contents)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise Invalid(DAMAGED) from error


@contextlib.contextmanager
def _open_target(folder: Path | None, name: str) -> Iterator[IO[bytes]]:
    if folder is None:
        with open(os.devnull, "wb") as nothing:
            yield nothing
        return
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _copy(file: IO[bytes], written: IO[bytes], member: Member) -> None:
    digest = hashlib.sha256()
    while chunk := file.read(CHUNK_BYTES):
        digest.update(chunk)
        written.write(chunk)
    if digest.hexdigest() != member.sha256:
        raise Invalid(DAMAGED)


def is_safe(name: str) -> bool:
    """A relative path that stays below its folder."""
    path = PurePosixPath(name)
    return (
        bool(path.parts)
        and not path.is_absolute()
        and str(path) == name
        and ".." not in path.parts
        and "\0" not in name
    )
