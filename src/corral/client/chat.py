"""A streamed chat completion, as any client of OpenAI's API requests it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec

from corral.client.connection import ApiConnection
from corral.contract.codec import Undecodable, decode
from corral.kit.errors import Failed

PATH = "/v1/chat/completions"
_DONE = "[DONE]"


class ChatPiece(msgspec.Struct, frozen=True):
    """A piece of the answer. The last one has no text, but the finish reason and token counts."""

    text: str = ""
    ending: str = ""  # stop, length, tool_calls …
    prompt_tokens: int = 0
    completion_tokens: int = 0


async def chat(
    api: ApiConnection,
    model: str,
    messages: Sequence[Mapping[str, str]],
    *,
    options: Mapping[str, Any] | None = None,
    head: list[tuple[str, str]] | None = None,
) -> AsyncGenerator[ChatPiece, None]:
    """Raises the fleet's error; Failed if the answer breaks off."""
    body = {
        "model": model,
        "messages": list(messages),
        "stream": True,
        "stream_options": {"include_usage": True},
        **(options or {}),
    }
    whole = False
    ending, usage = "", (0, 0)
    async for data in _events(api.stream(PATH, body, head=head)):
        if data == _DONE:
            whole = True
            continue
        try:
            chunk = decode(dict[str, Any], data.encode())
        except Undecodable as error:
            raise Failed(f"the answer is not in OpenAI's format: {error}") from error
        if isinstance(chunk.get("error"), dict):
            raise Failed(str(chunk["error"].get("message") or "the backend failed without a reason"))
        counts = chunk.get("usage")
        if isinstance(counts, dict):
            usage = (int(counts.get("prompt_tokens") or 0), int(counts.get("completion_tokens") or 0))
        for choice in chunk.get("choices") or ():
            ending = str(choice.get("finish_reason") or ending)
            text = (choice.get("delta") or {}).get("content")
            if text:
                yield ChatPiece(str(text))
    if not whole and not ending:
        raise Failed("the answer broke off")
    yield ChatPiece(ending=ending, prompt_tokens=usage[0], completion_tokens=usage[1])


async def _events(chunks: AsyncIterator[bytes]) -> AsyncGenerator[str, None]:
    """The data of each server-sent event, with any kind of line end."""
    waiting = b""
    async for chunk in chunks:
        waiting += chunk
        *lines, waiting = waiting.replace(b"\r\n", b"\n").split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip().decode(errors="replace")
    if waiting.startswith(b"data:"):
        yield waiting[5:].strip().decode(errors="replace")
