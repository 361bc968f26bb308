"""Archives among a model's files are unpacked on the controller, so that workers get the files inside (contract:
docs/reference/wire/gallery.md#downloads).

The members lie next to where the archive would: `it/model.onnx` in `voices/it.tar.gz` is `voices/it/model.onnx`. Each
member is a blob of its own. The list of them is a blob too, named in the database under the archive's path and a
slash; any controller can read it. The archive itself is kept only where the definition names it. A member that is lost
comes back by fetching the archive again: its URI says from where.
"""

from __future__ import annotations

import os
import posixpath
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import msgspec

from corral.blobs.archives.entries import Bounds
from corral.blobs.archives.open import unpack_archive
from corral.blobs.digests import PREFIX, hash_file
from corral.blobs.disk import DiskSpace
from corral.blobs.errors import BadArchive, UnsafeArchive, from_os
from corral.blobs.progress import OnProgress, PartsProgress, Progress
from corral.blobs.sources.context import count_in_thread
from corral.blobs.store import Blob, BlobStore
from corral.blobs.transfer.partial_file import ExpectedBlob
from corral.contract.codec import Message, always
from corral.contract.messages.backends import Phase
from corral.contract.models import ModelFile
from corral.contract.sources import is_safe_path
from corral.controller.files.file_resolver import ResolvedFile, read_blocks
from corral.controller.files.required_files import MemberUri, member_uri, parse_member
from corral.kit.log import get_log
from corral.kit.single_flight import SingleFlight
from corral.kit.threads import StopToken, run_in_thread, run_uncancelled
from corral.store.tables.model_files import StoredFile

log = get_log(__name__)

MAX_MEMBERS = 20_000
UNPACK_FACTOR = 4  # disk space for an archive and its members, in sizes of the archive

Find = Callable[[ModelFile], Awaitable[ResolvedFile]]


class Member(Message, frozen=True):
    path: str = always(str)  # inside the archive
    sha256: str = always(str)
    size_bytes: int = always(int)


class Members(Message, frozen=True):
    archive: str = always(str)  # its digest
    resolved: str = always(str)  # where the archive came from
    files: tuple[Member, ...] = always(tuple)


