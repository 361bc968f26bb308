"""Token usage of a response, read from its last kilobytes as they pass, or from its first one. Pure.

The gateway never changes a response and never parses it as a whole. Most engines write `usage` at the end, some before
a long list of vectors or scores; Anthropic's streams write the prompt's part at the beginning; llama.cpp writes
`timings` where usage was not requested. For a stream with neither, the gateway counts events and marks the result as an
estimate.

The tokens of a prompt include those that the engine had in its cache.

The tap also records when the client was sent the first event of a stream that has content, reasoning or a part of a
tool call: engines send the head, and events that only announce the response, before they have read the prompt.
"""

from __future__ import annotations

import re
import time
from collections import deque
from typing import NamedTuple

from corral.contract.http import Headers

TAIL_BYTES = 4096
BEGINNING_BYTES = 1024
_COUNTED_BYTES = 1024  # of one piece: events are counted in its last bytes
_KEPT_PIECES = 16  # the last pieces of a stream, with one event or a few each

_USAGE = b'"usage"'
_TIMINGS = b'"timings"'
_PROMPT = re.compile(rb'"(?:prompt_tokens|input_tokens)"\s*:\s*(\d{1,12})')
_COMPLETION = re.compile(rb'"(?:completion_tokens|output_tokens)"\s*:\s*(\d{1,12})')
# Not included in `input_tokens`, as Anthropic counts.
_CACHED = re.compile(rb'"cache_(?:read|creation)_input_tokens"\s*:\s*(\d{1,12})')
_PROMPT_N = re.compile(rb'"prompt_n"\s*:\s*(\d{1,12})')
_CACHE_N = re.compile(rb'"cache_n"\s*:\s*(\d{1,12})')  # not included in `prompt_n`
_PREDICTED_N = re.compile(rb'"predicted_n"\s*:\s*(\d{1,12})')
# The usual spelling, in either order.
_NUMBER = rb'"(p|c)(?:rompt|ompletion)_tokens"\s*:\s*(\d{1,12})'
_BOTH = re.compile(rb'"usage"\s*:\s*\{\s*' + _NUMBER + rb",\s*" + _NUMBER)
_CHUNK_LINE = re.compile(rb"\r\n[0-9A-Fa-f]{1,8}\r\n")  # between two chunks, in raw bytes of the wire


# A non-empty string under one of the names with which chat, completions, responses and messages stream generated text,
# or the beginning of a tool call. Inside a string the quotes of a name are escaped and do not match.
_GENERATED = re.compile(
    rb'"(?:content|reasoning_content|reasoning|text|thinking|delta|partial_json|arguments)"\s*:\s*"[^"]'
    rb'|"tool_calls"\s*:\s*\[\s*\{|"type"\s*:\s*"(?:tool_use|function_call)"'
)
_MAX_MATCH_BYTES = 64  # a match may extend over two pieces


class Usage(NamedTuple):
    prompt: int = 0
    completion: int = 0
    estimated: bool = False


NO_USAGE = Usage()


def read_usage(tail: bytes) -> Usage | None:
    found = read_plain_usage(tail)
    return None if found is None else Usage(*found)


def read_plain_usage(tail: bytes) -> tuple[int, int] | None:
    """The tokens of prompt and completion. A name inside a string of the response does not match: its quotes are
    escaped there."""
    at = tail.rfind(_USAGE)
    if at >= 0:
        both = _BOTH.match(tail, at)
        if both is not None:
            one, first, other, second = both.groups()
            if one != other:
                return (int(first), int(second)) if one == b"p" else (int(second), int(first))
        prompt, completion = _PROMPT.search(tail, at), _COMPLETION.search(tail, at)
        if prompt is not None or completion is not None:
            cached = sum(map(int, _CACHED.findall(tail, at)))
            return (int(prompt[1]) if prompt else 0) + cached, int(completion[1]) if completion else 0
    at = tail.rfind(_TIMINGS)
    if at >= 0:
        prompt, completion = _PROMPT_N.search(tail, at), _PREDICTED_N.search(tail, at)
        if completion is not None:
            had = _CACHE_N.search(tail, at)
            return (int(prompt[1]) if prompt else 0) + (int(had[1]) if had else 0), int(completion[1])
    return None


