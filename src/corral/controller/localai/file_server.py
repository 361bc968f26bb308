"""The file server of a LocalAI worker, as its client (docs/reference/wire/files.md#transfer-client).

A file is sent under a key, resumed where an earlier try stopped, and verified there by its SHA-256 before it counts.
What upstream's own client gets wrong is done right here: keys are percent-encoded, an upload that was complete but
never confirmed is sent anew in one piece, and a worker that spoils what it gets is not sent it for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple
from urllib.parse import quote

import aiohttp
import msgspec
from yarl import URL

from corral.blobs.digests import PREFIX
from corral.kit.clock import Clock
from corral.kit.errors import CorralError, Failed, NotFound, Unreachable, reason_of
from corral.kit.retry import Backoff

MODELS = "models/"  # keys of the worker's models folder
_PIECE = 1024 * 1024
_LARGEST_ANSWER = 1024 * 1024
MAX_CORRUPT = 3
_LARGEST_LIST = 32 * 1024 * 1024
Sent = Callable[[int], None]  # bytes of the file that are there by now


class FileServerAddress(NamedTuple):
    """Where one worker's file server is, for words and for URLs."""

    name: str
    url: str


@dataclass(frozen=True)
class TransferTimes:
    connect_s: float = 30.0
    answer_s: float = 60.0  # to a question; an upload has its own
    stall_s: float = 60.0  # without a byte either way
    verify_s: float = 1800.0  # the worker reads the whole file again before it answers
    budget_s: float = 3600.0  # of one file, without getting any further
    retry_first_s: float = 1.0
    retry_cap_s: float = 30.0


class RemoteFile(NamedTuple):
    size: int
    path: str
    sha256: str  # of a whole file
    target: str  # of one that is not whole yet: what it will be


class _Again(Exception):
    """It may work the next time."""


class _FromTheBeginning(_Again):
    """What lies there is of no use."""