class Archives:
    def __init__(self, blobs: BlobStore, disk: DiskSpace) -> None:
        self._blobs = blobs
        self._disk = disk
        self._folder = blobs.folder / "unpacking"
        self._runs: SingleFlight[str, Progress, tuple[Member, ...]] = SingleFlight()
        shutil.rmtree(self._folder, ignore_errors=True)  # of a process that was killed while it unpacked

    def known(self, file: ModelFile, row: StoredFile | None) -> tuple[ModelFile, ...] | None:
        """What is inside, without fetching anything; None: nobody can tell. `row`: its stored list. Blocking."""
        blob = self._blobs.find(row.digest) if row is not None and row.uri == file.uri else None
        if blob is None:
            return None
        members = msgspec.json.decode(blob.path.read_bytes(), type=Members)
        return files_of(file, members) if file.sha256 in ("", members.archive.removeprefix(PREFIX)) else None

    async def unpack(self, model: str, file: ModelFile, archive: StoredFile, tell: OnProgress) -> StoredFile:
        """The archive's blob is here and held. Its members are blobs afterwards, and the returned row names their list.
        Raises BadArchive, UnsafeArchive, TooLarge, NoSpace."""
        found = await self._unpack(self._blobs.get(archive.digest), file.path, tell)
        document = msgspec.json.encode(Members(archive.digest, archive.resolved, found))
        blob = await self._blobs.write(
            f"members of {archive.digest}", lambda: iter([document]), ExpectedBlob(), file.path
        )
        log.info("archive unpacked", model=model, file=file.path, digest=archive.digest, members=len(found))
        resolved = f"{archive.resolved}#{archive.digest}"
        return StoredFile(
            model=model, path=list_path(file), uri=file.uri, resolved=resolved, digest=blob.digest, size_bytes=blob.size
        )

    def origin(self, file: ModelFile, find: Find) -> ResolvedFile:
        """Of a member whose blob is not here: the whole archive is fetched and unpacked again. `find` finds it."""
        member = parse_member(file.uri)

        async def fetch(store: BlobStore, wanted: ExpectedBlob, tell: OnProgress) -> Blob:
            if (here := store.find(wanted.digest)) is not None:
                return here  # another member's turn has brought it
            archive = await find(ModelFile(member.path, member.uri, member.archive.removeprefix(PREFIX)))
            with store.hold(member.archive, wanted.digest):
                blob = await archive.fetch(store, ExpectedBlob(member.archive), tell)
                await self._unpack(blob, member.path, tell)
            store.discard(member.archive)
            return store.get(wanted.digest)

        return ResolvedFile(file.path, file.uri, fetch, PREFIX + file.sha256, file.size_bytes, unpacks=True)

    async def _unpack(self, archive: Blob, name: str, tell: OnProgress) -> tuple[Member, ...]:
        async def run(tell: OnProgress) -> tuple[Member, ...]:
            tally = PartsProgress(Phase.EXTRACTING, tell, time.monotonic, total_bytes=archive.size)
            tally.at(name, 0)
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                folder = Path(tempfile.mkdtemp(dir=self._folder))
            except OSError as error:
                raise from_os(error, f"unpacking {name}") from error
            try:
                return await self._keep_members(archive, folder, name, tally)
            finally:
                await run_uncancelled(shutil.rmtree, folder, True)

        return await self._runs.run(archive.digest, run, tell)

    async def _keep_members(self, archive: Blob, folder: Path, name: str, tally: PartsProgress) -> tuple[Member, ...]:
        bounds, each = Bounds(max_entries=MAX_MEMBERS), count_in_thread(tally, name)
        await run_in_thread(
            lambda stop: unpack_archive(archive.path, folder, bounds, space=self._disk, stop=stop, on_bytes=each)
        )
        tally.at(name, archive.size)
        try:
            found = await run_in_thread(lambda stop: _members(folder, name, stop))
        except OSError as error:
            raise from_os(error, f"reading what {name} unpacked to") from error
        for member in found:
            path, digest = folder / member.path, PREFIX + member.sha256
            if await self._blobs.adopt(digest, path, member.size_bytes) is None:  # a disk without links
                wanted = ExpectedBlob(digest, member.size_bytes)
                await self._blobs.write(digest, partial(read_blocks, path), wanted, member.path, phase=Phase.EXTRACTING)
        return found


def list_path(file: ModelFile) -> str:
    """Under which an archive's list is stored: no file has such a path."""
    return f"{file.path}/"


def pinned(file: ModelFile, row: StoredFile | None) -> StoredFile | None:
    """What the archive was when it was unpacked before, by its stored list: the same is wanted again."""
    if row is None or row.uri != file.uri:
        return None
    resolved, _, digest = row.resolved.rpartition("#")
    return StoredFile(model=row.model, path=file.path, uri=file.uri, resolved=resolved, digest=digest, size_bytes=0)


def files_of(file: ModelFile, members: Members) -> tuple[ModelFile, ...]:
    folder = posixpath.dirname(file.path)
    return tuple(
        ModelFile(
            posixpath.join(folder, each.path),
            member_uri(MemberUri(members.archive, each.path, file.path, members.resolved)),
            each.sha256,
            each.size_bytes,
        )
        for each in members.files
    )


def _members(folder: Path, name: str, stop: StopToken) -> tuple[Member, ...]:
    """Every file, but for empty ones. The contract refuses symbolic links in a model's archive."""
    found = []
    for path in sorted(folder.rglob("*")):
        stop.check()
        inside = path.relative_to(folder).as_posix()
        if path.is_symlink():
            raise UnsafeArchive(f"{name} contains the symbolic link {inside[:200]!r}")
        if path.is_dir() or not path.stat().st_size:
            continue
        if not is_safe_path(inside):
            raise UnsafeArchive(f"{name} contains {inside[:200]!r}, which is no name for a model's file")
        os.utime(path)  # the blob is new, whatever the archive says: it is not swept before its row is written
        digest = hash_file(path, on_bytes=lambda _size: stop.check())
        found.append(Member(inside, digest.removeprefix(PREFIX), path.stat().st_size))
    if not found:
        raise BadArchive(f"there is no file in {name}")
    return tuple(found)
