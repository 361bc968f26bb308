"""A gRPC client for one backend process; translates gRPC errors into HTTP errors
(docs/reference/wire/grpc.md#status-codes).

One channel per process, which stays open: a connection per call would be slow. Calls have no deadline, because a busy
process may take long; a client that disconnects cancels its call.
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
from corral.inference.api_errors import ApiError, not_implemented
from corral.inference.backend_process import BackendProcess
from corral.inference.engine_errors import explain
from corral.kit.log import get_log
from corral.kit.tracing.context import TRACEPARENT
from corral.kit.tracing.tracer import OpenSpan, begin_child

log = get_log(__name__)
R = TypeVar("R", bound=Message)

MAX_MESSAGE_BYTES = 50 * 1024 * 1024
LOAD_TIMEOUT_S = 6 * 3600.0
BUSY_RETRY_S = 1
_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),  # do not reuse a connection to an earlier process with this address
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # In spite of its name the deadline of connecting. A process whose engine holds every core may take long to accept.
    ("grpc.min_reconnect_backoff_ms", 20_000),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
MISMATCH = "model identity mismatch"
_NOT_LOADED = "model not loaded"
_TOO_LARGE = "larger than max"
_REFUSED = "failed to connect"
Code = grpc.StatusCode
_SERVICE = "backend.Backend"


class ModelNotLoaded(Exception):
    """The process has no model loaded any more: its memory was freed."""


class BackendClient:
    """`call` and `stream` raise ApiError for errors that the client is told, UpstreamFailed if the process cannot be
    reached."""

    def __init__(self, process: BackendProcess) -> None:
        self.process = process
        self._channel = grpc.aio.insecure_channel(process.address, options=_OPTIONS)
        self._stub = BackendStub(self._channel)
        self._metadata = (("authorization", f"Bearer {process.token}"),) if process.token else ()
        self._loading: asyncio.Task[None] | None = None
        self._loads = 0  # number of completed loads

    async def close(self) -> None:
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.gather(self._loading, return_exceptions=True)
        await self._channel.close()

    async def call(self, rpc: str, request: Message, reply: type[R]) -> R:
        """A unary call. Cancelling this coroutine cancels the call."""
        loads = self._loads
        try:
            return await self._call_once(rpc, request, reply)
        except ModelNotLoaded:
            await self._load_again(loads)
        try:
            return await self._call_once(rpc, request, reply)
        except ModelNotLoaded as error:
            raise _not_loaded(error) from error

    async def _call_once(self, rpc: str, request: Message, reply: type[R]) -> R:
        span = begin_child(f"{_SERVICE}/{rpc}", {"rpc.system": "grpc", "rpc.method": rpc})
        try:
            answer = await getattr(self._stub, rpc)(request, metadata=self._metadata_of(span))
        except grpc.aio.AioRpcError as error:
            raise self._translate(error, rpc, span) from error
        finally:
            if span is not None:
                span.end()
        if not isinstance(answer, reply):
            raise TypeError(f"{rpc} answered with {type(answer).__name__}")
        return answer

    @contextlib.asynccontextmanager
    async def stream(self, rpc: str, request: Message) -> AsyncIterator[AsyncIterator[Any]]:
        """A streaming call. Entering waits for the first reply, so errors before it are raised there. Leaving the block
        ends the call."""
        loads = self._loads
        try:
            replies, first = await self._begin(rpc, request)
        except ModelNotLoaded:
            await self._load_again(loads)
            try:
                replies, first = await self._begin(rpc, request)
            except ModelNotLoaded as error:
                raise _not_loaded(error) from error
        async with contextlib.aclosing(_resumed(first, replies)) as resumed, contextlib.aclosing(replies):
            yield resumed

    async def enter_stream(self, stack: contextlib.AsyncExitStack, rpc: str, request: Message) -> Any | None:
        """`stream` until the stack ends. None if the backend does not stream."""
        try:
            return await stack.enter_async_context(self.stream(rpc, request))
        except ApiError as refused:
            if refused.status != 501:
                raise
            return None

    async def _begin(self, rpc: str, request: Message) -> tuple[AsyncGenerator[Any, None], Any]:
        replies = self._replies(rpc, request)
        try:
            return replies, await anext(replies, None)
        except BaseException:
            await replies.aclose()
            raise

    async def _replies(self, rpc: str, request: Message) -> AsyncGenerator[Any, None]:
        span = begin_child(f"{_SERVICE}/{rpc}", {"rpc.system": "grpc", "rpc.method": rpc})
        call = getattr(self._stub, rpc)(request, metadata=self._metadata_of(span))
        try:
            while (reply := await call.read()) is not grpc.aio.EOF:
                if span is not None and not span.events:
                    span.event("first reply")
                yield reply
        except grpc.aio.AioRpcError as error:
            raise self._translate(error, rpc, span) from error
        finally:
            call.cancel()
            if span is not None:
                span.end()

    # A model that was freed is loaded again, once for all waiting calls.

    async def _load_again(self, loads: int) -> None:
        """`loads`: the number of loads when the call began that found no model."""
        if not self.process.load or loads != self._loads:
            return
        if self._loading is None or self._loading.done():
            self._loading = asyncio.create_task(self._load(), name="load-again")
            self._loading.add_done_callback(_retrieve_error)
        await asyncio.shield(self._loading)

    async def _load(self) -> None:
        log.warning("backend has no model loaded; loading it again", model=self.process.model)
        options = json_format.Parse(self.process.load, pb.ModelOptions())
        try:
            result = await self._stub.LoadModel(options, timeout=LOAD_TIMEOUT_S, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise self._translate(error, "LoadModel") from error
        if not result.success:
            raise ApiError(503, f"The model could not be loaded again: {result.message}", code="model_not_loaded")
        self._loads += 1

    def _metadata_of(self, span: OpenSpan | None) -> tuple[tuple[str, str], ...]:
        if span is None:
            return self._metadata
        return (*self._metadata, (TRACEPARENT.decode(), span.context.traceparent().decode()))

    def _translate(self, error: grpc.aio.AioRpcError, rpc: str, span: OpenSpan | None = None) -> Exception:
        if span is not None:
            span.error = error.code().name
            span.attributes["error.type"] = error.code().name
        return translate_error(error.code(), error.details() or "", rpc, self.process)


def _retrieve_error(loading: asyncio.Task[None]) -> None:
    """Retrieve the error: all waiting callers may have gone."""
    if not loading.cancelled():
        loading.exception()


async def _resumed(first: Any, rest: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
    if first is None:
        return
    yield first
    async for reply in rest:
        yield reply


def translate_error(code: grpc.StatusCode, details: str, rpc: str, process: BackendProcess) -> Exception:
    """Translate a gRPC error. UNAVAILABLE is not an error of the backend: it means that the process cannot be
    reached."""
    words = details or code.name
    if (explained := explain(process.model, details)) is not None:
        return explained
    lower = details.lower()
    match code:
        case Code.UNAVAILABLE:
            return UpstreamFailed(words, refused=_REFUSED in lower)
        case Code.NOT_FOUND if MISMATCH in lower:
            # Both conditions are needed: some backends return NOT_FOUND for empty results. 410: pick another process.
            return ApiError(410, f"This process serves another model: {words}", code="gone")
        case Code.NOT_FOUND:
            return ApiError(404, words, code="not_found")
        case Code.UNIMPLEMENTED:
            return not_implemented(process.backend or "backend", rpc)
        case Code.FAILED_PRECONDITION:
            return ModelNotLoaded(words)
        case Code.RESOURCE_EXHAUSTED if _TOO_LARGE in lower:
            return ApiError(413, f"The request or its answer is too large: {words}", code="request_too_large")
        case Code.RESOURCE_EXHAUSTED if rpc == "Embedding":
            return ApiError(400, words, code="context_length_exceeded")
        case Code.RESOURCE_EXHAUSTED:
            return ApiError(503, words, code="busy", retry_after_s=BUSY_RETRY_S)
        case Code.INVALID_ARGUMENT | Code.OUT_OF_RANGE:
            return ApiError(400, words)
        case Code.DEADLINE_EXCEEDED:
            return ApiError(504, words, code="timeout")
        case Code.UNAUTHENTICATED | Code.PERMISSION_DENIED:
            return ApiError(502, f"The backend does not accept this worker: {words}", code="backend_failed")
    if _NOT_LOADED in lower:
        return ModelNotLoaded(words)
    if lower.endswith("unimplemented"):  # Go backends report it as text under another code
        return not_implemented(process.backend or "backend", rpc)
    return ApiError(500, f"{rpc}: {words}", code="backend_failed")


def _not_loaded(error: ModelNotLoaded) -> ApiError:
    return ApiError(503, f"The backend has no model loaded: {error}", code="model_not_loaded", retry_after_s=5)