def both_ends(response: bytes) -> bytes:
    """The parts of a long response that may contain its usage."""
    return _beginning_of(response) + response[-TAIL_BYTES:]


def _beginning_of(response: bytes) -> bytes:
    """It does not end inside a number."""
    if len(response) <= BEGINNING_BYTES:
        return response
    return response[: response.rfind(b",", 0, BEGINNING_BYTES) + 1]


class UsageTap:
    """Implements `Tap`."""

    __slots__ = ("_append", "_awaits_first", "_beginning", "_pieces", "_streamed", "events", "first_at", "status")

    raw = True

    def __init__(self) -> None:
        self.status = 0
        self.events = 0
        self._streamed = False
        self._awaits_first = False
        self.first_at: float | None = None  # monotonic; of the first event of a stream with generated content
        self._beginning = b""
        self._pieces: deque[bytes] = deque(maxlen=_KEPT_PIECES)
        self._append = self._pieces.append

    def head(self, status: int, headers: Headers) -> None:
        self.status = status
        for name, value in headers:
            if name == b"content-type":
                self._streamed = value.startswith(b"text/event-stream")
        self._awaits_first = self._streamed and status < 400

    def data(self, chunk: bytes) -> None:
        if not self._beginning:
            self._beginning = _beginning_of(chunk)
        if self._awaits_first:
            self._look_for_first(chunk)
        size = len(chunk)
        if size <= _COUNTED_BYTES:
            self.events += chunk.count(b"data:")
        else:  # a fast stream is sampled: its events are similar
            self.events += chunk.count(b"data:", size - _COUNTED_BYTES) * size // _COUNTED_BYTES
            if size > TAIL_BYTES:
                chunk = chunk[-TAIL_BYTES:]
        self._append(chunk)

    def _look_for_first(self, chunk: bytes) -> None:
        before = self._pieces[-1][-_MAX_MATCH_BYTES:] if self._pieces else b""
        if _GENERATED.search(before + chunk) is not None:
            self._awaits_first = False
            self.first_at = time.monotonic()

    @property
    def streamed(self) -> bool:
        return self._streamed

    def usage(self) -> Usage:
        if self.status >= 400 or not self._pieces:
            return NO_USAGE
        tail = b"".join(self._pieces)[-TAIL_BYTES:]
        found = read_usage(_unframed(tail) if self._streamed else tail)
        if found is not None and found.prompt:
            return found
        begun = read_usage(self._beginning) or NO_USAGE
        if not self._streamed:
            return found or begun
        if found is not None:
            return found._replace(prompt=begun.prompt)
        # About one token per event, except for the last event, which only marks the end.
        return Usage(begun.prompt, max(0, self.events - 1), estimated=True)


def _unframed(tail: bytes) -> bytes:
    """The end of a stream from its usage on, without chunk lines. Only this part: a search in all of it would cost more
    than relaying the last events did."""
    at = tail.rfind(_USAGE)
    if at < 0:
        at = tail.rfind(_TIMINGS)
    return _CHUNK_LINE.sub(b"", tail[at:] if at >= 0 else tail[-_COUNTED_BYTES:])


class StreamSummary(NamedTuple):
    """The fields of a receipt for a streamed response."""

    usage: Usage = NO_USAGE
    first_s: float | None = None  # from the request to the first event with generated content
    streamed: bool = True


NOT_SEEN = StreamSummary()


def summarize(tap: UsageTap, started: float) -> StreamSummary:
    first_s = None if tap.first_at is None else max(0.0, tap.first_at - started)
    return StreamSummary(tap.usage(), first_s, tap.streamed)
