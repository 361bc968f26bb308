"""Serves a `Backend` over OpenAI's HTTP: health, models, chat, completions with server-sent events, and other
routes."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

from corral.sdk.backend import (
    Backend,
    BackendError,
    BadRequest,
    Chat,
    ChatMessage,
    NotLoaded,
    Piece,
    ToolCall,
    pieces,
)

MAX_BODY_BYTES = 64 * 1024 * 1024
STOP_GRACE_S = 5.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpService:
    """Listens before the model is loaded: until then `/health` answers 503, like llama.cpp's server."""

    def __init__(self, backend: Backend, model: str) -> None:
        self.backend = backend
        self.loaded = False
        self._default_name = model

    @property
    def model(self) -> str:
        return self.backend.model_name or self._default_name

    def app(self, token: str) -> web.Application:
        app = web.Application(middlewares=[_guard(token), _errors], client_max_size=MAX_BODY_BYTES)
        app.router.add_get("/health", self.health)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_post("/v1/completions", self.complete)
        app.router.add_post("/v1/embeddings", self.embeddings)
        app.router.add_post("/v1/rerank", self.rerank)
        app.router.add_post("/v1/audio/transcriptions", self.transcribe)
        app.router.add_post("/v1/audio/speech", self.speak)
        app.router.add_post("/tokenize", self.tokenize)
        return app

    async def health(self, request: web.Request) -> web.Response:
        if not self.loaded:
            return web.json_response({"status": "loading model"}, status=503)
        return web.json_response({"status": "ok"})

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self.model, "object": "model"}]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request)
        messages = body.get("messages")
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise BadRequest("messages must be a list of objects")
        parsed = tuple(ChatMessage(str(message.get("role", "")), _text(message.get("content"))) for message in messages)
        return await self._answer(request, body, _chat(body, messages=parsed), _ChatFormat(self.model))

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request)
        return await self._answer(request, body, _chat(body, prompt=_text(body.get("prompt"))), _TextFormat(self.model))

    async def embeddings(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        given = body.get("input")
        texts = given if isinstance(given, list) else [given]
        vectors = [list(await self.backend.embed(_text(text))) for text in texts]
        rows = [{"object": "embedding", "index": at, "embedding": vector} for at, vector in enumerate(vectors)]
        count = sum(len(_text(text).split()) for text in texts)
        usage = {"prompt_tokens": count, "total_tokens": count}
        return web.json_response({"object": "list", "model": self.model, "data": rows, "usage": usage})

    async def tokenize(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        return web.json_response({"tokens": list(await self.backend.tokenize(_text(body.get("content"))))})

    async def rerank(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        given = body.get("documents")
        if not isinstance(given, list):
            raise BadRequest("documents must be a list")
        documents = [_text(each.get("text") if isinstance(each, dict) else each) for each in given]
        scores = await self.backend.rerank(_text(body.get("query")), documents)
        ranked = sorted(range(len(documents)), key=lambda at: -scores[at])[: body.get("top_n") or None]
        rows = [{"index": at, "relevance_score": scores[at], "document": {"text": documents[at]}} for at in ranked]
        return web.json_response({"model": self.model, "results": rows})

    async def transcribe(self, request: web.Request) -> web.Response:
        self._check_loaded()
        form = await request.post()
        sent = form.get("file")
        if not isinstance(sent, web.FileField):
            raise BadRequest("the form has no file")
        with tempfile.TemporaryDirectory() as folder:
            audio = Path(folder) / f"audio{Path(sent.filename).suffix}"
            await asyncio.to_thread(audio.write_bytes, sent.file.read())
            text = await self.backend.transcribe(audio, str(form.get("language") or ""))
        return web.json_response({"text": text})

    async def speak(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        sound = await self.backend.speak(_text(body.get("input")), _text(body.get("voice")))
        return web.Response(body=sound, content_type="audio/wav")

    def _check_loaded(self) -> None:
        if not self.loaded:
            raise NotLoaded("model not loaded")

    async def _body(self, request: web.Request) -> dict[str, Any]:
        self._check_loaded()
        try:
            body = await request.json()
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise BadRequest(f"the body is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise BadRequest("the body is not a JSON object")
        return body

    async def _answer(
        self, request: web.Request, body: Mapping[str, Any], chat: Chat, answer_format: _Format
    ) -> web.StreamResponse:
        async with contextlib.aclosing(pieces(self.backend, chat)) as parts:
            if body.get("stream"):
                return await _stream(request, parts, answer_format, _usage_wanted(body), chat)
            output = [piece async for piece in parts]
        return web.json_response(answer_format.whole(output, _usage(chat, len(output))))


class _Format:
    """OpenAI's format of one kind of answer."""

    prefix = ""
    kind = ""
    chunk_kind = ""

    def __init__(self, model: str) -> None:
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex[:24]}", "created": int(time.time()), "model": model}

    def piece(self, piece: Piece, reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, **self.part(piece), "finish_reason": reason}
        return {**self._head, "object": self.chunk_kind, "choices": [choice]}

    def whole(self, pieces: Sequence[Piece], usage: dict[str, int]) -> dict[str, Any]:
        text = "".join(piece for piece in pieces if isinstance(piece, str))
        calls = [piece for piece in pieces if isinstance(piece, ToolCall)]
        choice = {"index": 0, **self.all(text, calls), "finish_reason": "tool_calls" if calls else "stop"}
        return {**self._head, "object": self.kind, "choices": [choice], "usage": usage}

    def usage(self, usage: dict[str, int]) -> dict[str, Any]:
        return {**self._head, "object": self.chunk_kind, "choices": [], "usage": usage}

    def part(self, piece: Piece) -> dict[str, Any]:
        raise NotImplementedError

    def all(self, text: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
        raise NotImplementedError


class _ChatFormat(_Format):
    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self._begun: set[int] = set()

    def part(self, piece: Piece) -> dict[str, Any]:
        if isinstance(piece, ToolCall):
            return {"delta": {"tool_calls": [self._call(piece)]}}
        return {"delta": {"content": piece} if piece else {}}

    def all(self, text: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            message["tool_calls"] = [_whole_call(calls, index) for index in sorted({call.index for call in calls})]
        return {"message": message}

    def _call(self, piece: ToolCall) -> dict[str, Any]:
        """Id, type and name once; then only further arguments."""
        if piece.index in self._begun:
            return {"index": piece.index, "function": {"arguments": piece.arguments}}
        self._begun.add(piece.index)
        return {"index": piece.index, **_whole_call([piece], piece.index)}


class _TextFormat(_Format):
    prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def part(self, piece: Piece) -> dict[str, Any]:
        return {"text": piece if isinstance(piece, str) else ""}

    def all(self, text: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
        return {"text": text}


def _whole_call(calls: Sequence[ToolCall], index: int) -> dict[str, Any]:
    own = [call for call in calls if call.index == index]
    name, given = next((call.name for call in own if call.name), ""), next((call.id for call in own if call.id), "")
    function = {"name": name, "arguments": "".join(call.arguments for call in own)}
    return {"id": given or f"call_{uuid.uuid4().hex[:16]}", "type": "function", "function": function}


async def _stream(
    request: web.Request, parts: AsyncIterator[Piece], answer_format: _Format, usage_wanted: bool, chat: Chat
) -> web.StreamResponse:
    """The head is sent with the first piece, so that an earlier failure still gets an error status."""
    first = await anext(parts, None)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    count, called = 0, False
    piece = first
    while piece is not None:
        count += 1
        called = called or isinstance(piece, ToolCall)
        await response.write(_event(answer_format.piece(piece, None)))
        piece = await anext(parts, None)
    await response.write(_event(answer_format.piece("", "tool_calls" if called else "stop")))
    if usage_wanted:
        await response.write(_event(answer_format.usage(_usage(chat, count))))
    await response.write(b"data: [DONE]\n\n")
    return response


def _event(content: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


def _usage(chat: Chat, count: int) -> dict[str, int]:
    texts = [chat.prompt, *(message.content for message in chat.messages)]
    prompt_tokens = sum(len(text.split()) for text in texts)
    return {"prompt_tokens": prompt_tokens, "completion_tokens": count, "total_tokens": prompt_tokens + count}


def _usage_wanted(body: Mapping[str, Any]) -> bool:
    options = body.get("stream_options")
    return isinstance(options, dict) and bool(options.get("include_usage"))


def _chat(body: Mapping[str, Any], *, messages: tuple[ChatMessage, ...] = (), prompt: str = "") -> Chat:
    stop = body.get("stop") or ()
    return Chat(
        messages=messages,
        prompt=prompt,
        max_tokens=int(body.get("max_completion_tokens") or body.get("max_tokens") or 0),
        temperature=body.get("temperature"),
        seed=body.get("seed"),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        tools=tuple(tool for tool in body.get("tools") or () if isinstance(tool, dict)),
        raw=body,
    )


def _text(content: object) -> str:
    """Plain text, or the text parts of OpenAI's list of parts."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _guard(token: str) -> Any:
    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        shown = request.headers.get("Authorization", "")
        if token and not hmac.compare_digest(shown.encode(), f"Bearer {token}".encode()):
            return _error(401, "invalid token")
        return await handler(request)

    return guard


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except BackendError as error:
        return _error(error.http_status, str(error))


def _error(status: int, message: str) -> web.Response:
    headers = {"Retry-After": "1"} if status == 503 else {}
    return web.json_response(
        {"error": {"code": status, "message": message, "type": "backend_error"}}, status=status, headers=headers
    )


async def start(service: HttpService, host: str, port: int, token: str) -> web.AppRunner:
    # A client that leaves cancels its handler, and with it the generation.
    runner = web.AppRunner(
        service.app(token), handler_cancellation=True, access_log=None, shutdown_timeout=STOP_GRACE_S
    )
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    return runner
