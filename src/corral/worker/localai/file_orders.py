"""Files through an object storage, as LocalAI controllers order them over the bus
(docs/reference/wire/files.md#object-store). Subscribed only where an object storage is configured.

A file that is here already is compared with the object before it is used: upstream never sends a changed file again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from pathlib import Path

import msgspec

from corral.blobs.object_store import ObjectStore, StoredObject
from corral.bus.api import MAX_PAYLOAD_BYTES, Bus, Tokens
from corral.contract.codec import encode
from corral.contract.messages.files import (
    ENSURE_FILE,
    LIST_DIR,
    STAGE_FILE,
    TEMP_FILE,
    DirListing,
    EnsureFile,
    ListDir,
    LocalFile,
    MakeTempFile,
    StagedFile,
    StageFile,
)
from corral.kit.errors import CorralError, Denied, Invalid, NotFound, Unreachable
from corral.kit.files import write_atomically
from corral.kit.log import get_log
from corral.kit.single_flight import SingleFlight
from corral.kit.threads import run_uncancelled
from corral.worker.localai.file_keys import (
    RECORD,
    FileFolders,
    is_in_any,
    list_files,
    resolve_inside,
    resolve_prefix,
    shorten,
)
from corral.worker.localai.file_routes import make_temp
from corral.worker.localai.file_sweep import STAGING_TEMP
from corral.worker.localai.uploads import Owner, give_to, make_folders

log = get_log(__name__)
MAX_PARALLEL = 16
_TEMP = "localai-staging-"


class ObjectRecord(msgspec.Struct, frozen=True):
    """Which version of an object a file is, and that the file has not been changed since."""

    etag: str
    size: int
    mtime_ns: int


class FileOrders:
    def __init__(self, store: ObjectStore, folders: FileFolders, owner: Owner = None) -> None:
        """`owner`: user and group of the backends, where those differ from the worker's."""
        self._store = store
        self._folders = folders
        self._owner = owner
        self._downloads: SingleFlight[Path, None, None] = SingleFlight()

    async def subscribe(self, bus: Bus, node: str) -> None:
        """A failure is logged: the worker serves everything else."""
        try:
            await bus.serve(ENSURE_FILE, self.ensure, concurrency=MAX_PARALLEL, node=node)
            await bus.serve(STAGE_FILE, self.stage, concurrency=MAX_PARALLEL, node=node)
            await bus.serve(TEMP_FILE, self.make_temp, concurrency=MAX_PARALLEL, node=node)
            await bus.serve(LIST_DIR, self.list_dir, concurrency=MAX_PARALLEL, node=node)
        except CorralError as error:
            log.error("files through the object storage are not served", reason=error.message)

    async def ensure(self, request: EnsureFile, _tokens: Tokens) -> LocalFile:
        if not request.key:
            raise Invalid("key is required")
        path = await asyncio.to_thread(resolve_inside, self._folders.cache, request.key)
        if await asyncio.to_thread(path.is_dir):
            raise Invalid(f"{shorten(request.key)} is not the key of a file")

        async def bring(_on_progress: object) -> None:
            await self._bring(request.key, path)

        await self._downloads.run(path, bring)
        return LocalFile(local_path=str(path))

    async def _bring(self, key: str, path: Path) -> None:
        record = await asyncio.to_thread(_read_record, path)
        try:
            found = await self._store.get(key)
        except (NotFound, Unreachable, Denied) as error:
            if record is None:
                raise
            log.warning("the file here is used, unchecked", key=key, reason=error.message)
            return
        if record is not None and (record.etag, record.size) == (found.etag, found.size):
            return
        await run_uncancelled(make_folders, path.parent, self._owner, owned=True)
        found = await self._store.get_file(key, path)
        await run_uncancelled(_finish, path, found, self._owner)
        log.info("file fetched from the object storage", key=key, size_bytes=found.size)

    async def stage(self, request: StageFile, _tokens: Tokens) -> StagedFile:
        if not request.key:
            raise Invalid("key is required")
        folders = self._folders
        if not await asyncio.to_thread(is_in_any, request.local_path, folders.cache, folders.models):
            raise Invalid("path outside allowed directories")
        path = await asyncio.to_thread(Path(request.local_path).resolve)
        if not await asyncio.to_thread(path.is_file):
            raise NotFound(f"there is no file {shorten(request.local_path)}")
        size = await self._store.put_file(path, request.key)
        log.info("file sent to the object storage", key=request.key, size_bytes=size)
        return StagedFile(key=request.key)

    async def make_temp(self, _request: MakeTempFile, _tokens: Tokens) -> LocalFile:
        folder = self._folders.cache / STAGING_TEMP
        try:
            return LocalFile(local_path=str(await run_uncancelled(make_temp, folder, _TEMP, self._owner)))
        except OSError as error:
            raise Invalid(f"cannot make a file in {folder}: {error.strerror}") from error

    async def list_dir(self, request: ListDir, _tokens: Tokens) -> DirListing:
        try:
            folder = await asyncio.to_thread(resolve_prefix, self._folders, request.key_prefix)
        except Invalid as error:
            raise Invalid(f"invalid key prefix: {error.message}") from error
        if not await asyncio.to_thread(folder.is_dir):
            raise NotFound(f"there is no folder {shorten(request.key_prefix)}")
        listing = DirListing(files=tuple(await asyncio.to_thread(list_files, folder)))
        if len(encode(listing)) > MAX_PAYLOAD_BYTES:
            raise Invalid(f"{shorten(request.key_prefix)} has {len(listing.files)} files, too many for one message")
        return listing


def _record_path(path: Path) -> Path:
    name = hashlib.sha256(os.fsencode(path.name)).hexdigest()[:32]
    return path.with_name(RECORD + name)


def _read_record(path: Path) -> ObjectRecord | None:
    """None if there is no file, or it is not known which version it is."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        record = msgspec.json.decode(_record_path(path).read_bytes(), type=ObjectRecord)
        status = path.stat()
        if (status.st_size, status.st_mtime_ns) == (record.size, record.mtime_ns):
            return record
    return None


def _finish(path: Path, found: StoredObject, owner: Owner) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        give_to(descriptor, owner, owned=False)
        mtime_ns = os.fstat(descriptor).st_mtime_ns
    finally:
        os.close(descriptor)
    write_atomically(_record_path(path), msgspec.json.encode(ObjectRecord(found.etag, found.size, mtime_ns)))
