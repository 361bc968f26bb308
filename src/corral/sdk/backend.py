"""The class an author fills in. It knows no protocol: `grpc_server.py` and `http_server.py` speak for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class BackendError(Exception):
    """Base of what a backend may raise on purpose; the servers turn each into its own answer."""

    grpc_code = "INTERNAL"
    http_status = 500


class BadRequest(BackendError):
    """The request makes no sense to this backend."""

    grpc_code = "INVALID_ARGUMENT"
    http_status = 400


class NotLoaded(BackendError):
    """There is no model to answer with; the caller loads it again."""

    grpc_code = "FAILED_PRECONDITION"
    http_status = 503


class Busy(BackendError):
    """Not now."""

    grpc_code = "RESOURCE_EXHAUSTED"
    http_status = 503


class Unsupported(BackendError):
    """This backend cannot do that, and never will."""

    grpc_code = "UNIMPLEMENTED"
    http_status = 501


@dataclass(frozen=True)
class Model:
    """What to load. `file` and `folder` are absolute; there may be nothing there, when `name` is a hub's name."""

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
    index: int = 0  # which call, when there are several


Piece = str | ToolCall


@dataclass(frozen=True)
class Chat:
    """One request for text. Either `messages`, or a `prompt` that somebody rendered already."""

    messages: tuple[ChatMessage, ...] = ()
    prompt: str = ""
    max_tokens: int = 0  # 0: as the backend likes
    temperature: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()  # seen to: what you yield is cut there, and you are not asked for more
    tools: tuple[Mapping[str, Any], ...] = ()  # OpenAI's objects: {"type": "function", "function": {…}}
    raw: object = None  # the request as it came: a `PredictOptions`, or the JSON as a dict

    @property
    def text(self) -> str:
        """What was said last."""
        return self.prompt or (self.messages[-1].content if self.messages else "")


class Backend:
    """Override what your engine can do; what you leave is answered "not supported".

    Calls come side by side. A caller who leaves cancels `generate` where it waits: an `async def` is cancelled at its
    `await`, a plain generator is closed after the piece it is at.
    """

    model_name = ""  # what the model is called over HTTP; empty: as the command line says

    async def load(self, model: Model) -> None:
        """Called before anything else. What it raises is what the person who asked for the model reads."""

    async def unload(self) -> None:
        """Release the memory; the process stays."""

    def generate(self, chat: Chat) -> AsyncIterator[Piece] | Iterator[Piece]:
        """Pieces as they come: an async generator, or a plain one, which then runs in a thread."""
        raise Unsupported("this backend does not generate text")

    async def embed(self, text: str) -> Sequence[float]:
        raise Unsupported("this backend does not embed")

    async def tokenize(self, text: str) -> Sequence[int]:
        raise Unsupported("this backend does not tokenize")

    async def rerank(self, query: str, documents: Sequence[str]) -> Sequence[float]:
        """How well each document answers the query, in their order."""
        raise Unsupported("this backend does not rerank")

    async def transcribe(self, audio: Path, language: str) -> str:
        """What is said in that file. `language` may be empty."""
        raise Unsupported("this backend does not transcribe")

    async def speak(self, text: str, voice: str) -> bytes:
        """A WAV file. `voice` may be empty."""
        raise Unsupported("this backend does not speak")


async def pieces(backend: Backend, chat: Chat) -> AsyncGenerator[Piece, None]:
    """What the backend generates, whichever way it does, up to the first stop word. Close it, and the backend's own
    generator is closed."""
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
    """Cuts a text at the first of some words, which may come in pieces."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = tuple(word for word in words if word)
        self._held = ""
        self.found = False

    def feed(self, text: str) -> str:
        """What may be said by now: the end of it stays here while it may be the beginning of a stop word."""
        self._held += text
        places = [place for word in self._words if (place := self._held.find(word)) >= 0]
        if places:
            self.found = True
            return self._held[: min(places)]
        unclear = max((self._overlap(word) for word in self._words), default=0)
        said = self._held[: len(self._held) - unclear]
        self._held = self._held[len(said) :]
        return said

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
        async with contextlib.aclosing(_in_a_thread(source)) as threaded:
            async for piece in threaded:
                yield piece


async def _in_a_thread(source: Iterator[Piece]) -> AsyncGenerator[Piece, None]:
    def step() -> Piece | None:
        return next(source, None)

    try:
        while (piece := await asyncio.to_thread(step)) is not None:
            yield piece
    finally:
        if isinstance(source, Generator):
            with contextlib.suppress(ValueError):  # a thread is at a piece nobody waits for: the last it makes
                source.close()