class FileServers:
    """`async with` it."""

    def __init__(self, token: str, clock: Clock, times: TransferTimes | None = None) -> None:
        self._token = token
        self._clock = clock
        self._times = times or TransferTimes()
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> FileServers:
        times = self._times
        # No proxy of the environment: it would see the token all workers share.
        self._http = aiohttp.ClientSession(
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=times.connect_s, sock_read=times.stall_s),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._http is not None:
            await self._http.close()

    async def head(self, where: FileServerAddress, key: str) -> RemoteFile | None:
        """None: there is nothing under that key, or a folder."""
        async with self._ask("HEAD", where, _files(key), total_s=self._times.answer_s) as answer:
            if answer.status in (400, 404):
                return None
            _check(where, answer.status, "HEAD", key)
            answered = answer.headers
            size = answered.get("X-File-Size", "")
            return RemoteFile(
                int(size) if size.isdigit() else -1,
                answered.get("X-Local-Path", ""),
                answered.get("X-Content-SHA256", "").lower(),
                answered.get("X-Target-SHA256", "").lower(),
            )

    async def list_(self, where: FileServerAddress, key: str) -> tuple[str, ...]:
        """Files below a folder, by their path from there; none when there is no such folder."""
        async with self._ask("GET", where, f"/v1/files-list/{_quoted(key)}", total_s=self._times.answer_s) as answer:
            if answer.status == 404:
                return ()
            _check(where, answer.status, "list", key)
            answered = _decoded(where, await _read(answer, _LARGEST_LIST))
        listed = answered.get("files") or ()
        return tuple(file for file in listed if isinstance(file, str)) if isinstance(listed, list) else ()

    async def ensure(self, where: FileServerAddress, key: str, file: Path, digest: str, sent: Sent) -> str:
        """The file is there, whole; its path there. Raises Unreachable when it could not be sent within its budget,
        Failed for what will not pass by itself."""
        sha256, size = digest.removeprefix(PREFIX), (await asyncio.to_thread(file.stat)).st_size
        until = self._clock.monotonic() + self._times.budget_s
        backoff = Backoff(first_s=self._times.retry_first_s, cap_s=self._times.retry_cap_s)
        whole = size == 0  # there is no range of nothing
        spoilt, furthest = 0, 0

        def tell(count: int) -> None:
            nonlocal furthest, until
            if count > furthest:
                furthest, until = count, self._clock.monotonic() + self._times.budget_s
            sent(count)

        while True:
            try:
                head = await self.head(where, key)
                if head is not None and head.path and head.sha256 == sha256:
                    sent(size)
                    return head.path
                start = 0 if whole else _start(head, sha256, size)
                whole = whole or start is None
                return await self._put(where, key, file, sha256, (start or 0, size), whole=whole, sent=tell)
            except _FromTheBeginning as error:
                trouble, whole, spoilt = str(error), True, spoilt + 1
            except (_Again, Unreachable) as error:
                trouble = str(error)
            if spoilt >= MAX_CORRUPT:
                raise Failed(f"{where.name} does not take {key}: {trouble}")
            if self._clock.monotonic() >= until:
                raise Unreachable(f"{key} could not be sent to {where.name}: {trouble}")
            await self._clock.sleep(backoff.next_s())

    async def put(self, where: FileServerAddress, key: str, file: Path, sha256: str, size: int) -> str:
        """One small file in one go, tried once: somebody waits. Its path there."""
        try:
            return await self._put(where, key, file, sha256, (0, size), whole=True, sent=lambda _: None)
        except _Again as error:
            raise Unreachable(f"{where.name} did not take a file: {error}") from error

    async def get(self, where: FileServerAddress, key: str, file: Path, largest: int) -> None:
        """Raises NotFound when it is not there, Failed when it is larger than that."""
        async with self._ask("GET", where, _files(key)) as answer:
            if answer.status == 404:
                raise NotFound(f"{where.name} has no {key}")
            _check(where, answer.status, "GET", key)
            got = 0
            with file.open("wb") as out:  # not in a thread: a cancelled caller would leave the file behind
                async for piece in answer.content.iter_chunked(_PIECE):
                    got += len(piece)
                    if got > largest:
                        raise Failed(f"{key} on {where.name} is larger than {largest} bytes")
                    await asyncio.to_thread(out.write, piece)

    async def _put(
        self,
        where: FileServerAddress,
        key: str,
        file: Path,
        sha256: str,
        part: tuple[int, int],
        *,
        whole: bool,
        sent: Sent,
    ) -> str:
        start, size = part
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(size - start)}
        headers["X-Content-SHA256"] = sha256
        if not whole:
            headers["Content-Range"] = f"bytes {start}-{size - 1}/{size}"
        with await asyncio.to_thread(file.open, "rb") as source:
            source.seek(start)
            body = _pieces(source, size - start, lambda count: sent(start + count))
            async with self._ask("PUT", where, _files(key), headers=headers, data=body) as answer:
                text = await _read(answer, _LARGEST_ANSWER)
        match answer.status:
            case 200:
                path = _decoded(where, text).get("local_path")
                if not isinstance(path, str) or not path:
                    raise Failed(f"{where.name} took {key} and does not say where it is")
                return path
            case 308:
                raise _Again("it did not get all of it")
            case 409 | 416:
                # Something else lies there, or all of it does and was never confirmed: a range leads nowhere.
                raise _FromTheBeginning(f"it refused to go on ({answer.status})")
            case 400 if b"sha256 mismatch" in text or b"short body" in text:
                raise _FromTheBeginning(text.decode(errors="replace").strip())
        raise Failed(f"{where.name} refused {key} ({answer.status}): {text[:300].decode(errors='replace').strip()}")

    @contextlib.asynccontextmanager
    async def _ask(
        self,
        method: str,
        where: FileServerAddress,
        path: str,
        *,
        headers: dict[str, str] | None = None,
        data: AsyncIterator[bytes] | None = None,
        total_s: float | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        assert self._http is not None
        times = self._times
        patience = aiohttp.ClientTimeout(
            total=total_s, sock_connect=times.connect_s, sock_read=times.verify_s if method == "PUT" else times.stall_s
        )
        shown = {"Authorization": f"Bearer {self._token}", "Accept-Encoding": "identity", **(headers or {})}
        with _in_words(where):
            async with self._http.request(
                method,
                URL(where.url + path, encoded=True),
                headers=shown,
                data=data,
                allow_redirects=False,
                timeout=patience,
            ) as answer:
                yield answer


def _start(head: RemoteFile | None, sha256: str, size: int) -> int | None:
    """Where to go on; None: only the whole file, in one piece, leads on from what lies there."""
    if head is None or head.target != sha256:
        return 0
    if head.size == size:
        return None  # all of it is there, and nobody confirmed it: a range from 0 would be refused for ever
    return head.size if 0 < head.size < size else 0


def _files(key: str) -> str:
    return f"/v1/files/{_quoted(key)}"


def _quoted(key: str) -> str:
    return quote(key, safe="/")


async def _pieces(source: BinaryIO, count: int, on_sent: Sent) -> AsyncIterator[bytes]:
    sent = 0
    while sent < count:
        piece = await asyncio.to_thread(source.read, min(_PIECE, count - sent))
        if not piece:
            raise Failed("a file got shorter while it was sent")
        yield piece
        sent += len(piece)
        on_sent(sent)


async def _read(answer: aiohttp.ClientResponse, largest: int) -> bytes:
    body = bytearray()
    while len(body) <= largest and (piece := await answer.content.read(largest)):
        body += piece
    return bytes(body[:largest])


def _decoded(where: FileServerAddress, text: bytes) -> dict[str, object]:
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except msgspec.DecodeError as error:
        raise Failed(f"{where.name} answered something that is no JSON") from error


def _check(where: FileServerAddress, status: int, what: str, key: str) -> None:
    if status in (401, 403):
        raise Failed(f"{where.name} does not accept our registration token for its files ({status})")
    if status >= 500:
        raise Unreachable(f"{where.name} answered {status} to {what} {key}")
    if status != 200:
        raise Failed(f"{where.name} answered {status} to {what} {key}")


@contextlib.contextmanager
def _in_words(where: FileServerAddress) -> Iterator[None]:
    try:
        yield
    except CorralError:
        raise
    except TimeoutError as error:
        raise Unreachable(f"{where.name} did not answer in time at {where.url}") from error
    except aiohttp.ClientConnectorError as error:
        raise Unreachable(f"{where.name} cannot be reached at {where.url} ({reason_of(error.os_error)})") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        words = str(error)[:200] or type(error).__name__
        raise Unreachable(f"{where.name} cannot be reached at {where.url} ({words})") from error
