"""One chat completion, streamed, as any client of OpenAI's API would ask for it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from corral.contract.codec import Undecodable, decode
from corral.kit.errors import Failed

PATH = "/v1/chat/completions"
_DONE = "[DONE]"


class Streams(Protocol):
    """What a client offers for it."""

    def stream(
        self, path: str, body: object, *, head: list[tuple[str, str]] | None = None
    ) -> AsyncGenerator[bytes, None]:
        """The answer's body as it comes. `head` is filled with the answer's headers."""


class Said(msgspec.Struct, frozen=True):
    """A piece of the answer. The last one has no text, and tells how it ended."""

    text: str = ""
    ending: str = ""  # stop, length, tool_calls …
    prompt_tokens: int = 0
    completion_tokens: int = 0


async def chat(
    streams: Streams,
    model: str,
    messages: Sequence[Mapping[str, str]],
    *,
    options: Mapping[str, Any] | None = None,
    head: list[tuple[str, str]] | None = None,
) -> AsyncGenerator[Said, None]:
    """Raises what the fleet answers instead; Failed when the answer breaks off."""
    body = {
        "model": model,
        "messages": list(messages),
        "stream": True,
        "stream_options": {"include_usage": True},
        **(options or {}),
    }
    whole = False
    ending, usage = "", (0, 0)
    async for data in _events(streams.stream(PATH, body, head=head)):
        if data == _DONE:
            whole = True
            continue
        try:
            chunk = decode(dict[str, Any], data.encode())
        except Undecodable as error:
            raise Failed(f"the answer is not OpenAI's: {error}") from error
        if isinstance(chunk.get("error"), dict):
            raise Failed(str(chunk["error"].get("message") or "the backend gave up without a reason"))
        told = chunk.get("usage")
        if isinstance(told, dict):
            usage = (int(told.get("prompt_tokens") or 0), int(told.get("completion_tokens") or 0))
        for choice in chunk.get("choices") or ():
            ending = str(choice.get("finish_reason") or ending)
            text = (choice.get("delta") or {}).get("content")
            if text:
                yield Said(str(text))
    if not whole and not ending:
        raise Failed("the answer broke off")
    yield Said(ending=ending, prompt_tokens=usage[0], completion_tokens=usage[1])


async def _events(chunks: AsyncIterator[bytes]) -> AsyncGenerator[str, None]:
    """The data of each server-sent event; whatever the line ends are."""
    waiting = b""
    async for chunk in chunks:
        waiting += chunk
        *lines, waiting = waiting.replace(b"\r\n", b"\n").split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip().decode(errors="replace")
    if waiting.startswith(b"data:"):
        yield waiting[5:].strip().decode(errors="replace")
