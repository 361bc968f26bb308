"""Splits a stream of server-sent events and reads those of chats and completions. Pure."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

MAX_EVENT_BYTES = 1024 * 1024
DONE = b"[DONE]"
DONE_EVENT = b"data: [DONE]\n\n"

_END_OF_EVENT = re.compile(rb"\r?\n\r?\n")
_PLAIN_DELTA = frozenset({"role", "content"})


class EventSplitter:
    """Bytes in, whole events out, each with the empty line that ends it."""

    def __init__(self) -> None:
        self.rest = b""  # the beginning of an event

    def feed(self, data: bytes) -> list[bytes]:
        data = self.rest + data
        # An end may extend over two pieces, and a part of it is at most three bytes long.
        start, at = 0, max(0, len(self.rest) - 3)
        events = []
        while (end := _END_OF_EVENT.search(data, at)) is not None:
            events.append(data[start : end.end()])
            start = at = end.end()
        self.rest = data[start:]
        return events

    @property
    def is_too_long(self) -> bool:
        return len(self.rest) > MAX_EVENT_BYTES


@dataclass(slots=True)
class StreamEvent:
    """One event of a chat or a completion."""

    fields: dict[str, Any] = field(default_factory=dict)
    is_chat: bool = False
    has_choice: bool = False
    text: str = ""
    has_role: bool = False
    finish_reason: str = ""
    usage: dict[str, Any] | None = None
    is_plain: bool = True  # nothing but text; False: also calls, reasoning, errors, several choices, log probabilities


def payload_of(event: bytes) -> bytes | None:
    """The data of an event; None: it is a comment, or has none."""
    lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


def read_event(payload: bytes) -> StreamEvent:
    """Whatever is not understood is not plain."""
    try:
        # Not msgspec: this parser keeps halves of surrogate pairs, which engines may split over two events.
        fields = json.loads(payload)
    except ValueError:
        return StreamEvent(is_plain=False)
    if not isinstance(fields, dict) or fields.get("error") is not None:
        return StreamEvent(is_plain=False)
    usage, choices = fields.get("usage"), fields.get("choices")
    event = StreamEvent(fields, usage=usage if isinstance(usage, dict) else None)
    if not isinstance(choices, list) or len(choices) > 1:
        event.is_plain = False
    elif choices:
        _read_choice(event, choices[0])
    return event


def _read_choice(event: StreamEvent, choice: object) -> None:
    if not isinstance(choice, dict):
        event.is_plain = False
        return
    event.has_choice = True
    delta = choice.get("delta")
    text = choice.get("text")
    if isinstance(delta, dict):
        event.is_chat = True
        event.has_role = delta.get("role") is not None
        text = delta.get("content")
        event.is_plain = not any(delta[name] for name in delta.keys() - _PLAIN_DELTA)
    reason = choice.get("finish_reason")
    event.text = text if isinstance(text, str) else ""
    event.finish_reason = reason if isinstance(reason, str) else ""
    if not isinstance(text, str | None) or choice.get("logprobs") or choice.get("index", 0) != 0:
        event.is_plain = False


def write_event(fields: dict[str, Any]) -> bytes:
    try:
        text = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which only an escape can express
        text = json.dumps(fields, separators=(",", ":")).encode()
    return b"data: %b\n\n" % text


def ends_in_half_a_character(text: str) -> bool:
    return text != "" and "\ud800" <= text[-1] <= "\udbff"


def joined_text(pieces: list[str]) -> str | None:
    """The text of all pieces, with the halves of surrogate pairs joined; None: a half has no other half."""
    text = "".join(pieces)
    try:
        text.encode()
    except UnicodeEncodeError:
        try:
            return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
        except UnicodeDecodeError:
            return None
    return text
