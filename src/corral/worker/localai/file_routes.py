"""The file server that LocalAI controllers use, on the ingress (docs/reference/wire/files.md).

    HEAD, PUT, GET /v1/files/{key}      a file: its size and hash, an upload whole or by range, a download
    POST /v1/files/temp                 an empty file for the output of a backend
    GET /v1/files-list/{key}            names of the files in a folder

Answers are those of the contract, and so are errors: one line of plain text. What upstream gets wrong is done right
(docs/reference/wire/files.md#upload): temporary names, one upload of a file at a time, ranges of downloads, limits.
The ingress has checked the token.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from corral.blobs.disk import DiskSpace
from corral.blobs.errors import NoSpace
from corral.blobs.serving.http_request import RangeNotSatisfiable, choose_range
from corral.contract.codec import encode
from corral.contract.http import BodyBroken, BodyTooLarge, Headers, Request, Responder
from corral.kit.errors import Invalid, reason_of
from corral.kit.log import get_log
from corral.kit.single_flight import SingleFlight
from corral.kit.tasks import NameLocks
from corral.kit.threads import run_in_thread, run_uncancelled
from corral.worker.ingress.logs import send_text
from corral.worker.ingress.responses import JSON, TEXT
from corral.worker.localai.body_writer import receive_body
from corral.worker.localai.file_keys import (
    MODELS,
    OUTPUT,
    FileFolders,
    clean_route,
    decode_route,
    list_files,
    quote_route,
    resolve_key,
    shorten,
)
from corral.worker.localai.ranges import (
    AppendBytes,
    DropBytes,
    FinishUpload,
    OtherUpload,
    UploadRange,
    WrongOffset,
    decide_upload,
    parse_content_range,
    parse_sha256,
)
from corral.worker.localai.uploads import (
    Owner,
    Upload,
    UploadBusy,
    WrongHash,
    give_to,
    hash_and_store,
    make_folders,
    read_sidecar,
)

log = get_log(__name__)
FILES, LIST = "/v1/files/", "/v1/files-list/"
TEMP = "temp"
READ_BYTES = 256 << 10
MAX_HASHED_BYTES = 64 << 20  # a download of a larger file whose hash is not known does not wait for it
BUSY_S = 60.0  # how long an upload waits for another one of the same file
OCTETS: Headers = ((b"content-type", b"application/octet-stream"),)
_BUSY = "another upload of this file is under way: try again"


class FileRoutes:
    """Handles both prefixes. `limit_bytes`: of one file, over all its ranges; 0: none."""

    def __init__(
        self,
        folders: FileFolders,
        *,
        limit_bytes: int = 0,
        owner: Owner = None,
        space: DiskSpace | None = None,
        busy_s: float = BUSY_S,
    ) -> None:
        self._folders = folders
        self._limit_bytes = limit_bytes
        self._owner = owner
        self._space = space or DiskSpace()
        self._busy_s = busy_s
        self._uploads = NameLocks()
        self._hashes: SingleFlight[Path, None, str] = SingleFlight()

    async def handle(self, request: Request, responder: Responder) -> int:
        try:
            return await self._route(request, responder)
        except (Invalid, NoSpace) as error:
            return await send_text(responder, 400 if isinstance(error, Invalid) else 507, error.message)
        except WrongHash as error:
            log.warning("upload refused", route=shorten(request.route.decode("ascii", "replace")), why=str(error))
            return await send_text(responder, 400, str(error))
        except BodyTooLarge:
            return await self._refuse_size(responder)
        except BodyBroken as error:
            return await send_text(responder, error.status, str(error))
        except OSError as error:
            return await self._refuse_disk(request, responder, error)

    async def _refuse_size(self, responder: Responder) -> int:
        return await send_text(responder, 413, f"the file is larger than {self._limit_bytes} bytes (--upload-limit)")

    async def _refuse_disk(self, request: Request, responder: Responder, error: OSError) -> int:
        log.warning("file request failed", why=reason_of(error), request_id=request.request_id)
        match error.errno:
            case errno.ENOSPC | errno.EDQUOT:
                return await send_text(responder, 507, "writing file: the disk is full; nothing was kept")
            case errno.ENAMETOOLONG | errno.ELOOP | errno.ENOTDIR | errno.EISDIR:
                return await send_text(responder, 400, f"the key cannot be a file: {reason_of(error)}")
            case errno.ENOENT:
                return await send_text(responder, 404, "file not found")
        return await send_text(responder, 500, f"writing file: {reason_of(error)}")

    async def _route(self, request: Request, responder: Responder) -> int:
        path = decode_route(request.route)
        if (clean := clean_route(path)) != path:
            await responder.send(301, (*TEXT, (b"location", quote_route(clean))), b"Moved Permanently\n")
            return 301
        if path.startswith(LIST):
            if request.method != b"GET":
                return await send_text(responder, 405, "method not allowed")
            return await self._list(path.removeprefix(LIST), responder)
        key = path.removeprefix(FILES)
        match request.method:
            case b"HEAD":
                return await self._head(key, responder)
            case b"PUT":
                return await self._put(key, request, responder)
            case b"GET":
                return await self._get(key, request, responder)
            case b"POST" if key == TEMP:
                return await self._make_temp(responder)
            case b"POST":
                return await send_text(responder, 404, "not found")
        return await send_text(responder, 405, "method not allowed")

    # Uploads

    async def _put(self, key: str, request: Request, responder: Responder) -> int:
        target = await asyncio.to_thread(resolve_key, self._folders, key)
        declared = parse_sha256(_text(request, b"x-content-sha256"))
        if declared is None:
            return await send_text(responder, 400, "X-Content-SHA256 is not a SHA-256 in hex")
        span = None
        if request.header(b"content-range") is not None:
            span = parse_content_range(_text(request, b"content-range"))
            if span is None:
                return await send_text(responder, 400, "invalid Content-Range: bytes START-END/TOTAL is expected")
        size = span.total if span is not None else request.body.length
        if self._limit_bytes and size is not None and size > self._limit_bytes:
            return await self._refuse_size(responder)
        if await asyncio.to_thread(target.is_dir):
            return await send_text(responder, 400, "target is a directory")
        upload = Upload(target, self._owner, owned=not key.startswith(MODELS))
        async with contextlib.AsyncExitStack() as turn:
            try:
                async with asyncio.timeout(self._busy_s):
                    await turn.enter_async_context(self._uploads.hold(frozenset((str(target),))))
            except TimeoutError:
                return await _send_busy(responder, upload, span)
            try:
                await asyncio.to_thread(upload.check_free)
                if span is None:
                    return await self._put_whole(upload, declared, request, responder)
                return await self._put_range(upload, span, declared, request, responder)
            except UploadBusy:
                return await _send_busy(responder, upload, span)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    await run_uncancelled(upload.drop)
                raise
            finally:
                upload.close()

    async def _put_whole(self, upload: Upload, declared: str, request: Request, responder: Responder) -> int:
        self._require_space(upload, request.body.length or 0)
        try:
            await run_uncancelled(upload.open, append=False, target=declared)
            await receive_body(request.body, upload, limit_bytes=self._limit_bytes)
        except UploadBusy:
            raise
        except BaseException:  # also a client that left: nothing can continue a whole upload
            await run_uncancelled(upload.drop)
            raise
        return await self._finish(upload, declared, responder)

    async def _put_range(
        self, upload: Upload, span: UploadRange, declared: str, request: Request, responder: Responder
    ) -> int:
        state = await asyncio.to_thread(upload.state)
        if state is None and declared and span.start == 0 and await self._is_there(upload.target, declared):
            return await _send_path(responder, upload.target)
        match decide_upload(span, declared, state):
            case OtherUpload():
                await run_uncancelled(upload.drop)
                return await send_text(responder, 409, "the bytes here are of another upload: begin at 0")
            case WrongOffset(have):
                return await _send_offset(responder, have, span, "range does not begin at the current size")
            case FinishUpload():
                # An upload that lost its connection after the last byte. Upstream answers 416 for ever.
                with contextlib.suppress(WrongHash):  # then it is received again
                    return await self._finish(upload, declared, responder)
            case DropBytes():
                await run_uncancelled(upload.drop)
            case AppendBytes():
                pass
        return await self._receive_range(upload, span, declared, request, responder)

    async def _receive_range(
        self, upload: Upload, span: UploadRange, declared: str, request: Request, responder: Responder
    ) -> int:
        if request.body.length is not None and request.body.length > span.length:
            return await send_text(responder, 400, f"long body: expected {span.length}")
        self._require_space(upload, span.total - span.start)
        await run_uncancelled(upload.open, append=span.start > 0, target=declared, total=span.total)
        got = await receive_body(request.body, upload, expected=span.length)
        if got < span.length:
            return await send_text(responder, 400, f"short body: got {got} expected {span.length}")
        if upload.have < span.total:
            headers = ((b"range", b"bytes=0-%d" % (upload.have - 1)), (b"x-file-size", b"%d" % upload.have))
            await responder.send(308, headers, b"")
            return 308
        return await self._finish(upload, declared, responder)

    def _require_space(self, upload: Upload, need_bytes: int) -> None:
        self._space.require(upload.target.parent, need_bytes, upload.target.name)

    async def _finish(self, upload: Upload, declared: str, responder: Responder) -> int:
        digest = await run_in_thread(lambda stop: upload.verify(declared, stop))
        await run_uncancelled(upload.commit, digest)
        log.info("file received", path=str(upload.target), sha256=digest)
        return await _send_path(responder, upload.target)

    async def _is_there(self, target: Path, declared: str) -> bool:
        return await asyncio.to_thread(target.is_file) and await self._hash(target) == declared

    # Everything else

    async def _head(self, key: str, responder: Responder) -> int:
        target = await asyncio.to_thread(resolve_key, self._folders, key)
        partial = await asyncio.to_thread(Upload(target).state)
        if partial is None:
            status = await asyncio.to_thread(target.stat)
            if not stat.S_ISREG(status.st_mode):
                return await send_text(responder, 400, "not a file")
            size, name, sha256 = status.st_size, b"x-content-sha256", await self._hash(target)
        else:
            size, name, sha256 = partial.have, b"x-target-sha256", partial.target
        headers = (
            *OCTETS,
            (b"x-file-size", b"%d" % size),
            (b"x-local-path", os.fsencode(target)),
            (b"accept-ranges", b"bytes"),
            *(((name, sha256.encode()),) if sha256 else ()),
        )
        await responder.stream(200, headers, _nothing(), length=size)
        return 200

    async def _hash(self, target: Path) -> str:
        async def compute(_on_progress: object) -> str:
            return await run_in_thread(lambda stop: hash_and_store(target, stop))

        return await self._hashes.run(target, compute)

    async def _get(self, key: str, request: Request, responder: Responder) -> int:
        target = await asyncio.to_thread(resolve_key, self._folders, key)
        descriptor = await run_uncancelled(os.open, target, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                return await send_text(responder, 404, "file not found")
            known = await asyncio.to_thread(read_sidecar, target)
            if not known and status.st_size <= MAX_HASHED_BYTES:
                known = await self._hash(target)
            return await _send_file(request, responder, descriptor, status, known)
        finally:
            os.close(descriptor)

    async def _make_temp(self, responder: Responder) -> int:
        path = await run_uncancelled(make_temp, self._folders.staging, OUTPUT, self._owner)
        return await _send_path(responder, path)

    async def _list(self, key: str, responder: Responder) -> int:
        folder = await asyncio.to_thread(resolve_key, self._folders, key)
        if not await asyncio.to_thread(folder.is_dir):
            return await send_text(responder, 404, "not a folder")
        names = await asyncio.to_thread(list_files, folder)
        await responder.send(200, JSON, encode({"files": names or None}))
        return 200


def make_temp(folder: Path, prefix: str, owner: Owner) -> Path:
    """An empty file that a backend may write to. Blocking."""
    make_folders(folder, owner, owned=True)
    descriptor, path = tempfile.mkstemp(dir=os.path.realpath(folder), prefix=prefix, suffix=".tmp")
    try:
        give_to(descriptor, owner, owned=True)
    finally:
        os.close(descriptor)
    return Path(path)


async def _send_path(responder: Responder, path: Path) -> int:
    await responder.send(200, JSON, encode({"local_path": os.fsencode(path).decode("utf-8", "backslashreplace")}))
    return 200


async def _send_busy(responder: Responder, upload: Upload, span: UploadRange | None) -> int:
    """416, although nothing is wrong with the range: a LocalAI controller tries again only after this one."""
    state = await asyncio.to_thread(upload.state)
    return await _send_offset(responder, state.have if state is not None else 0, span, _BUSY)


async def _send_offset(responder: Responder, have: int, span: UploadRange | None, why: str) -> int:
    total = b"%d" % span.total if span is not None else b"*"
    headers = (*TEXT, (b"content-range", b"bytes */" + total), (b"x-file-size", b"%d" % have))
    await responder.send(416, headers, why.encode() + b"\n")
    return 416


async def _send_file(
    request: Request, responder: Responder, descriptor: int, status: os.stat_result, sha256: str
) -> int:
    size = status.st_size
    etag = b'"%x-%x"' % (status.st_mtime_ns, size)
    headers = [*OCTETS, (b"accept-ranges", b"bytes"), (b"etag", etag)]
    if sha256:
        headers.append((b"x-content-sha256", sha256.encode()))
    condition = _text(request, b"if-range")
    part = choose_range(_text(request, b"range"), size, condition=condition, etag=etag.decode())
    if isinstance(part, RangeNotSatisfiable):
        await responder.send(416, (*TEXT, (b"content-range", b"bytes */%d" % size)), b"range behind the end\n")
        return 416
    if not part.whole:
        headers.append((b"content-range", b"bytes %d-%d/%d" % (part.start, part.start + part.count - 1, size)))
    pieces = _read(descriptor, part.start, part.start + part.count)
    status_code = 200 if part.whole else 206
    await responder.stream(status_code, headers, pieces, length=part.count)
    return status_code


async def _read(descriptor: int, start: int, end: int) -> AsyncIterator[bytes]:
    while start < end:
        block = await run_uncancelled(os.pread, descriptor, min(READ_BYTES, end - start), start)
        if not block:
            return  # it was cut short meanwhile: the relay cuts the connection
        start += len(block)
        yield block


async def _nothing() -> AsyncIterator[bytes]:
    nothing: tuple[bytes, ...] = ()
    for piece in nothing:
        yield piece


def _text(request: Request, name: bytes) -> str:
    return (request.header(name) or b"").decode("latin-1")
