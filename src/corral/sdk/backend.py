"""The base class of backends. It is independent of the protocol: `grpc_server.py` and `http_server.py` serve it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class BackendError(Exception):
    """Base of the errors that a backend may raise; the servers translate each into a status."""

    grpc_code = "INTERNAL"
    http_status = 500


class BadRequest(BackendError):
    """The request is not valid for this backend."""

    grpc_code = "INVALID_ARGUMENT"
    http_status = 400


class NotLoaded(BackendError):
    """No model is loaded; the caller loads it again."""

    grpc_code = "FAILED_PRECONDITION"
    http_status = 503


class Busy(BackendError):
    """The backend is busy; retry later."""

    grpc_code = "RESOURCE_EXHAUSTED"
    http_status = 503


class Unsupported(BackendError):
    """This backend does not support the request."""

    grpc_code = "UNIMPLEMENTED"
    http_status = 501


@dataclass(frozen=True)
class Model:
    """The model to load. `file` and `folder` are absolute; they may not exist if `name` is a name on the hub."""

    name: str
    file: str = ""
    folder: str = ""
    context_size: int = 0
    options: Mapping[str, str] = field(default_factory=dict)  # the model's free `key:value` options


@dataclass(frozen=True)
class ChatMessage:
    role: str
    content: str


@dataclass(frozen=True)
class ToolCall:
    """Yielded by `generate` instead of text: a call of one of `chat.tools`. Whole, or the next piece of its arguments;
    name and id come with the first piece."""

    name: str = ""
    arguments: str = ""  # JSON as text
    id: str = ""
    index: int = 0  # of several calls


Piece = str | ToolCall


@dataclass(frozen=True)
class Chat:
    """One request for text: either `messages`, or a rendered `prompt`."""

    messages: tuple[ChatMessage, ...] = ()
    prompt: str = ""
    max_tokens: int = 0  # 0: the backend's default
    temperature: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()  # handled by the SDK: the output is cut there, and generation ends
    tools: tuple[Mapping[str, Any], ...] = ()  # OpenAI's objects: {"type": "function", "function": {…}}
    raw: object = None  # the request as it came: a `PredictOptions`, or the JSON as a dict

    @property
    def text(self) -> str:
        """The prompt, or the last message."""
        return self.prompt or (self.messages[-1].content if self.messages else "")


class Backend:
    """Override the methods that your engine supports; the others answer "not supported".

    Calls run concurrently. When a client disconnects, `generate` is cancelled: an async generator at its `await`, a
    plain generator after its current piece.
    """

    model_name = ""  # the model's name over HTTP; empty: as on the command line

    async def load(self, model: Model) -> None:
        """Called first. The user who loads the model reads the message of an exception."""

    async def unload(self) -> None:
        """Release the memory; the process keeps running."""

    def generate(self, chat: Chat) -> AsyncIterator[Piece] | Iterator[Piece]:
        """Yield pieces of the answer: as an async generator, or as a plain one, which runs in a thread."""
        raise Unsupported("this backend does not generate text")

    async def embed(self, text: str) -> Sequence[float]:
        raise Unsupported("this backend does not embed")

    async def tokenize(self, text: str) -> Sequence[int]:
        raise Unsupported("this backend does not tokenize")

    async def rerank(self, query: str, documents: Sequence[str]) -> Sequence[float]:
        """The relevance of each document for the query, in the order of the documents."""
        raise Unsupported("this backend does not rerank")

    async def transcribe(self, audio: Path, language: str) -> str:
        """The text of the audio file. `language` may be empty."""
        raise Unsupported("this backend does not transcribe")

    async def speak(self, text: str, voice: str) -> bytes:
        """A WAV file. `voice` may be empty."""
        raise Unsupported("this backend does not speak")


async def pieces(backend: Backend, chat: Chat) -> AsyncGenerator[Piece, None]:
    """The backend's pieces up to the first stop word, from any kind of generator. Closing this closes the backend's
    generator."""
    async with contextlib.aclosing(_pieces(backend, chat)) as source:
        if not chat.stop:
            async for piece in source:
                yield piece
            return
        stop = StopWords(chat.stop)
        async for piece in source:
            if isinstance(piece, str):
                piece = stop.feed(piece)
            if piece:
                yield piece
            if stop.found:
                return
        if rest := stop.rest():
            yield rest


class StopWords:
    """Cuts a streamed text at the first stop word, which may be split over pieces."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = tuple(word for word in words if word)
        self._held = ""
        self.found = False

    def feed(self, text: str) -> str:
        """The text that can be sent now; an end that may be the start of a stop word is held back."""
        self._held += text
        positions = [position for word in self._words if (position := self._held.find(word)) >= 0]
        if positions:
            self.found = True
            return self._held[: min(positions)]
        unclear = max((self._overlap(word) for word in self._words), default=0)
        ready = self._held[: len(self._held) - unclear]
        self._held = self._held[len(ready) :]
        return ready

    def rest(self) -> str:
        return "" if self.found else self._held

    def _overlap(self, word: str) -> int:
        longest = min(len(word) - 1, len(self._held))
        return next((size for size in range(longest, 0, -1) if self._held.endswith(word[:size])), 0)


async def _pieces(backend: Backend, chat: Chat) -> AsyncGenerator[Piece, None]:
    source = backend.generate(chat)
    if isinstance(source, AsyncGenerator):
        async with contextlib.aclosing(source):
            async for piece in source:
                yield piece
    elif isinstance(source, AsyncIterator):
        async for piece in source:
            yield piece
    else:
        async with contextlib.aclosing(_run_in_thread(source)) as threaded:
            async for piece in threaded:
                yield piece


async def _run_in_thread(source: Iterator[Piece]) -> AsyncGenerator[Piece, None]:
    def step() -> Piece | None:
        return next(source, None)

    try:
        while (piece := await asyncio.to_thread(step)) is not None:
            yield piece
    finally:
        if isinstance(source, Generator):
            with contextlib.suppress(ValueError):  # a thread still computes a piece, which is its last one
                source.close()
