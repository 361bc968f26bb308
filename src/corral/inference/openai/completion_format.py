"""OpenAI's format of chat answers and completions, as a whole and as server-sent events. Pure.

A piece is written around its text with prepared bytes, because this runs for every token of every stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from corral.inference.grpc.replies import CompleteReply, Delta, ToolCallPart

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


def usage_of(prompt_tokens: int, tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": tokens,
        "total_tokens": prompt_tokens + tokens,
    }


def event(content: object) -> bytes:
    return b"data: %b\n\n" % _encode(content)


class CompletionFormat(Protocol):
    """Writes one answer with its choices."""

    def first(self) -> bytes: ...

    def piece(self, delta: Delta) -> bytes: ...

    def last(self, reason: str, usage: dict[str, int] | None) -> bytes: ...

    def usage(self, usage: dict[str, int]) -> bytes: ...

    def whole(self, choices: Sequence[tuple[CompleteReply, str]], usage: dict[str, int]) -> bytes: ...


class _FormatBase:
    def __init__(self, model: str, answer_id: str, created: int, kind: str, chunk_kind: str) -> None:
        self._head = {"id": answer_id, "object": kind, "created": created, "model": model}
        self._chunk_head = self._head | {"object": chunk_kind}
        self._opening = b"data: %b" % _encode(self._chunk_head | {"choices": []})[:-2]  # up to the first choice

    def _chunk(self, choice: dict[str, Any], more: dict[str, Any] | None = None) -> bytes:
        return event(self._chunk_head | {"choices": [{"index": 0, **choice}], **(more or {})})

    def usage(self, usage: dict[str, int]) -> bytes:
        return event(self._chunk_head | {"choices": [], "usage": usage})


class ChatFormat(_FormatBase):
    def __init__(self, model: str, answer_id: str, created: int) -> None:
        super().__init__(model, f"chatcmpl-{answer_id}", created, "chat.completion", "chat.completion.chunk")
        self._answer_id = answer_id
        self._text = self._opening + b'{"index":0,"delta":{"content":'
        self._seen: set[int] = set()

    def first(self) -> bytes:
        return self._chunk({"delta": {"role": "assistant", "content": ""}, "finish_reason": None})

    def piece(self, delta: Delta) -> bytes:
        if not (delta.reasoning or delta.calls or delta.logprobs):
            return b'%b%b},"finish_reason":null}]}\n\n' % (self._text, _encode(delta.content))
        content: dict[str, Any] = {"content": delta.content} if delta.content else {}
        if delta.reasoning:
            content["reasoning_content"] = delta.reasoning
        if delta.calls:
            content["tool_calls"] = [self._call_part(part) for part in delta.calls]
        choice: dict[str, Any] = {"delta": content, "finish_reason": None}
        if delta.logprobs:
            choice["logprobs"] = {"content": delta.logprobs, "refusal": None}
        return self._chunk(choice)

    def last(self, reason: str, usage: dict[str, int] | None) -> bytes:
        more = {"usage": usage} if usage is not None else None
        return self._chunk({"delta": {}, "finish_reason": reason}, more)

    def whole(self, choices: Sequence[tuple[CompleteReply, str]], usage: dict[str, int]) -> bytes:
        content = [self._choice(at, answer, reason) for at, (answer, reason) in enumerate(choices)]
        return _encode(self._head | {"choices": content, "usage": usage})

    def _choice(self, index: int, answer: CompleteReply, reason: str) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer.content}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message["content"] = answer.content or None
            message["tool_calls"] = [
                {"id": self._name(part), "type": "function", "function": _function(part)} for part in answer.calls
            ]
        logprobs = {"content": answer.logprobs, "refusal": None} if answer.logprobs else None
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _call_part(self, part: ToolCallPart) -> dict[str, Any]:
        """Id, type and name once; then only further arguments."""
        if part.at in self._seen:
            return {"index": part.at, "function": {"arguments": part.arguments}}
        self._seen.add(part.at)
        return {"index": part.at, "id": self._name(part), "type": "function", "function": _function(part)}

    def _name(self, part: ToolCallPart) -> str:
        return part.id or f"call_{self._answer_id[:16]}_{part.at}"


def _function(part: ToolCallPart) -> dict[str, str]:
    return {"name": part.name, "arguments": part.arguments}


class TextFormat(_FormatBase):
    def __init__(self, model: str, answer_id: str, created: int) -> None:
        super().__init__(model, f"cmpl-{answer_id}", created, "text_completion", "text_completion")
        self._text = self._opening + b'{"index":0,"text":'
        self._sent_chars = 0  # characters sent so far: offsets of tokens count from the beginning

    def first(self) -> bytes:
        return b""

    def piece(self, delta: Delta) -> bytes:
        if not delta.logprobs:
            self._sent_chars += len(delta.content)
            return b'%b%b,"logprobs":null,"finish_reason":null}]}\n\n' % (self._text, _encode(delta.content))
        logprobs = legacy_logprobs(delta.logprobs, self._sent_chars)
        self._sent_chars += len(delta.content)
        return self._chunk({"text": delta.content, "logprobs": logprobs, "finish_reason": None})

    def last(self, reason: str, usage: dict[str, int] | None) -> bytes:
        more = {"usage": usage} if usage is not None else None
        return self._chunk({"text": "", "logprobs": None, "finish_reason": reason}, more)

    def whole(self, choices: Sequence[tuple[CompleteReply, str]], usage: dict[str, int]) -> bytes:
        content = [
            {
                "index": at,
                "text": answer.content,
                "logprobs": legacy_logprobs(answer.logprobs, 0) if answer.logprobs else None,
                "finish_reason": reason,
            }
            for at, (answer, reason) in enumerate(choices)
        ]
        return _encode(self._head | {"choices": content, "usage": usage})


def legacy_logprobs(content: Sequence[dict[str, Any]], offset: int) -> dict[str, Any]:
    """Logprobs as `/v1/completions` has them: four lists instead of a list of objects."""
    tokens = [str(each.get("token", "")) for each in content]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [each.get("logprob") for each in content],
        "top_logprobs": [
            {str(other.get("token", "")): other.get("logprob") for other in each.get("top_logprobs") or ()}
            for each in content
        ],
        "text_offset": offsets,
    }
