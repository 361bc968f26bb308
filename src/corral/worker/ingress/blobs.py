"""`/blobs/<digest>`: sends blobs, and verified chunks of blobs that are still arriving, to other workers.

A token names the asking node, this node and the blobs. The number of uploads at a time is bounded: a further request is
answered 503, and the asking worker turns to another source.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable

from corral.blobs.serving.http_request import PREFIX, ByteRange, RangeNotSatisfiable, choose_range
from corral.blobs.swarm.rate_limit import RateLimit
from corral.blobs.swarm.sources import CHUNKS_HEADER
from corral.contract.http import ClientGone, Headers, Request, Responder
from corral.contract.sources import is_digest
from corral.kit.log import get_log
from corral.kit.threads import run_uncancelled, wait_until_done
from corral.worker.files.blob_exchange import RevokedNodes
from corral.worker.files.served_blobs import ServedBlob, ServedBlobs
from corral.worker.ingress.responses import READING, send_error, send_wrong_method
from corral.worker.ingress.tokens import TokenVerifier

log = get_log(__name__)

ROUTE = PREFIX.encode()
PIECE_BYTES = 512 << 10
BUSY_RETRY_S = 1
MAX_CHUNKS_HEADER = 4096  # characters; a longer bitmap is left to the controller
_CHUNKS_HEADER = CHUNKS_HEADER.lower().encode()


class BlobRoutes:
    def __init__(
        self,
        served: ServedBlobs,
        tokens: TokenVerifier,
        revoked: RevokedNodes,
        limit: RateLimit,
        on_sent: Callable[[int], None],
    ) -> None:
        self._served = served
        self._tokens = tokens
        self._revoked = revoked
        self._limit = limit
        self._on_sent = on_sent

    async def handle(self, request: Request, responder: Responder) -> int:
        """The token is valid for this node and for blobs; here follows whether it is for this one."""
        if request.method not in READING:
            return await send_wrong_method(responder)
        digest = request.route.removeprefix(ROUTE).decode("latin-1")
        authorization = request.header(b"authorization") or b""
        if not is_digest(digest):
            return await send_error(responder, 404, "the only path is /blobs/sha256:…", "not_found")
        if (why := self._refusal(authorization, digest)) is not None:
            log.info("blob request refused", why=why, request_id=request.request_id)
            return await send_error(responder, 403, why, "denied")
        blob = await run_uncancelled(self._served.find, digest)
        if blob is None:
            return await send_error(responder, 404, f"the blob {digest} is not stored here", "not_found")
        with self._served.upload() as is_free:
            if not is_free:
                retry = ((b"retry-after", str(BUSY_RETRY_S).encode()),)
                return await send_error(responder, 503, "all upload slots are in use", "no_capacity", retry)
            return await self._send(request, responder, blob, digest, authorization)

    def _refusal(self, authorization: bytes, digest: str) -> str | None:
        claims = self._tokens.claims(authorization)
        if claims is None or digest not in claims.digests:
            return "the token does not name this blob"
        if self._revoked.is_revoked(claims.sub, claims.exp):
            return "the token has ended: its node was deleted or replaced"
        return None

    async def _send(
        self, request: Request, responder: Responder, blob: ServedBlob, digest: str, authorization: bytes
    ) -> int:
        range_header = (request.header(b"range") or b"").decode("latin-1")
        part = choose_range(range_header, blob.size)
        if isinstance(part, RangeNotSatisfiable):
            more = ((b"content-range", f"bytes */{part.size}".encode()),)
            return await send_error(responder, 416, "the range begins behind the end of the blob", "invalid", more)
        if not blob.covers(part.start, part.count):
            return await send_error(responder, 404, "these bytes are not here yet", "not_found")
        try:
            descriptor = await run_uncancelled(os.open, blob.path, os.O_RDONLY)
        except FileNotFoundError:  # removed, or completed and renamed, since it was found
            return await send_error(responder, 404, f"the blob {digest} is not stored here", "not_found")
        try:
            status = 200 if part.whole else 206
            pieces = self._pieces(descriptor, part, authorization, digest)
            await responder.stream(status, _headers(blob, part), pieces, length=part.count)
            return status
        finally:
            os.close(descriptor)

    async def _pieces(
        self, descriptor: int, part: ByteRange, authorization: bytes, digest: str
    ) -> AsyncIterator[bytes]:
        """Reads ahead: the next piece is read while the relay sends the present one."""
        sent = 0
        reading = self._read(descriptor, part, 0)
        try:
            while sent < part.count:
                piece = await asyncio.shield(reading)
                sent += len(piece)
                if not piece or self._refusal(authorization, digest) is not None:
                    # Only closing the connection tells the reader.
                    raise ClientGone("the blob became shorter, or its reader's token ended")
                reading = self._read(descriptor, part, sent)
                yield piece
                self._on_sent(len(piece))
                await self._limit.take(len(piece))
        finally:
            await wait_until_done(reading)  # the caller closes the descriptor

    def _read(self, descriptor: int, part: ByteRange, done: int) -> asyncio.Future[bytes]:
        count = min(PIECE_BYTES, part.count - done)
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(None, os.pread, descriptor, count, part.start + done)


def _headers(blob: ServedBlob, part: ByteRange) -> Headers:
    headers = [(b"content-type", b"application/octet-stream"), (b"accept-ranges", b"bytes")]
    if not part.whole:
        span = f"bytes {part.start}-{part.start + part.count - 1}/{part.size}"
        headers.append((b"content-range", span.encode()))
    if blob.have is not None and len(encoded := blob.have.encode()) <= MAX_CHUNKS_HEADER:
        headers.append((_CHUNKS_HEADER, encoded.encode()))
    return tuple(headers)
