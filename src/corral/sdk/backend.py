"""The class an author fills in. It knows no protocol: `grpc_server.py` and `http_server.py` speak for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field


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
class Chat:
    """One request for text. Either `messages`, or a `prompt` that somebody rendered already."""

    messages: tuple[ChatMessage, ...] = ()
    prompt: str = ""
    max_tokens: int = 0  # 0: as the backend likes
    temperature: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
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

    def generate(self, chat: Chat) -> AsyncIterator[str] | Iterator[str]:
        """Pieces of text as they come: an async generator, or a plain one, which then runs in a thread."""
        raise Unsupported("this backend does not generate text")

    async def embed(self, text: str) -> Sequence[float]:
        raise Unsupported("this backend does not embed")

    async def tokenize(self, text: str) -> Sequence[int]:
        raise Unsupported("this backend does not tokenize")


async def pieces(backend: Backend, chat: Chat) -> AsyncGenerator[str, None]:
    """What the backend generates, whichever way it does. Close it, and the backend's own generator is closed."""
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


async def _in_a_thread(source: Iterator[str]) -> AsyncGenerator[str, None]:
    def step() -> str | None:
        return next(source, None)

    try:
        while (piece := await asyncio.to_thread(step)) is not None:
            yield piece
    finally:
        if isinstance(source, Generator):
            with contextlib.suppress(ValueError):  # a thread is at a piece nobody waits for: the last it makes
                source.close()
