"""A listener that sends blobs: a thread for each connection, the kernel copies from file to socket.

Apart from every other port, because threads that send gigabytes and a loop that answers in microseconds do not share a
line well (and uvloop has no `sendfile`). Who may ask is `check`'s to say, where a blob lies `find`'s; both are called
in threads. A blob that is removed while it is sent is sent to its end: the open file keeps it.
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

from corral.blobs.serving.asked import END_OF_HEAD, BadRequest, Beyond, Head, Part, choose_part, read_head
from corral.blobs.serving.newcomers import Newcomers
from corral.kit.log import get_log
from corral.kit.threads import run_uncancelled

log = get_log(__name__)

_READ_BYTES = 16 << 10
_SEND_BYTES = 1 << 20
_STEP_BYTES = 8 << 20  # between two looks at whether the reader may go on
_BACKLOG = 512
_WORDS = {
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
    newcomers: int = 64  # of them at most so many that have not shown a token yet
    newcomer_s: float = 5.0  # and each of these for so long, TLS and the first request together
    head_bytes: int = 16 << 10
    head_s: float = 10.0  # for a request to come once it has begun
    idle_s: float = 30.0  # between two requests
    stall_s: float = 60.0  # a reader that takes nothing for so long is gone
    busy_retry_s: int = 2  # what those are told who find no place


Find = Callable[[str], Path | None]  # by digest
Check = Callable[[str], Refusal | None]  # given the Authorization header
HasEnded = Callable[[str], bool]  # given the Authorization header of a reader that was let in
Coming = Callable[[str], bool]  # whether a blob that is not here will be soon


def _never(_what: str) -> bool:
    return False


class BlobListener:
    """`async with BlobListener(find, check) as listener: port = await listener.listen(host, port)`."""

    def __init__(
        self,
        find: Find,
        check: Check,
        *,
        has_ended: HasEnded = _never,
        coming: Coming = _never,
        tls: Callable[[], ssl.SSLContext | None] = lambda: None,
        limits: ServingLimits | None = None,
    ) -> None:
        """`tls` is asked for each connection: a certificate may be renewed meanwhile. `has_ended` is asked while a blob
        is sent: a reader whose right was taken away gets no more of it."""
        self._find = find
        self._check = check
        self._has_ended = has_ended
        self._coming = coming
        self._tls = tls
        self._limits = limits or ServingLimits()
        self._listeners: list[socket.socket] = []
        self._threads = ThreadPoolExecutor(self._limits.connections, thread_name_prefix="blobs")
        self._open: set[socket.socket] = set()
        self._newcomers = Newcomers(self._limits.newcomers)
        self._lock = threading.Lock()  # over what threads change: the two below and the two above
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
        """Accept there; 0 picks a port, which is returned. Raises OSError."""
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
        """One per turn of the loop: others wait for theirs."""
        try:
            connection, peer = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):
            return
        except OSError as error:  # out of descriptors: those at work will give some back
            log.warning("a connection could not be accepted", reason=error.strerror)
            return
        with self._lock:
            full = len(self._open) >= self._limits.connections
            if not full:
                self._open.add(connection)
                crowded = not self._newcomers.add(connection)
        if full:
            self._turn_away(connection)
            return
        if crowded:
            log.debug("a connection that showed no token gave way to another", peer=str(peer[0]))
        self._threads.submit(self._serve, connection, str(peer[0]), time.monotonic())

    def _turn_away(self, connection: socket.socket) -> None:
        log.info("a blob's reader was told to come back", open=self._limits.connections)
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            if self._tls() is None:  # over TLS nothing can be said without waiting for the other side
                connection.send(_head(503, {"Retry-After": str(self._limits.busy_retry_s)}, 0, keep_alive=False))
        connection.close()

    # In a thread, from here on.

    def _serve(self, raw: socket.socket, peer: str, came_s: float) -> None:
        connection = raw
        try:
            raw.settimeout(self._limits.newcomer_s)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if (context := self._tls()) is not None:
                connection = context.wrap_socket(raw, server_side=True, do_handshake_on_connect=False)
                with self._lock:
                    self._open.discard(raw)
                    self._open.add(connection)
                    self._newcomers.replace(raw, connection)
                connection.do_handshake()
            self._converse(connection, peer, came_s)
        except (OSError, ssl.SSLError) as error:
            log.debug("a blob's reader went away", peer=peer, reason=str(error))
        except Exception:
            log.exception("serving a blob failed", peer=peer)
        finally:
            with self._lock:
                for each in (raw, connection):
                    self._open.discard(each)
                    self._newcomers.remove(each)
            connection.close()

    def _converse(self, connection: socket.socket, peer: str, came_s: float) -> None:
        waiting, deadline_s = b"", came_s + self._limits.newcomer_s
        while not self._closing:
            try:
                read = self._read_head(connection, waiting, deadline_s)
            except BadRequest as error:
                self._refuse(connection, Refusal(400, str(error)), keep_alive=False)
                return
            if read is None:
                return
            (head, waiting), deadline_s = read, 0.0
            if not (self._answer(connection, head, peer) and head.keep_alive):
                return

    def _read_head(self, connection: socket.socket, waiting: bytes, deadline_s: float) -> tuple[Head, bytes] | None:
        """The next request, and what came behind it. None when nobody asks any more, or not before the deadline; with
        0.0 that is counted from its first byte."""
        data = waiting
        if data and not deadline_s:
            deadline_s = time.monotonic() + self._limits.head_s
        while (end := data.find(END_OF_HEAD)) < 0:
            if len(data) > self._limits.head_bytes:
                raise BadRequest("the head of the request is too long")
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

    def _answer(self, connection: socket.socket, head: Head, peer: str) -> bool:
        """Whether the connection can be used again."""
        connection.settimeout(self._limits.stall_s)
        if head.method not in ("GET", "HEAD"):
            return self._refuse(connection, Refusal(405, "blobs are only read"), keep_alive=False)
        if (refusal := self._check(head.headers.get("authorization", ""))) is not None:
            log.info("a blob's reader was refused", peer=peer, why=refusal.why)
            return self._refuse(connection, refusal, keep_alive=False)
        with self._lock:
            self._newcomers.remove(connection)
        path = self._find(head.digest) if head.digest else None
        try:
            file = path.open("rb") if path is not None else None
        except FileNotFoundError:
            file = None
        if file is None and head.digest and self._coming(head.digest):
            connection.sendall(
                _head(503, {"Retry-After": str(self._limits.busy_retry_s)}, 0, keep_alive=head.keep_alive)
            )
            return True
        if file is None:
            what = f"{head.digest} is not here" if head.digest else "there is nothing here but /blobs/sha256:…"
            return self._refuse(connection, Refusal(404, what), keep_alive=head.keep_alive)
        with file:
            return self._send_blob(connection, head, file.fileno(), peer)

    def _send_blob(self, connection: socket.socket, head: Head, descriptor: int, peer: str) -> bool:
        etag, size = f'"{head.digest}"', os.fstat(descriptor).st_size
        part = choose_part(head.headers.get("range", ""), size, condition=head.headers.get("if-range", ""), etag=etag)
        if isinstance(part, Beyond):
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
            for step in _send_part(connection, descriptor, part):
                sent += step
                if self._has_ended(authorization):
                    log.info("a blob's reader lost its right", peer=peer, digest=head.digest)
                    break
        finally:
            with self._lock:
                self.sent_bytes += sent
        took_s = round(time.monotonic() - began_s, 3)
        log.info("blob sent", digest=head.digest, start=part.start, bytes=sent, peer=peer, took_s=took_s)
        return sent == part.count  # else the file became shorter under us, and only closing tells

    def _refuse(self, connection: socket.socket, refusal: Refusal, *, keep_alive: bool) -> bool:
        body = (refusal.why + "\n").encode()
        headers = {"Content-Type": "text/plain; charset=utf-8"}
        connection.sendall(_head(refusal.status, headers, len(body), keep_alive=keep_alive) + body)
        return keep_alive


def _send_part(connection: socket.socket, descriptor: int, part: Part) -> Iterator[int]:
    """Step by step, how many bytes went out."""
    sent = 0
    if isinstance(connection, ssl.SSLSocket):  # the bytes must pass through us to be encrypted
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
    connection.settimeout(None)  # the descriptor itself blocks, or each call would send what fits and no more
    _set_send_timeout(connection, timeout_s)
    while sent < part.count:
        step = os.sendfile(connection.fileno(), descriptor, part.start + sent, min(_STEP_BYTES, part.count - sent))
        if not step:
            break
        sent += step
        yield step
    connection.settimeout(timeout_s)


def _set_send_timeout(connection: socket.socket, timeout_s: float | None) -> None:
    """The kernel's own clock on a blocking send: without progress for so long it fails."""
    whole, fraction = divmod(timeout_s or 0.0, 1.0)
    span = struct.pack("@ll", int(whole), int(fraction * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, span)


def _head(status: int, headers: dict[str, str], length: int, *, keep_alive: bool) -> bytes:
    lines = [f"HTTP/1.1 {status} {_WORDS[status]}", *(f"{name}: {value}" for name, value in headers.items())]
    lines += [f"Content-Length: {length}", f"Connection: {'keep-alive' if keep_alive else 'close'}", "", ""]
    return "\r\n".join(lines).encode("latin-1")
