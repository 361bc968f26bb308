"""Which requests may be continued on another replica, and the request that continues one. Pure.

Only plain text is: never tool calls, structured output, several choices or log probabilities. A field that this module
does not know is left as it is, also in the request that continues.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import msgspec

from corral.contract.manifest import Continues

CHAT_PATH = b"/v1/chat/completions"
COMPLETIONS_PATH = b"/v1/completions"
MAX_BODY_BYTES = 8 * 1024 * 1024  # above it, parsing a second time would delay other requests

# Fields of OpenAI, llama.cpp and vLLM that ask for more than text, or for text whose beginning matters to its end.
_NEVER = (
    "tools",
    "functions",
    "grammar",
    "json_schema",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "n_probs",
    "use_beam_search",
    "echo",
    "suffix",
    "audio",
    "return_token_ids",
    "return_tokens",
    "continue_final_message",  # the client continues a text of its own
)
_AT_MOST_ONE = ("n", "best_of")
_LIMITS = ("max_tokens", "max_completion_tokens", "n_predict")

_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.encode


class Progress(NamedTuple):
    """What the client was sent of the answer."""

    text: str = ""
    tokens: int = 0


class ResumableRequest(NamedTuple):
    """A request for a stream of plain text."""

    api: Literal["chat", "completions"]
    fields: dict[str, msgspec.Raw]
    wants_usage: bool  # the client asked for usage in the stream
    max_tokens: int | None  # None: no limit

    def can_continue_on(self, continues: Continues) -> bool:
        return bool(continues.chat if self.api == "chat" else continues.completions)

    def continuation(self, continues: Continues, model: str, sent: Progress, *, only_counts: bool = False) -> bytes:
        """The body that continues after what was sent. `only_counts`: the text is complete, and only its usage is
        missing. Raises ValueError where the request cannot be continued."""
        fields: dict[str, Any] = dict(self.fields)
        fields["model"] = model
        # Its usage is needed in any case: for the receipt.
        options = self._value("stream_options")
        fields["stream_options"] = {**(options if isinstance(options, dict) else {}), "include_usage": True}
        if sent.text:
            fields |= self._chat(continues, sent.text) if self.api == "chat" else self._completion(sent.text)
        limits = [name for name in _LIMITS if name in fields]
        if only_counts:
            fields |= dict.fromkeys(limits or ("max_tokens",), 1)
        else:
            fields |= {name: max(1, limit - sent.tokens) for name in limits if (limit := self._limit(name))}
        if least := self._limit("min_tokens"):
            fields["min_tokens"] = 0 if only_counts else max(0, least - sent.tokens)
        return _encode(fields)

    def _chat(self, continues: Continues, text: str) -> dict[str, Any]:
        messages = msgspec.json.decode(self.fields["messages"], type=list[msgspec.Raw])
        last = msgspec.json.decode(messages[-1]) if messages else None
        if not isinstance(last, dict) or last.get("role") == "assistant":
            raise ValueError("the client continues a text of its own")
        changed: dict[str, Any] = {"messages": [*messages, {"role": "assistant", "content": text}]}
        if continues.chat == "continue_final_message":
            changed |= {"continue_final_message": True, "add_generation_prompt": False}
        return changed

    def _completion(self, text: str) -> dict[str, Any]:
        prompt = self._value("prompt")
        if not isinstance(prompt, str):
            raise ValueError("the prompt is not one text")
        return {"prompt": prompt + text}

    def _limit(self, name: str) -> int:
        value = self._value(name)
        return max(0, value) if isinstance(value, int) and not isinstance(value, bool) else 0

    def _value(self, name: str) -> Any:
        raw = self.fields.get(name)
        return None if raw is None else msgspec.json.decode(raw)


def read_resumable(path: bytes, body: bytes) -> ResumableRequest | None:
    """None: the request is not for a stream of plain text."""
    if path not in (CHAT_PATH, COMPLETIONS_PATH) or not body or len(body) > MAX_BODY_BYTES:
        return None
    try:
        fields = _decode(body)
        request = ResumableRequest("chat" if path == CHAT_PATH else "completions", fields, False, None)
        return _checked(request)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None  # the engine says what is wrong with it


def _checked(request: ResumableRequest) -> ResumableRequest | None:
    value = request._value
    if bytes(request.fields.get("stream", b"")) != b"true" or any(_asks(value(name)) for name in _NEVER):
        return None
    if any(value(name) not in (None, 1) for name in _AT_MOST_ONE) or value("add_generation_prompt") is False:
        return None
    if value("response_format") not in (None, {"type": "text"}) or value("modalities") not in (None, ["text"]):
        return None
    if ("messages" if request.api == "chat" else "prompt") not in request.fields:
        return None
    options = value("stream_options")
    limits = [limit for limit in map(request._limit, _LIMITS) if limit]
    return request._replace(
        wants_usage=isinstance(options, dict) and options.get("include_usage") is True,
        max_tokens=min(limits) if limits else None,
    )


def _asks(value: object) -> bool:
    return value is not None and value is not False and value not in ("", [], {})  # 0 asks: `logprobs` of completions
