"""A listener that sends blobs: one thread per connection, the kernel copies from file to socket (`sendfile`).

It has a port of its own, because threads that send gigabytes would disturb an event loop that answers in microseconds
(and uvloop has no `sendfile`). `check` authorizes a request, `find` locates a blob; both are called in threads. A blob
that is removed while it is being sent is still sent to its end: the open file keeps it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from corral.blobs.serving.growing_file import GrowingFile, send_growing
from corral.blobs.serving.http_request import (
    END_OF_HEAD,
    ByteRange,
    MalformedRequest,
    RangeNotSatisfiable,
    RequestHead,
    choose_range,
    read_head,
)
from corral.kit.errors import NotFound, Unavailable
from corral.kit.log import get_log
from corral.kit.threads import run_uncancelled


class UnauthenticatedConnections:
    """Connections that have not shown a valid token yet.

    Each occupies a thread, so their number is limited: when one too many comes, the oldest is closed. A client with a
    token shows it at once and is not affected. Not locked: the listener holds its lock around every call."""

    def __init__(self, max_count: int) -> None:
        self._max_count = max_count
        self._waiting: dict[socket.socket, None] = {}  # in the order they came

    def add(self, connection: socket.socket) -> bool:
        """False if the oldest connection was closed to make place for this one."""
        is_full = len(self._waiting) >= self._max_count
        if is_full:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            with contextlib.suppress(OSError):
                # Its thread notices, and closes it. TLS's own shutdown would first forget that it is TLS.
                socket.socket.shutdown(oldest, socket.SHUT_RDWR)
        self._waiting[connection] = None
        return not is_full

    def replace(self, before: socket.socket, after: socket.socket) -> None:
        """The connection was wrapped in TLS: put the new object in the place of the old one, if that is still there."""
        if before in self._waiting:
            self._waiting = {after if each is before else each: None for each in self._waiting}

    def remove(self, connection: socket.socket) -> None:
        """The connection has shown a valid token, or is closed."""
        self._waiting.pop(connection, None)

    def __contains__(self, connection: socket.socket) -> bool:
        return connection in self._waiting


log = get_log(__name__)

_READ_BYTES = 16 << 10
_SEND_BYTES = 1 << 20
_STEP_BYTES = 8 << 20  # between two checks whether the reader may continue
_BACKLOG = 512
_REASONS = {
    200: "OK",
    206: "Partial Content",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    416: "Range Not Satisfiable",
    503: "Service Unavailable",
}


@dataclass(frozen=True)
class Refusal:
    status: int
    why: str


@dataclass(frozen=True)
class ServingLimits:
    connections: int = 256
    unauthenticated: int = 64  # of these, connections that have not shown a token yet
    first_request_s: float = 5.0  # time for the TLS handshake and the first request
    head_bytes: int = 16 << 10
    head_s: float = 10.0  # from the first to the last byte of a request's head
    idle_s: float = 30.0  # between two requests
    stall_s: float = 60.0  # a reader that accepts no byte for so long is disconnected
    busy_retry_s: int = 2  # Retry-After when all connections are in use


Find = Callable[[str], Path | None]  # by digest
FindGrowing = Callable[[str], GrowingFile | None]  # by digest: a blob that is being fetched
Check = Callable[[str], Refusal | None]  # given the Authorization header
HasEnded = Callable[[str], bool]  # given the Authorization header of an authorized reader
IsExpected = Callable[[str], bool]  # whether a missing blob is being fetched, by digest
ListChunks = Callable[[str], bytes]  # the encoded chunk list, by digest; raises NotFound, Unavailable


def _never(_what: str) -> bool:
    return False


def _no_chunk_list(digest: str) -> bytes:
    raise NotFound(f"no chunk list of {digest} is served here")


def _nothing_grows(_digest: str) -> GrowingFile | None:
    return None


class BlobListener:
    """`async with BlobListener(find, check) as listener: port = await listener.listen(host, port)`."""

    def __init__(
        self,
        find: Find,
        check: Check,
        *,
        has_ended: HasEnded = _never,
        find_growing: FindGrowing = _nothing_grows,
        is_expected: IsExpected = _never,
        list_chunks: ListChunks = _no_chunk_list,
        tls: Callable[[], ssl.SSLContext | None] = lambda: None,
        limits: ServingLimits | None = None,
    ) -> None:
        """`tls` is called for each connection, because certificates are renewed. `has_ended` is called while a blob is
        being sent: a reader whose authorization was revoked gets no more bytes."""
        self._find = find
        self._check = check
        self._has_ended = has_ended
        self._find_growing = find_growing
        self._is_expected = is_expected
        self._list_chunks = list_chunks
        self._tls = tls
        self._limits = limits or ServingLimits()
        self._listeners: list[socket.socket] = []
        self._threads = ThreadPoolExecutor(self._limits.connections, thread_name_prefix="blobs")
        self._open: set[socket.socket] = set()
        self._unauthenticated = UnauthenticatedConnections(self._limits.unauthenticated)
        self._lock = threading.Lock()  # guards what threads change: _open, _unauthenticated, _closing and sent_bytes
        self._closing = False
        self.sent_bytes = 0

    async def __aenter__(self) -> BlobListener:
        return self

    async def __aexit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        for listener in self._listeners:
            loop.remove_reader(listener)
            listener.close()
        with self._lock:
            self._closing = True
            for connection in self._open:
                with contextlib.suppress(OSError):
                    # Its thread notices, and closes it. TLS's own shutdown would first forget that it is TLS.
                    socket.socket.shutdown(connection, socket.SHUT_RDWR)
        await run_uncancelled(self._threads.shutdown)

    async def listen(self, host: str, port: int) -> int:
        """Listen there; port 0 picks a free port. Returns the port. Raises OSError."""
        loop = asyncio.get_running_loop()
        listener = socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=_BACKLOG
        )
        listener.setblocking(False)
        self._listeners.append(listener)
        loop.add_reader(listener, self._accept, listener)
        bound: int = listener.getsockname()[1]
        return bound

    def _accept(self, listener: socket.socket) -> None:
        """Accept one connection per call: the event loop calls again for the next."""
        try:
            connection, peer = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):
            return
        except OSError as error:  # out of file descriptors: open connections will release some
            log.warning("connection could not be accepted", reason=error.strerror)
            return
        with self._lock:
            full = len(self._open) >= self._limits.connections
            if not full:
                self._open.add(connection)
                is_full = not self._unauthenticated.add(connection)
        if full:
            self._reject(connection)
            return
        if is_full:
            log.debug("oldest connection without a token was closed for a new one", peer=str(peer[0]))
        self._threads.submit(self._serve, connection, str(peer[0]), time.monotonic())

    def _reject(self, connection: socket.socket) -> None:
        log.info("blob connection rejected: all connections are in use", open=self._limits.connections)
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            if self._tls() is None:  # over TLS an answer would need a handshake first
                connection.send(_head(503, {"Retry-After": str(self._limits.busy_retry_s)}, 0, keep_alive=False))
        connection.close()

    # In a thread, from here on.

    def _serve(self, raw: socket.socket, peer: str, accepted_s: float) -> None:
        connection = raw
        try:
            raw.settimeout(self._limits.first_request_s)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if (context := self._tls()) is not None:
                connection = context.wrap_socket(raw, server_side=True, do_handshake_on_connect=False)
                with self._lock:
                    self._open.discard(raw)
                    self._open.add(connection)
                    self._unauthenticated.replace(raw, connection)
                connection.do_handshake()
            self._serve_requests(connection, peer, accepted_s)
        except (OSError, ssl.SSLError) as error:
            log.debug("blob reader disconnected", peer=peer, reason=str(error))
        except Exception:
            log.exception("serving a blob failed", peer=peer)
        finally:
            with self._lock:
                for each in (raw, connection):
                    self._open.discard(each)
                    self._unauthenticated.remove(each)
            connection.close()

    def _serve_requests(self, connection: socket.socket, peer: str, accepted_s: float) -> None:
        waiting, deadline_s = b"", accepted_s + self._limits.first_request_s
        while not self._closing:
            try:
                read = self._read_head(connection, waiting, deadline_s)
            except MalformedRequest as error:
                self._refuse(connection, Refusal(400, str(error)), keep_alive=False)
                return
            if read is None:
                return
            (head, waiting), deadline_s = read, 0.0
            if not (self._answer(connection, head, peer) and head.keep_alive):
                return

    def _read_head(
        self, connection: socket.socket, waiting: bytes, deadline_s: float
    ) -> tuple[RequestHead, bytes] | None:
        """The next request, and the bytes behind it. None if the connection was closed, or if no request came before
        the deadline. With 0.0 the deadline counts from the request's first byte."""
        data = waiting
        if data and not deadline_s:
            deadline_s = time.monotonic() + self._limits.head_s
        while (end := data.find(END_OF_HEAD)) < 0:
            if len(data) > self._limits.head_bytes:
                raise MalformedRequest("the request's head is too long")
            left_s = deadline_s - time.monotonic() if deadline_s else self._limits.idle_s
            if left_s <= 0:
                return None
            connection.settimeout(left_s)
            piece = connection.recv(_READ_BYTES)
            if not piece:
                return None
            deadline_s = deadline_s or time.monotonic() + self._limits.head_s
            data += piece
        end += len(END_OF_HEAD)
        return read_head(data[:end]), data[end:]

    def _answer(self, connection: socket.socket, head: RequestHead, peer: str) -> bool:
        """Returns whether the connection can be used again."""
        connection.settimeout(self._limits.stall_s)
        if head.method not in ("GET", "HEAD"):
            return self._refuse(connection, Refusal(405, "only GET and HEAD are allowed"), keep_alive=False)
        if (refusal := self._check(head.headers.get("authorization", ""))) is not None:
            log.info("blob request refused", peer=peer, why=refusal.why)
            return self._refuse(connection, refusal, keep_alive=False)
        with self._lock:
            self._unauthenticated.remove(connection)
        file, growing = self._open_blob(head.digest) if head.digest else (None, None)
        if file is None and head.digest and self._is_expected(head.digest):
            return self._send_busy(connection, head)
        if file is None:
            what = f"the blob {head.digest} is not stored here" if head.digest else "the only path is /blobs/sha256:…"
            return self._refuse(connection, Refusal(404, what), keep_alive=head.keep_alive)
        with file:
            if head.is_chunk_list and growing is not None:
                why = f"the blob {head.digest} is still being fetched: it has no chunk list yet"
                return self._refuse(connection, Refusal(404, why), keep_alive=head.keep_alive)
            if head.is_chunk_list:
                return self._send_chunk_list(connection, head)
            return self._send_blob(connection, head, file.fileno(), growing, peer)

    def _send_busy(self, connection: socket.socket, head: RequestHead) -> bool:
        connection.sendall(_head(503, {"Retry-After": str(self._limits.busy_retry_s)}, 0, keep_alive=head.keep_alive))
        return True

    def _send_chunk_list(self, connection: socket.socket, head: RequestHead) -> bool:
        try:
            body = self._list_chunks(head.digest)
        except NotFound as error:
            return self._refuse(connection, Refusal(404, error.message), keep_alive=head.keep_alive)
        except (Unavailable, OSError) as error:
            log.info("chunk list cannot be sent now", digest=head.digest, reason=str(error))
            return self._send_busy(connection, head)
        connection.sendall(_head(200, {"Content-Type": "application/json"}, len(body), keep_alive=head.keep_alive))
        if head.method == "GET":
            connection.sendall(body)
        return True

    def _open_blob(self, digest: str) -> tuple[BinaryIO | None, GrowingFile | None]:
        """The finished file, or one that is being fetched. Looks twice: a download may end in between."""
        for _ in range(2):
            growing = None
            if (path := self._find(digest)) is None and (growing := self._find_growing(digest)) is not None:
                path = growing.path
            with contextlib.suppress(FileNotFoundError):
                if path is not None:
                    return path.open("rb"), growing
        return None, None

    def _send_blob(
        self, connection: socket.socket, head: RequestHead, descriptor: int, growing: GrowingFile | None, peer: str
    ) -> bool:
        etag, size = f'"{head.digest}"', growing.size if growing is not None else os.fstat(descriptor).st_size
        part = choose_range(head.headers.get("range", ""), size, condition=head.headers.get("if-range", ""), etag=etag)
        if isinstance(part, RangeNotSatisfiable):
            extra = {"Content-Range": f"bytes */{part.size}"}
            connection.sendall(_head(416, extra, 0, keep_alive=head.keep_alive))
            return True
        headers = {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes", "ETag": etag}
        if not part.whole:
            headers["Content-Range"] = f"bytes {part.start}-{part.start + part.count - 1}/{part.size}"
        connection.sendall(_head(200 if part.whole else 206, headers, part.count, keep_alive=head.keep_alive))
        if head.method == "HEAD":
            return True
        began_s = time.monotonic()
        sent = 0
        try:
            authorization = head.headers.get("authorization", "")
            steps = (
                _send_part(connection, descriptor, part)
                if growing is None
                else send_growing(connection, descriptor, part, growing, lambda: self._closing)
            )
            for step in steps:
                sent += step
                if self._has_ended(authorization):
                    log.info("blob reader lost its authorization", peer=peer, digest=head.digest)
                    break
        finally:
            with self._lock:
                self.sent_bytes += sent
        took_s = round(time.monotonic() - began_s, 3)
        note = log.info if part.whole else log.debug  # chunks are many
        note("blob sent", digest=head.digest, start=part.start, bytes=sent, peer=peer, took_s=took_s)
        return (
            sent == part.count
        )  # otherwise the file became shorter while it was sent: only closing the connection tells the reader

    def _refuse(self, connection: socket.socket, refusal: Refusal, *, keep_alive: bool) -> bool:
        body = (refusal.why + "\n").encode()
        headers = {"Content-Type": "text/plain; charset=utf-8"}
        connection.sendall(_head(refusal.status, headers, len(body), keep_alive=keep_alive) + body)
        return keep_alive


def _send_part(connection: socket.socket, descriptor: int, part: ByteRange) -> Iterator[int]:
    """Send the range in steps; yields the bytes sent by each step."""
    sent = 0
    if isinstance(connection, ssl.SSLSocket):  # the bytes must pass through this process to be encrypted
        buffer = memoryview(bytearray(_SEND_BYTES))
        while sent < part.count:
            read = os.preadv(descriptor, [buffer[: min(_SEND_BYTES, part.count - sent)]], part.start + sent)
            if not read:
                break
            connection.sendall(buffer[:read])
            sent += read
            yield read
        return
    timeout_s = connection.gettimeout()
    connection.settimeout(None)  # a blocking descriptor: otherwise each call would send only what fits into the buffer
    _set_send_timeout(connection, timeout_s)
    while sent < part.count:
        step = os.sendfile(connection.fileno(), descriptor, part.start + sent, min(_STEP_BYTES, part.count - sent))
        if not step:
            break
        sent += step
        yield step
    connection.settimeout(timeout_s)


def _set_send_timeout(connection: socket.socket, timeout_s: float | None) -> None:
    """The kernel's timeout for a blocking send without progress."""
    whole, fraction = divmod(timeout_s or 0.0, 1.0)
    span = struct.pack("@ll", int(whole), int(fraction * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, span)


def _head(status: int, headers: dict[str, str], length: int, *, keep_alive: bool) -> bytes:
    lines = [f"HTTP/1.1 {status} {_REASONS[status]}", *(f"{name}: {value}" for name, value in headers.items())]
    lines += [f"Content-Length: {length}", f"Connection: {'keep-alive' if keep_alive else 'close'}", "", ""]
    return "\r\n".join(lines).encode("latin-1")
