"""Calls to one backend process, and what its gRPC errors mean to whoever asked over HTTP
(docs/reference/wire/grpc.md#status-codes).

One channel per process, opened once it serves and kept: a connection per call is what makes upstream slow. A call has
no deadline of its own: busy is not gone, and a client who leaves cancels it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf import json_format
from google.protobuf.message import Message

from corral.contract import backend_pb2 as pb
from corral.contract.backend_pb2_grpc import BackendStub
from corral.contract.http import UpstreamFailed
from corral.inference.api_errors import Refused, not_implemented
from corral.inference.backend_process import Served
from corral.inference.engine_errors import explain
from corral.kit.log import get_log

log = get_log(__name__)
R = TypeVar("R", bound=Message)

LARGEST = 50 * 1024 * 1024
LOAD_TIMEOUT_S = 6 * 3600.0
BUSY_RETRY_S = 1
_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),  # another process may have had this address, and its connection
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_send_message_length", LARGEST),
    ("grpc.max_receive_message_length", LARGEST),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
MISMATCH = "model identity mismatch"
_NOT_LOADED = "model not loaded"
_TOO_LARGE = "larger than max"
_REFUSED = "failed to connect"
Code = grpc.StatusCode


class NotLoaded(Exception):
    """The process holds no model any more: somebody freed its memory."""


class Caller:
    """`ask` and `stream` raise Refused for what the client is told, UpstreamFailed when the process is not there."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self._channel = grpc.aio.insecure_channel(served.address, options=_OPTIONS)
        self._stub = BackendStub(self._channel)
        self._metadata = (("authorization", f"Bearer {served.token}"),) if served.token else ()
        self._loading: asyncio.Task[None] | None = None
        self._loads = 0  # how often that has been done

    async def close(self) -> None:
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.gather(self._loading, return_exceptions=True)
        await self._channel.close()

    async def ask(self, rpc: str, request: Message, reply: type[R]) -> R:
        """One question, one answer. Cancelling it cancels the call."""
        loads = self._loads
        try:
            return await self._ask(rpc, request, reply)
        except NotLoaded:
            await self._load_again(loads)
        try:
            return await self._ask(rpc, request, reply)
        except NotLoaded as error:
            raise _not_loaded(error) from error

    async def _ask(self, rpc: str, request: Message, reply: type[R]) -> R:
        try:
            answer = await getattr(self._stub, rpc)(request, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise self._told(error, rpc) from error
        if not isinstance(answer, reply):
            raise TypeError(f"{rpc} answered with {type(answer).__name__}")
        return answer

    @contextlib.asynccontextmanager
    async def stream(self, rpc: str, request: Message) -> AsyncIterator[AsyncIterator[Any]]:
        """The replies as they come, the first already here: what fails before it is raised on entering. Leaving the
        block ends the call, however far it is."""
        loads = self._loads
        try:
            replies, first = await self._begin(rpc, request)
        except NotLoaded:
            await self._load_again(loads)
            try:
                replies, first = await self._begin(rpc, request)
            except NotLoaded as error:
                raise _not_loaded(error) from error
        async with contextlib.aclosing(_resumed(first, replies)) as resumed, contextlib.aclosing(replies):
            yield resumed

    async def _begin(self, rpc: str, request: Message) -> tuple[AsyncGenerator[Any, None], Any]:
        replies = self._replies(rpc, request)
        try:
            return replies, await anext(replies, None)
        except BaseException:
            await replies.aclose()
            raise

    async def _replies(self, rpc: str, request: Message) -> AsyncGenerator[Any, None]:
        call = getattr(self._stub, rpc)(request, metadata=self._metadata)
        try:
            while (reply := await call.read()) is not grpc.aio.EOF:
                yield reply
        except grpc.aio.AioRpcError as error:
            raise self._told(error, rpc) from error
        finally:
            call.cancel()

    # A model that was freed is loaded again, once for all who wait.

    async def _load_again(self, loads: int) -> None:
        """`loads`: how often it had been done when the call began that found no model."""
        if not self.served.load or loads != self._loads:
            return
        if self._loading is None or self._loading.done():
            self._loading = asyncio.create_task(self._load(), name="load-again")
            self._loading.add_done_callback(_seen)
        await asyncio.shield(self._loading)

    async def _load(self) -> None:
        log.warning("the backend has no model loaded: it is loaded again", model=self.served.model)
        options = json_format.Parse(self.served.load, pb.ModelOptions())
        try:
            result = await self._stub.LoadModel(options, timeout=LOAD_TIMEOUT_S, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise self._told(error, "LoadModel") from error
        if not result.success:
            raise Refused(503, f"The model could not be loaded again: {result.message}", code="model_not_loaded")
        self._loads += 1

    def _told(self, error: grpc.aio.AioRpcError, rpc: str) -> Exception:
        return told(error.code(), error.details() or "", rpc, self.served)


def _seen(loading: asyncio.Task[None]) -> None:
    """Everybody who waited may have left by now: what it came to is then nobody's."""
    if not loading.cancelled():
        loading.exception()


async def _resumed(first: Any, rest: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
    if first is None:
        return
    yield first
    async for reply in rest:
        yield reply


def told(code: grpc.StatusCode, details: str, rpc: str, served: Served) -> Exception:
    """What a client hears of an error of the backend's. UNAVAILABLE is not the backend's own: it is its absence."""
    words = details or code.name
    if (explained := explain(served.model, details)) is not None:
        return explained
    lower = details.lower()
    match code:
        case Code.UNAVAILABLE:
            return UpstreamFailed(words, refused=_REFUSED in lower)
        case Code.NOT_FOUND if MISMATCH in lower:
            # Both are needed: some backends say NOT_FOUND when they merely found nothing. 410: pick another process.
            return Refused(410, f"This process serves another model: {words}", code="gone")
        case Code.NOT_FOUND:
            return Refused(404, words, code="not_found")
        case Code.UNIMPLEMENTED:
            return not_implemented(served.backend or "backend", rpc)
        case Code.FAILED_PRECONDITION:
            return NotLoaded(words)
        case Code.RESOURCE_EXHAUSTED if _TOO_LARGE in lower:
            return Refused(413, f"The request or its answer is too large: {words}", code="request_too_large")
        case Code.RESOURCE_EXHAUSTED if rpc == "Embedding":
            return Refused(400, words, code="context_length_exceeded")
        case Code.RESOURCE_EXHAUSTED:
            return Refused(503, words, code="busy", retry_after_s=BUSY_RETRY_S)
        case Code.INVALID_ARGUMENT | Code.OUT_OF_RANGE:
            return Refused(400, words)
        case Code.DEADLINE_EXCEEDED:
            return Refused(504, words, code="timeout")
        case Code.UNAUTHENTICATED | Code.PERMISSION_DENIED:
            return Refused(502, f"The backend does not accept this worker: {words}", code="backend_failed")
    if _NOT_LOADED in lower:
        return NotLoaded(words)
    if lower.endswith("unimplemented"):  # Go backends say it in words, under another code
        return not_implemented(served.backend or "backend", rpc)
    return Refused(500, f"{rpc}: {words}", code="backend_failed")


def _not_loaded(error: NotLoaded) -> Refused:
    return Refused(503, f"The backend has no model loaded: {error}", code="model_not_loaded", retry_after_s=5)
