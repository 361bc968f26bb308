"""One stream as its client sees it, whichever replicas generate it: passes whole events on, remembers what was sent,
and rewrites the events of continuations so that ids, role, usage and end occur once. Pure.

Events of the first replica are passed on unchanged. An event is passed on when it is complete, so a break inside an
event, or inside a character, leaves nothing half-sent: the next replica generates that part again.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from corral.contract.http import Headers
from corral.gateway.receipts.usage import Usage
from corral.gateway.resumption.events import (
    DONE,
    DONE_EVENT,
    EventSplitter,
    StreamEvent,
    ends_in_half_a_character,
    joined_text,
    payload_of,
    read_event,
    write_event,
)
from corral.gateway.resumption.request import Progress, ResumableRequest

_SAME = ("id", "object", "created", "model", "system_fingerprint")  # in all events of one stream
_OF_ONE_REPLICA = ("timings", "prompt_progress")  # llama.cpp's; they describe a part of the stream


class Next(StrEnum):
    """What a stream needs when a replica has ended or broken it."""

    END = "end"  # everything that was received is passed on, and the stream ends
    CLOSE = "close"  # only the end marker is missing
    COUNT = "count"  # the text is complete, the usage is missing
    CONTINUE = "continue"
    CUT = "cut"  # it cannot be continued


class ResumableStream:
    """Implements `StreamEditor`."""

    def __init__(self, request: ResumableRequest) -> None:
        self.request = request
        self.is_edited = False  # the first response is a stream of events
        self.prompt_tokens: int | None = None
        self._splitter = EventSplitter()
        self._texts: list[str] = []
        self._tokens = 0  # events with text: engines send about one per token
        self._same: dict[str, Any] | None = None
        self._held = b""  # events whose text ends in half a character
        self._held_texts: list[str] = []
        self._is_plain = True
        self._is_done = False
        self._role_sent = False
        self._finish_reason = ""
        self._usage_sent = False
        self._completion_tokens: int | None = None
        # Of the present continuation.
        self._is_continued = False
        self._only_counts = False
        self._usable = True  # its response is a stream of events, and none was an error
        self._tokens_before = 0

    @property
    def is_continued(self) -> bool:
        return self._is_continued

    # `StreamEditor`.

    def head(self, status: int, headers: Headers) -> bool:
        fields = dict(headers)
        is_stream = fields.get(b"content-type", b"").startswith(b"text/event-stream")
        is_usable = status == 200 and is_stream and fields.get(b"content-encoding", b"identity") == b"identity"
        if self._is_continued:
            self._usable = is_usable
        else:
            self.is_edited = is_usable
        return is_usable

    def data(self, chunk: bytes) -> bytes:
        out = b"".join(map(self._take, self._splitter.feed(chunk)))
        if self._splitter.is_too_long:
            out += self._take_unknown(self._take_rest())
        if not self._is_plain and not self._is_continued:  # what cannot be continued need not be held back
            out += self._release() + self._take_rest()
        return out

    # When a replica has ended the stream, or broken it off.

    def next(self, *, complete: bool) -> Next:
        """`complete`: the replica has completed its response."""
        if self._is_done:
            return Next.END
        if self._is_continued and not self._usable:
            return Next.CUT
        if not self._is_plain or (complete and self._finish_reason and not self._is_continued):
            return Next.END if complete else Next.CUT
        if self._finish_reason or self._is_at_limit():
            wants_usage = self.request.wants_usage and not self._usage_sent
            return Next.COUNT if wants_usage else Next.CLOSE
        return Next.CONTINUE

    def begin_continuation(self, *, only_counts: bool) -> Progress | None:
        """What the client was sent so far, for the next replica. None: the text cannot be given to one."""
        self._splitter = EventSplitter()  # half an event is dropped, and half a character
        self._held, self._held_texts = b"", []
        text = joined_text(self._texts)
        if text is None:
            return None
        self._texts = [text] if text else []
        self._is_continued = True
        self._only_counts = only_counts
        self._usable = True
        self._tokens_before = self._tokens
        self._completion_tokens = None
        return Progress(text, self._tokens)

    @property
    def is_done(self) -> bool:
        """Whether the client was sent the last event."""
        return self._is_done

    def end(self, step: Next) -> bytes:
        """The last bytes for the client."""
        if step is Next.CLOSE:
            self._is_done = True
            return self._missing_finish() + DONE_EVENT
        return b"" if self._is_continued else self._release() + self._take_rest()

    def usage(self) -> Usage:
        """Of all parts together. The tokens of the text are counted where no replica could count all of them."""
        completion = self._tokens if self._completion_tokens is None else self._completion_tokens
        is_counted = self._completion_tokens is None or self._tokens_before > 0
        return Usage(self.prompt_tokens or 0, completion, estimated=is_counted)

    # Events.

    def _take(self, raw: bytes) -> bytes:
        payload = payload_of(raw)
        if self._is_continued and (payload is None or self._is_done or not self._usable):
            return b""
        if payload is None or self._is_done:
            return raw
        if payload == DONE:
            return self._take_done(raw)
        event = read_event(payload)
        if not event.is_plain:
            return self._take_unknown(raw)
        if self._is_continued:
            raw = self._rewrite(event)
            if not raw:
                return b""
        return self._pass(raw, event)

    def _take_done(self, raw: bytes) -> bytes:
        if self._is_continued and not self._finish_reason:
            return b""  # a replica that ends without a reason has not finished
        if self._is_continued and self.request.wants_usage and not self._usage_sent:
            return b""
        self._is_done = True
        return self._release() + (DONE_EVENT if self._is_continued else raw)

    def _take_unknown(self, raw: bytes) -> bytes:
        """An event that is not plain text. In the first response it is passed on, and the stream is never continued."""
        if self._is_continued:
            self._usable = False
            return b""
        self._is_plain = False
        return self._release() + raw

    def _pass(self, raw: bytes, event: StreamEvent) -> bytes:
        """Pass the event on, and remember what the client was sent."""
        if self._same is None:
            self._same = {name: event.fields[name] for name in _SAME if name in event.fields}
        self._role_sent = self._role_sent or event.has_role
        self._finish_reason = self._finish_reason or event.finish_reason
        if event.usage is not None and (self._finish_reason or not event.has_choice):
            self._usage_sent = True
        if event.text:
            self._held_texts.append(event.text)
            if ends_in_half_a_character(event.text):
                self._held += raw
                return b""
        return self._release() + raw

    def _release(self) -> bytes:
        held, self._held = self._held, b""
        self._tokens += len(self._held_texts)
        self._texts += self._held_texts
        self._held_texts = []
        return held

    def _take_rest(self) -> bytes:
        rest, self._splitter.rest = self._splitter.rest, b""
        return rest

    # Continuations.

    def _rewrite(self, event: StreamEvent) -> bytes:
        """The event as a part of the stream that the first replica began; empty: it is not sent."""
        fields = {name: value for name, value in event.fields.items() if name not in _OF_ONE_REPLICA}
        if self._same is not None:
            fields = {name: value for name, value in fields.items() if name not in _SAME} | self._same
        if event.usage is not None:
            fields["usage"] = self._add_usage(event.usage)
            if not self.request.wants_usage:
                del fields["usage"]
        has_content = (event.has_role and not self._role_sent) or bool(event.text or event.finish_reason)
        if self._only_counts:
            if event.usage is None:
                return b""
            event.text, event.finish_reason, fields["choices"] = "", "", []
            return self._missing_finish() + write_event(fields)
        elif event.has_choice and not has_content:
            return b""
        elif event.is_chat and self._role_sent and event.has_role:
            choice = event.fields["choices"][0]
            delta = {name: value for name, value in choice["delta"].items() if name != "role"}
            fields["choices"] = [{**choice, "delta": delta}]
        if not fields["choices"] and "usage" not in fields:
            return b""
        return write_event(fields)

    def _add_usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The sums: the prompt of a continuation contains what was generated before, which counts once."""
        prompt, completion = _number(usage, "prompt_tokens"), _number(usage, "completion_tokens")
        if self._only_counts:
            completion = 0
        before = min(prompt, self._tokens_before)
        self.prompt_tokens = prompt - before
        self._completion_tokens = before + completion
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": prompt + completion,
        }

    def _is_at_limit(self) -> bool:
        limit = self.request.max_tokens
        return limit is not None and self._tokens >= limit

    def _missing_finish(self) -> bytes:
        """The event that says why the text ends, where all tokens were sent but not that event."""
        if self._finish_reason:
            return b""
        self._finish_reason = "length"
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
        if self.request.api == "chat":
            choice["delta"] = {}
        else:
            choice["text"] = ""
        return write_event({**(self._same or {}), "choices": [choice]})


def _number(usage: dict[str, Any], name: str) -> int:
    value = usage.get(name)
    return value if isinstance(value, int) and value >= 0 else 0
