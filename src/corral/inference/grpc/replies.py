"""From a backend's replies to what a client is told next (docs/reference/wire/grpc.md#replies). Pure: feed it, and
read.

Some backends send plain text, some the parsed pieces beside it (`chat_deltas`), which then count instead. Text may
break off inside a character; counts may come once, at the end, or never.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from corral.contract import backend_pb2 as pb
from corral.inference.openai.tool_calls import could_be_call, find_calls


class CallPart(NamedTuple):
    """A tool call, or the next fragment of its arguments. Name and id come with the first."""

    at: int  # which call, counted from 0
    name: str = ""
    arguments: str = ""
    id: str = ""


class Delta(NamedTuple):
    """What is new."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallPart, ...] = ()
    logprobs: list[dict[str, Any]] | None = None

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls or self.logprobs)


class Reading:
    """One answer. `tools` are the names of those the client offered; with any, text that may be a call is held back."""

    def __init__(self, tools: Sequence[str] = (), *, parsed: bool = True) -> None:
        """`parsed` false: only the text counts (a bare completion has no calls, whatever the backend sees in it)."""
        self._tools = frozenset(tools)
        self._parsed = parsed
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._by_text: bool | None = None  # whether text or deltas count: the first that says anything decides
        self._held = ""
        self._holding = bool(tools)
        self._pieces = 0
        self._tokens = 0
        self.prompt_tokens = 0
        self.called = False

    @property
    def tokens(self) -> int:
        """As the backend counted, else as many as there were pieces."""
        return self._tokens or self._pieces

    def feed(self, reply: pb.Reply) -> Delta:
        # Cumulative, or only on the last one: never let an empty field undo a count.
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
        """After the last reply: what was held back, as what it turned out to be."""
        text = self._held + self._decoder.decode(b"", final=True)
        self._held = ""
        if not text or not self._by_text:
            return Delta()
        content, calls = find_calls(text, self._tools) if self._holding and not self.called else (text, [])
        self.called = self.called or bool(calls)
        return Delta(content, calls=tuple(CallPart(at, name, said) for at, (name, said) in enumerate(calls)))

    def _of_deltas(self, deltas: Sequence[pb.ChatDelta]) -> Delta | None:
        if len(deltas) == 1:  # for every token, so without building lists
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
            self._by_text, self._held = False, ""  # the deltas tell the same again, taken apart
        self.called = self.called or bool(calls)
        # Where text was passed on already, a last message may repeat all of it as deltas: of those, only calls are new.
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


def _part(call: pb.ToolCallDelta) -> CallPart:
    return CallPart(call.index, call.name, call.arguments, call.id)


def _logprobs(told: bytes) -> list[dict[str, Any]] | None:
    """`{"content": [...]}`; what is none is left out rather than the whole answer lost."""
    try:
        read = msgspec.json.decode(told)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    match read:
        case {"content": list(content)} if content and all(isinstance(each, dict) for each in content):
            return content
    return None


class Whole(NamedTuple):
    """An answer that is complete."""

    content: str
    reasoning: str
    calls: tuple[CallPart, ...]
    logprobs: list[dict[str, Any]]


def put_together(deltas: Iterable[Delta]) -> Whole:
    content: list[str] = []
    reasoning: list[str] = []
    logprobs: list[dict[str, Any]] = []
    calls: dict[int, CallPart] = {}
    for delta in deltas:
        content.append(delta.content)
        reasoning.append(delta.reasoning)
        logprobs += delta.logprobs or ()
        for part in delta.calls:
            known = calls.get(part.at)
            calls[part.at] = part if known is None else _joined(known, part)
    ordered = tuple(calls[at] for at in sorted(calls))
    return Whole("".join(content), "".join(reasoning), ordered, logprobs)


def _joined(known: CallPart, part: CallPart) -> CallPart:
    return CallPart(known.at, known.name or part.name, known.arguments + part.arguments, known.id or part.id)
