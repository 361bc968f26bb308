"""Files in an object storage (S3): found, downloaded with resume, uploaded in parts, listed, deleted.

Every call can be cancelled, has a deadline or a stall limit, and raises Corral's errors: NotFound, Denied, Unreachable,
Invalid, Conflict (the object changed), Failed. What a key means is the caller's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import obstore
from obstore.exceptions import BaseError, PermissionDeniedError, PreconditionError, UnauthenticatedError
from obstore.store import S3Store

from corral.blobs.digests import BLOCK_BYTES
from corral.blobs.disk import DiskSpace
from corral.blobs.errors import TooLarge, WrongDigest, from_os
from corral.blobs.storage_settings import StorageSettings
from corral.blobs.transfer.partial_file import OnBytes
from corral.kit.errors import Conflict, CorralError, Denied, Failed, Invalid, NotFound, Unreachable
from corral.kit.files import sync_folder
from corral.kit.humanize import format_bytes
from corral.kit.log import get_log
from corral.kit.threads import StopToken, run_in_thread, run_uncancelled, wait_until_done

if TYPE_CHECKING:
    from obstore import PutResult
    from obstore.store import ClientConfig

log = get_log(__name__)
CREATED_AT = "created-at"  # user metadata of the contract, RFC 3339
SHA256 = "sha256"  # user metadata of ours: lets a reader verify the whole file
DOWNLOAD = ".corral-download-"  # bytes of an unfinished download, beside its target
PART_BYTES = 8 << 20
MAX_PARTS = 9_000  # S3 allows 10,000
PARTS_AT_ONCE = 4
ABORT_S = 5.0  # for giving up the parts of a cancelled upload


@dataclass(frozen=True)
class StoreLimits:
    connect_s: float = 10.0
    call_s: float = 60.0  # for a call without content
    stall_s: float = 120.0  # for a transfer that moves no byte
    retries: int = 4
    max_bytes: int = 1 << 40


@dataclass(frozen=True)
class StoredObject:
    key: str
    size: int
    modified_at: datetime
    etag: str = ""
    # User metadata. Listings do not have it: use `get` where it matters.
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def created_at(self) -> datetime:
        """The time that the uploader wrote down, else the time of the last change."""
        try:
            written = datetime.fromisoformat(self.metadata.get(CREATED_AT, ""))
        except ValueError:
            return self.modified_at
        return written if written.tzinfo is not None else written.replace(tzinfo=UTC)


def _ignore_bytes(_have: int, _total: int) -> None:
    pass


class ObjectStore:
    """One bucket."""

    def __init__(
        self, settings: StorageSettings, limits: StoreLimits | None = None, *, space: DiskSpace | None = None
    ) -> None:
        self._limits = limits or StoreLimits()
        self._space = space or DiskSpace()
        self.name = f"{settings.storage_url}/{settings.storage_bucket}"  # for messages
        try:
            self._bucket = _open_bucket(settings, self._limits)
        except (OSError, ValueError, BaseError) as error:
            raise Invalid(f"the object storage {self.name} cannot be used: {_first_line(str(error))}") from error

    async def find(self, key: str) -> StoredObject | None:
        try:
            return await self.get(key)
        except NotFound:
            return None

    async def get(self, key: str) -> StoredObject:
        with self._translated(key):
            async with asyncio.timeout(self._limits.call_s):
                head = await obstore.get_async(self._bucket, key, options={"head": True})
            meta = head.meta
            return StoredObject(
                key, meta["size"], meta["last_modified"], meta["e_tag"] or "", _user_metadata(head.attributes)
            )

    async def list_(self, prefix: str) -> AsyncIterator[StoredObject]:
        """Every object below the folder `prefix`, without metadata."""
        pages = obstore.list(self._bucket, prefix=prefix or None, chunk_size=500)
        while True:
            with self._translated(prefix):
                async with asyncio.timeout(self._limits.call_s):
                    page = await anext(pages, None)
            if page is None:
                return
            for meta in page:
                yield StoredObject(meta["path"], meta["size"], meta["last_modified"], meta["e_tag"] or "")

    async def check(self) -> None:
        """Raise unless the bucket can be listed."""
        async for _object in self.list_("corral-check"):
            return

    async def delete(self, key: str) -> None:
        """Deleting an object that does not exist is no error."""
        with self._translated(key), contextlib.suppress(FileNotFoundError):
            async with asyncio.timeout(self._limits.call_s):
                await obstore.delete_async(self._bucket, key)

    async def sign(self, key: str, *, life_s: float) -> str:
        """A URL with which anybody can read the object for so long."""
        with self._translated(key):
            async with asyncio.timeout(self._limits.call_s):  # the machine's own credentials may have to be asked for
                return await obstore.sign_async(self._bucket, "GET", key, timedelta(seconds=life_s))

    async def put_file(
        self, path: Path, key: str, *, metadata: Mapping[str, str] | None = None, on_bytes: OnBytes = _ignore_bytes
    ) -> int:
        """Upload a file and return its size; readers see the old object until all of it is there. `metadata` is stored
        beside `created-at`. A cancelled or failed upload leaves no parts behind, if the storage still responds."""
        attributes = {CREATED_AT: _now(), **(metadata or {})}
        with contextlib.ExitStack() as stack:
            try:
                file = stack.enter_context(await asyncio.to_thread(path.open, "rb"))
                size = os.fstat(file.fileno()).st_size
                small = await asyncio.to_thread(file.read) if size <= PART_BYTES else None
            except OSError as error:
                raise from_os(error, f"reading {path.name}") from error
            if small is None:
                await self._put_parts(key, attributes, _FilePieces(file, size, on_bytes))
            else:
                await self._put_whole(key, attributes, small)
                on_bytes(size, size)
        return size

    async def _put_whole(self, key: str, attributes: dict[str, str], content: bytes) -> None:
        with self._translated(key):
            async with asyncio.timeout(self._limits.stall_s):
                await obstore.put_async(self._bucket, key, content, attributes=attributes, use_multipart=False)

    async def _put_parts(self, key: str, attributes: dict[str, str], pieces: _FilePieces) -> None:
        upload = asyncio.ensure_future(
            obstore.put_async(
                self._bucket,
                key,
                aiter(pieces),
                attributes=attributes,
                chunk_size=max(PART_BYTES, -(-pieces.size // MAX_PARTS)),
                max_concurrency=PARTS_AT_ONCE,
            )
        )
        with self._translated(key):
            try:
                while not upload.done():
                    before = pieces.sent
                    done, _ = await asyncio.wait([upload], timeout=self._limits.stall_s)
                    if not done and pieces.sent == before:
                        raise TimeoutError
                upload.result()
            finally:
                await _abort(upload, pieces)

    async def get_file(self, key: str, path: Path, on_bytes: OnBytes = _ignore_bytes) -> StoredObject:
        """Download into `path`, which appears when all of it is there, synced and, where the uploader stored its
        sha256, verified. The bytes of a broken download stay beside `path` for the next call."""
        found = await self.get(key)
        if found.size > self._limits.max_bytes:
            raise TooLarge(f"{key} has {format_bytes(found.size)}, more than {format_bytes(self._limits.max_bytes)}")
        partial = _Partial(path, found)
        try:
            await run_in_thread(partial.open)
            self._space.require(path.parent, found.size - partial.have, key)
            on_bytes(partial.have, found.size)
            if partial.have < found.size:
                await self._receive(partial, on_bytes)
            await run_uncancelled(partial.commit)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):  # the disk is needed for something else
                await asyncio.to_thread(partial.remove)
            raise from_os(error, f"writing {path.name}") from error
        finally:
            partial.close()
        return found

    async def _receive(self, partial: _Partial, on_bytes: OnBytes) -> None:
        found = partial.found
        with self._translated(found.key):
            async with asyncio.timeout(self._limits.stall_s):
                response = await obstore.get_async(
                    self._bucket,
                    found.key,
                    options={"range": {"offset": partial.have}, "if_match": found.etag or None},
                )
            pieces = response.stream(min_chunk_size=BLOCK_BYTES)
            while True:
                async with asyncio.timeout(self._limits.stall_s):
                    piece = await anext(pieces, None)
                if piece is None:
                    break
                await run_uncancelled(partial.write, memoryview(piece))
                on_bytes(partial.have, found.size)
        if partial.have != found.size:
            raise Unreachable(f"{self.name} sent {partial.have} of {found.size} bytes of {found.key}")

    @contextlib.contextmanager
    def _translated(self, key: str) -> Iterator[None]:
        try:
            yield
        except (CorralError, asyncio.CancelledError):
            raise
        except TimeoutError as error:
            raise Unreachable(f"the object storage {self.name} does not respond") from error
        except Exception as error:
            translated = self._translate(error, key)
            if translated is None:
                raise
            raise translated from error

    def _translate(self, error: Exception, key: str) -> CorralError | None:
        text = str(error)
        if "NoSuchBucket" in text:
            return NotFound(
                f"the object storage has no bucket {self.name}: create it, or give another --storage-bucket"
            )
        if "/latest/" in text:  # the machine's own credentials, which were asked for because no keys are given
            keys = "--storage-access-key and --storage-secret-key"
            return Denied(f"this machine has no credentials for the object storage {self.name}: give {keys}")
        match error:
            case FileNotFoundError() if error.errno is None:  # else of the local disk
                return NotFound(f"{key} is not in the object storage {self.name}")
            case PermissionDeniedError() | UnauthenticatedError():
                return self._denied(key)
            case BaseError() if "status code: 403" in text or "status code: 401" in text:  # of a listing
                return self._denied(key)
            case PreconditionError():
                return Conflict(f"{key} changed in the object storage during the transfer")
            case ValueError() if "parse path" in text:
                return Invalid(f"{key!r} cannot be the key of an object: it has empty, . or .. parts")
            case BaseError() if "non-2xx" in text:
                return Failed(f"the object storage {self.name} refused {key or 'the list'}: {_status_line(text)}")
            case BaseError():
                return Unreachable(f"the object storage {self.name} cannot be reached: {_first_line(text)}")
        return None

    def _denied(self, key: str) -> Denied:
        return Denied(f"the object storage {self.name} denies access to {key or 'the bucket'}: check its keys")


class _FilePieces:
    """A file as pieces for an upload. After `stop` the next piece raises, and the upload gives up its parts."""

    def __init__(self, file: BinaryIO, size: int, on_bytes: OnBytes) -> None:
        self._file = file
        self._on_bytes = on_bytes
        self._stopped = False
        self.size = size
        self.sent = 0

    def stop(self) -> None:
        self._stopped = True

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while piece := await asyncio.to_thread(self._file.read, BLOCK_BYTES):
            if self._stopped:
                break
            self.sent += len(piece)
            yield piece
            self._on_bytes(self.sent, self.size)
        if self._stopped or self.sent != self.size:
            raise Failed("the upload was stopped" if self._stopped else "the file changed during the upload")


async def _abort(upload: asyncio.Future[PutResult], pieces: _FilePieces) -> None:
    if upload.done():
        return
    pieces.stop()
    stopping = asyncio.ensure_future(asyncio.wait([upload], timeout=ABORT_S))
    await wait_until_done(stopping)
    if not upload.done():
        upload.cancel()
    await wait_until_done(upload)


class _Partial:
    """The bytes of an unfinished download, named by the version of the object they belong to. Blocking, except for
    `close`: one call at a time."""

    def __init__(self, path: Path, found: StoredObject) -> None:
        self._path = path
        self.found = found
        version = hashlib.sha256(f"{found.etag} {found.size}".encode()).hexdigest()[:16]
        # The name of the file is not part of the partial's name: it may be as long as names can be.
        name = hashlib.sha256(os.fsencode(path.name)).hexdigest()[:16]
        self._partial = path.with_name(f"{DOWNLOAD}{name}.{version}")
        self._file: BinaryIO | None = None
        self._hash = hashlib.sha256()
        self.have = 0

    def open(self, stop: StopToken) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o750)
        self._file = self._partial.open("ab+")
        self._file.seek(0)
        while block := self._file.read(BLOCK_BYTES):
            stop.check()
            self._hash.update(block)
            self.have += len(block)
        if self.have > self.found.size:
            self._file.truncate(0)
            self._hash, self.have = hashlib.sha256(), 0

    def write(self, piece: memoryview) -> None:
        assert self._file is not None
        self._file.write(piece)
        self._hash.update(piece)
        self.have += len(piece)

    def commit(self) -> None:
        assert self._file is not None
        self._file.flush()
        expected = self.found.metadata.get(SHA256, "").lower()
        if expected and expected != self._hash.hexdigest():
            self.remove()
            raise WrongDigest(f"{self.found.key} is {self._hash.hexdigest()}, not {expected}")
        os.fsync(self._file.fileno())
        os.replace(self._partial, self._path)
        sync_folder(self._path.parent)

    def remove(self) -> None:
        self._partial.unlink(missing_ok=True)

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # what was not written by now was reported by `write` or `commit`
                self._file.close()


def _open_bucket(settings: StorageSettings, limits: StoreLimits) -> S3Store:
    options: ClientConfig = {
        "allow_http": settings.storage_url.startswith("http://"),
        "connect_timeout": timedelta(seconds=limits.connect_s),
        "read_timeout": timedelta(seconds=limits.stall_s),
        "timeout": timedelta(days=1),  # includes the body; stalls are noticed above
    }
    if settings.storage_ca is not None:
        options["root_certificate"] = settings.storage_ca.read_bytes()
    keys = {}
    if settings.storage_access_key:
        keys = {"access_key_id": settings.storage_access_key, "secret_access_key": settings.storage_secret_key}
    return S3Store(
        settings.storage_bucket,
        endpoint=settings.storage_url,
        region=settings.storage_region,
        virtual_hosted_style_request=False,  # a bucket is a path, not a host name that DNS would have to know
        client_options=options,
        retry_config={"max_retries": limits.retries, "retry_timeout": timedelta(days=1)},
        **keys,  # type: ignore[arg-type]
    )


def _user_metadata(attributes: Mapping[str, str]) -> dict[str, str]:
    """Names of user metadata are lower-case on the wire; the standard headers among the attributes are not."""
    return {name: value for name, value in attributes.items() if name == name.lower()}


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _first_line(text: str) -> str:
    line = text.partition("\n")[0].strip()
    return line.rpartition(" - ")[2] if " - " in line else line


def _status_line(text: str) -> str:
    """`403 Forbidden` from the long text of the client."""
    return _first_line(text).removeprefix("Server returned non-2xx status code:").partition("<?xml")[0].strip(" :")
