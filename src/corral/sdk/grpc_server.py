"""Serves a `Backend` over LocalAI's gRPC (docs/reference/wire/grpc.md). Checks the token and the model identity before
any RPC."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
import grpc.aio

from corral.contract import backend_pb2 as pb
from corral.contract.backend_pb2_grpc import BackendServicer, add_BackendServicer_to_server
from corral.sdk.backend import (
    Backend,
    BackendError,
    BadRequest,
    Chat,
    ChatMessage,
    Model,
    NotLoaded,
    Piece,
    ToolCall,
    pieces,
)

MAX_MESSAGE_BYTES = 50 * 1024 * 1024
STOP_GRACE_S = 5.0
_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),  # otherwise a second process on this port would silently receive some of the calls
)
if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]


class GrpcService(BackendServicer):
    """Subclass it to add an RPC for which `Backend` has no method, and pass it to `serve(service=…)`."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.identity = ""  # of the loaded model
        self.loaded = False
        self.busy = 0

    async def Health(self, request: pb.HealthMessage, context: Context) -> pb.Reply:
        return pb.Reply(message=b"OK")

    async def LoadModel(self, request: pb.ModelOptions, context: Context) -> pb.Result:
        try:
            await self.backend.load(_model(request))
        except Exception as error:  # any error of an engine is reported as the reason
            return pb.Result(success=False, message=str(error) or type(error).__name__)
        self.identity, self.loaded = request.Model, True
        return pb.Result(success=True, message="loaded")

    async def Free(self, request: pb.HealthMessage, context: Context) -> pb.Result:
        await self.backend.unload()
        self.identity, self.loaded = "", False
        return pb.Result(success=True)

    async def Status(self, request: pb.HealthMessage, context: Context) -> pb.StatusResponse:
        states = pb.StatusResponse.State
        state = states.UNINITIALIZED if not self.loaded else states.BUSY if self.busy else states.READY
        used = _resident_bytes()
        return pb.StatusResponse(state=state, memory=pb.MemoryUsageData(total=used, breakdown={"rss": used}))

    async def Predict(self, request: pb.PredictOptions, context: Context) -> pb.Reply:
        async with self.answering(context):
            parts = [piece async for piece in pieces(self.backend, chat_of(request))]
        text = "".join(piece for piece in parts if isinstance(piece, str))
        reply = self._last(text, len(parts), request)
        if calls := _whole_calls(parts):
            reply.chat_deltas.append(pb.ChatDelta(content=text, tool_calls=calls))
        return reply

    async def PredictStream(self, request: pb.PredictOptions, context: Context) -> AsyncIterator[pb.Reply]:
        count = 0
        async with self.answering(context), contextlib.aclosing(pieces(self.backend, chat_of(request))) as parts:
            async for piece in parts:
                count += 1
                if isinstance(piece, str):
                    yield pb.Reply(message=piece.encode(), chat_deltas=[pb.ChatDelta(content=piece)])
                else:
                    yield pb.Reply(chat_deltas=[pb.ChatDelta(tool_calls=[_call(piece)])])
        yield self._last("", count, request)

    async def Embedding(self, request: pb.PredictOptions, context: Context) -> pb.EmbeddingResult:
        async with self.answering(context):
            vector = await self.backend.embed(request.Embeddings)
        return pb.EmbeddingResult(
            embeddings=vector,
            prompt_tokens=len(request.Embeddings.split()),
            layout=pb.EmbeddingLayout.EMBEDDING_LAYOUT_FINAL,
        )

    async def TokenizeString(self, request: pb.PredictOptions, context: Context) -> pb.TokenizationResponse:
        async with self.answering(context):
            tokens = await self.backend.tokenize(request.Prompt)
        return pb.TokenizationResponse(length=len(tokens), tokens=tokens)

    async def Rerank(self, request: pb.RerankRequest, context: Context) -> pb.RerankResult:
        documents = list(request.documents)
        async with self.answering(context):
            scores = await self.backend.rerank(request.query, documents)
        ranked = sorted(range(len(documents)), key=lambda at: -scores[at])[: request.top_n or None]
        count = sum(len(text.split()) for text in (request.query, *documents))
        return pb.RerankResult(
            usage=pb.Usage(total_tokens=count, prompt_tokens=count),
            results=[pb.DocumentResult(index=at, text=documents[at], relevance_score=scores[at]) for at in ranked],
        )

    async def AudioTranscription(self, request: pb.TranscriptRequest, context: Context) -> pb.TranscriptResult:
        async with self.answering(context):
            text = await self.backend.transcribe(Path(request.dst), request.language)
        return pb.TranscriptResult(text=text, language=request.language)

    async def TTS(self, request: pb.TTSRequest, context: Context) -> pb.Result:
        async with self.answering(context):
            sound = await self.backend.speak(request.text, request.voice)
            await asyncio.to_thread(Path(request.dst).write_bytes, sound)
        return pb.Result(success=True)

    @contextlib.asynccontextmanager
    async def answering(self, context: Context) -> AsyncIterator[None]:
        """Around work that needs the model: counts it, and translates the backend's errors into gRPC's."""
        self.busy += 1
        try:
            if not self.loaded:
                raise NotLoaded("model not loaded")
            yield
        except BackendError as error:
            await abort(context, grpc.StatusCode[error.grpc_code], str(error))
        finally:
            self.busy -= 1

    def _last(self, text: str, count: int, request: pb.PredictOptions) -> pb.Reply:
        return pb.Reply(message=text.encode(), tokens=count, prompt_tokens=len(chat_of(request).text.split()))


