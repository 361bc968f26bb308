"""Converts a backend's replies into the deltas of an answer (docs/reference/wire/grpc.md#replies). Pure.

Some backends send plain text, some also send parsed deltas (`chat_deltas`), which then count instead. A text may end in
the middle of a character; token counts may come once, at the end, or never.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from corral.contract import backend_pb2 as pb
from corral.inference.openai.tool_calls import could_be_call, find_calls


class ToolCallPart(NamedTuple):
    """A tool call, or the next fragment of its arguments. Name and id come with the first."""

    at: int  # which call, counted from 0
    name: str = ""
    arguments: str = ""
    id: str = ""


class Delta(NamedTuple):
    """The new part of an answer."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCallPart, ...] = ()
    logprobs: list[dict[str, Any]] | None = None

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls or self.logprobs)


class ReplyReader:
    """Reads the replies of one answer. `tools`: names of the offered tools; with any, text that may be a tool call is
    held back."""

    def __init__(self, tools: Sequence[str] = (), *, parsed: bool = True) -> None:
        """`parsed` false: only the text counts (a plain completion has no tool calls)."""
        self._tools = frozenset(tools)
        self._parsed = parsed
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._by_text: bool | None = None  # whether text or deltas count: the first that is not empty decides
        self._held = ""
        self._holding = bool(tools)
        self._pieces = 0
        self._tokens = 0
        self.prompt_tokens = 0
        self.called = False

    @property
    def tokens(self) -> int:
        """The backend's count, otherwise the number of pieces."""
        return self._tokens or self._pieces

    def feed(self, reply: pb.Reply) -> Delta:
        # Counts are cumulative, or only in the last reply: an empty field must not reset them.
        if reply.tokens:
            self._tokens = reply.tokens
        if reply.prompt_tokens:
            self.prompt_tokens = reply.prompt_tokens
        logprobs = _logprobs(reply.logprobs) if reply.logprobs else None
        delta = self._of_deltas(reply.chat_deltas) if reply.chat_deltas and self._parsed else None
        if delta is None and reply.message and self._by_text is not False:
            delta = self._of_text(self._decoder.decode(reply.message))
        if delta is None:
            return Delta(logprobs=logprobs)
        if delta.content or delta.reasoning or delta.calls:
            self._pieces += 1
        return delta if logprobs is None else delta._replace(logprobs=logprobs)

    def finish(self) -> Delta:
        """After the last reply: the text that was held back, as tool calls or as text."""
        text = self._held + self._decoder.decode(b"", final=True)
        self._held = ""
        if not text or not self._by_text:
            return Delta()
        content, calls = find_calls(text, self._tools) if self._holding and not self.called else (text, [])
        self.called = self.called or bool(calls)
        return Delta(content, calls=tuple(ToolCallPart(at, name, said) for at, (name, said) in enumerate(calls)))

    def _of_deltas(self, deltas: Sequence[pb.ChatDelta]) -> Delta | None:
        if len(deltas) == 1:  # called for every token, so it builds no lists
            (only,) = deltas
            content, reasoning = only.content, only.reasoning_content
            calls = tuple(map(_part, only.tool_calls)) if only.tool_calls else ()
        else:
            content = "".join([delta.content for delta in deltas])
            reasoning = "".join([delta.reasoning_content for delta in deltas])
            calls = tuple([_part(call) for delta in deltas for call in delta.tool_calls])
        if not (content or reasoning or calls):
            return None
        if self._by_text is None or self._held:
            self._by_text, self._held = False, ""  # the deltas repeat the text, parsed
        self.called = self.called or bool(calls)
        # If text was passed on already, the last reply may repeat all of it as deltas: only its calls are new.
        return Delta(reasoning=reasoning, calls=calls) if self._by_text else Delta(content, reasoning, calls)

    def _of_text(self, text: str) -> Delta | None:
        if not text:
            return None
        self._by_text = True
        if not self._holding:
            return Delta(text)
        self._held += text
        if could_be_call(self._held):
            return None
        text, self._held, self._holding = self._held, "", False
        return Delta(text)


def _part(call: pb.ToolCallDelta) -> ToolCallPart:
    return ToolCallPart(call.index, call.name, call.arguments, call.id)


def _logprobs(encoded: bytes) -> list[dict[str, Any]] | None:
    """`{"content": [...]}`; invalid logprobs are dropped instead of failing the answer."""
    try:
        read = msgspec.json.decode(encoded)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    match read:
        case {"content": list(content)} if content and all(isinstance(each, dict) for each in content):
            return content
    return None


class CompleteReply(NamedTuple):
    """A complete answer."""

    content: str
    reasoning: str
    calls: tuple[ToolCallPart, ...]
    logprobs: list[dict[str, Any]]


def join_deltas(deltas: Iterable[Delta]) -> CompleteReply:
    content: list[str] = []
    reasoning: list[str] = []
    logprobs: list[dict[str, Any]] = []
    calls: dict[int, ToolCallPart] = {}
    for delta in deltas:
        content.append(delta.content)
        reasoning.append(delta.reasoning)
        logprobs += delta.logprobs or ()
        for part in delta.calls:
            known = calls.get(part.at)
            calls[part.at] = part if known is None else _joined(known, part)
    ordered = tuple(calls[at] for at in sorted(calls))
    return CompleteReply("".join(content), "".join(reasoning), ordered, logprobs)


def _joined(known: ToolCallPart, part: ToolCallPart) -> ToolCallPart:
    return ToolCallPart(known.at, known.name or part.name, known.arguments + part.arguments, known.id or part.id)