class Guard(grpc.aio.ServerInterceptor):
    """Checks first the token, then the identity, for every RPC. It is one interceptor, because a refusal of two nested
    ones can get lost."""

    def __init__(self, service: GrpcService, token: str) -> None:
        self._service = service
        self._token = token

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        refused = why_refused(self._token, dict(handler_call_details.invocation_metadata or ()))
        return checked(handler, self._service, refused)


def checked(handler: Any, service: GrpcService, refused: str | None) -> Any:
    """The handler, with the checks before it runs."""

    async def check(request: Any, context: Context) -> None:
        if refused is not None:
            await abort(context, grpc.StatusCode.UNAUTHENTICATED, refused)
        requested = getattr(request, "ModelIdentity", "")
        if requested and service.identity and requested != service.identity:
            words = f"model identity mismatch: loaded {service.identity!r}, requested {requested!r}"
            await abort(context, grpc.StatusCode.NOT_FOUND, words)

    async def once(request: Any, context: Context) -> Any:
        await check(request, context)
        return await (handler.unary_unary or handler.stream_unary)(request, context)

    async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
        await check(request, context)
        async with contextlib.aclosing((handler.unary_stream or handler.stream_stream)(request, context)) as parts:
            async for part in parts:
                yield part

    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[handler.request_streaming, handler.response_streaming]
    behaviour: Any = stream if handler.response_streaming else once
    return make(behaviour, handler.request_deserializer, handler.response_serializer)


def why_refused(token: str, metadata: dict[str, str | bytes]) -> str | None:
    """None if the caller is authorized. An empty token means that none is required."""
    if not token:
        return None
    shown = metadata.get("authorization")
    if shown is None:
        return "missing authorization header"
    text = shown.decode(errors="replace") if isinstance(shown, bytes) else shown
    if not text.startswith("Bearer "):
        return "authorization must use Bearer scheme"
    right = hmac.compare_digest(text.removeprefix("Bearer ").encode(), token.encode())
    return None if right else "invalid token"


async def abort(context: Context, code: grpc.StatusCode, words: str) -> NoReturn:
    await context.abort(code, words)
    raise AssertionError("abort returned")


async def start(service: GrpcService, address: str, token: str) -> grpc.aio.Server:
    server = grpc.aio.server(interceptors=(Guard(service, token),), options=_OPTIONS)
    add_BackendServicer_to_server(service, server)
    if server.add_insecure_port(address) == 0:
        raise OSError(f"cannot listen on {address}")
    await server.start()
    return server


def chat_of(request: pb.PredictOptions) -> Chat:
    return Chat(
        messages=tuple(ChatMessage(message.role, message.content) for message in request.Messages),
        prompt=request.Prompt,
        max_tokens=request.Tokens,
        temperature=request.Temperature,
        seed=request.Seed or None,
        stop=tuple(request.StopPrompts),
        tools=_tools(request.Tools),
        raw=request,
    )


def _tools(text: str) -> tuple[dict[str, Any], ...]:
    try:
        tools = json.loads(text) if text else []
    except ValueError as error:
        raise BadRequest(f"Tools is not JSON: {error}") from error
    return tuple(tool for tool in tools if isinstance(tool, dict)) if isinstance(tools, list) else ()


def _call(piece: ToolCall) -> pb.ToolCallDelta:
    return pb.ToolCallDelta(index=piece.index, id=piece.id, name=piece.name, arguments=piece.arguments)


def _whole_calls(parts: Iterable[Piece]) -> list[pb.ToolCallDelta]:
    """Each call with its complete arguments."""
    calls: dict[int, pb.ToolCallDelta] = {}
    for piece in parts:
        if isinstance(piece, ToolCall):
            call = calls.setdefault(piece.index, pb.ToolCallDelta(index=piece.index))
            call.id, call.name = call.id or piece.id, call.name or piece.name
            call.arguments += piece.arguments
    return [calls[index] for index in sorted(calls)]


def _model(request: pb.ModelOptions) -> Model:
    pairs = (option.partition(":") for option in request.Options)
    return Model(
        name=request.Model,
        file=request.ModelFile,
        folder=request.ModelPath,
        context_size=request.ContextSize,
        options={key: value for key, _, value in pairs},
    )


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
