"""How many tokens an answer cost: read from its last few kilobytes, which pass by anyway, or its first one. Pure.

The answer is never edited and never parsed as a whole. Most engines tell `usage` at the end, some before a long list of
vectors or scores, and Anthropic's streams tell the prompt's part when they begin; llama.cpp tells `timings` where
nobody asked for usage. Where a stream tells neither, its events are counted, and the count is marked as an estimate.

A prompt's tokens are all of them, whether or not the engine had some in its cache.

The tap also notes when the client was sent the first event of a stream that has content, reasoning or a part of a tool
call: engines send the head, and events that only announce the answer, before they have read the prompt.
"""

from __future__ import annotations

import re
import time
from collections import deque
from typing import NamedTuple

from corral.contract.http import Headers

TAIL_BYTES = 4096
BEGINNING_BYTES = 1024
_LOOKED_AT = 1024  # bytes of one piece in which events are counted
_PIECES = 16  # of a stream: the last events, each a piece of its own or a few together

_USAGE = b'"usage"'
_TIMINGS = b'"timings"'
_PROMPT = re.compile(rb'"(?:prompt_tokens|input_tokens)"\s*:\s*(\d{1,12})')
_COMPLETION = re.compile(rb'"(?:completion_tokens|output_tokens)"\s*:\s*(\d{1,12})')
# Besides `input_tokens`, as Anthropic counts them.
_CACHED = re.compile(rb'"cache_(?:read|creation)_input_tokens"\s*:\s*(\d{1,12})')
_PROMPT_N = re.compile(rb'"prompt_n"\s*:\s*(\d{1,12})')
_CACHE_N = re.compile(rb'"cache_n"\s*:\s*(\d{1,12})')  # besides `prompt_n`
_PREDICTED_N = re.compile(rb'"predicted_n"\s*:\s*(\d{1,12})')
# As nearly everybody writes it; in whichever order.
_NUMBER = rb'"(p|c)(?:rompt|ompletion)_tokens"\s*:\s*(\d{1,12})'
_BOTH = re.compile(rb'"usage"\s*:\s*\{\s*' + _NUMBER + rb",\s*" + _NUMBER)
_CHUNK_LINE = re.compile(rb"\r\n[0-9A-Fa-f]{1,8}\r\n")  # between two chunks, in bytes taken raw off the wire


# A string that is not empty under one of the names by which chat, completions, responses and messages stream what was
# generated, or the beginning of a tool call. Inside of a text the quotes of a name are escaped: no match.
_GENERATED = re.compile(
    rb'"(?:content|reasoning_content|reasoning|text|thinking|delta|partial_json|arguments)"\s*:\s*"[^"]'
    rb'|"tool_calls"\s*:\s*\[\s*\{|"type"\s*:\s*"(?:tool_use|function_call)"'
)
_LONGEST_NAME = 64  # bytes that a match needs at most, should two pieces share it


class Usage(NamedTuple):
    prompt: int = 0
    completion: int = 0
    estimated: bool = False


NONE = Usage()


def read_usage(tail: bytes) -> Usage | None:
    found = read_plain_usage(tail)
    return None if found is None else Usage(*found)


def read_plain_usage(tail: bytes) -> tuple[int, int] | None:
    """Tokens of the prompt and of the completion. A name inside a text of the answer is no match: its quotes are
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


def ends_of(answer: bytes) -> bytes:
    """Of a long one what may tell its usage."""
    return _beginning_of(answer) + answer[-TAIL_BYTES:]


def _beginning_of(answer: bytes) -> bytes:
    """Not up to the middle of a number."""
    if len(answer) <= BEGINNING_BYTES:
        return answer
    return answer[: answer.rfind(b",", 0, BEGINNING_BYTES) + 1]


class UsageTap:
    """Implements `Tap`; made for each request that does not go the short way."""

    __slots__ = ("_append", "_beginning", "_pieces", "_seeks_first", "_streamed", "events", "first_at", "status")

    raw = True

    def __init__(self) -> None:
        self.status = 0
        self.events = 0
        self._streamed = False
        self._seeks_first = False
        self.first_at: float | None = None  # monotonic; of the first event with something generated, in a stream
        self._beginning = b""
        self._pieces: deque[bytes] = deque(maxlen=_PIECES)
        self._append = self._pieces.append

    def head(self, status: int, headers: Headers) -> None:
        self.status = status
        for name, value in headers:
            if name == b"content-type":
                self._streamed = value.startswith(b"text/event-stream")
        self._seeks_first = self._streamed and status < 400

    def data(self, chunk: bytes) -> None:
        if not self._beginning:
            self._beginning = _beginning_of(chunk)
        if self._seeks_first:
            self._seek_first(chunk)
        size = len(chunk)
        if size <= _LOOKED_AT:
            self.events += chunk.count(b"data:")
        else:  # a stream that comes so fast is looked at in part: its events are much alike
            self.events += chunk.count(b"data:", size - _LOOKED_AT) * size // _LOOKED_AT
            if size > TAIL_BYTES:
                chunk = chunk[-TAIL_BYTES:]
        self._append(chunk)

    def _seek_first(self, chunk: bytes) -> None:
        before = self._pieces[-1][-_LONGEST_NAME:] if self._pieces else b""
        if _GENERATED.search(before + chunk) is not None:
            self._seeks_first = False
            self.first_at = time.monotonic()

    @property
    def streamed(self) -> bool:
        return self._streamed

    def usage(self) -> Usage:
        if self.status >= 400 or not self._pieces:
            return NONE
        tail = b"".join(self._pieces)[-TAIL_BYTES:]
        found = read_usage(_unframed(tail) if self._streamed else tail)
        if found is not None and found.prompt:
            return found
        begun = read_usage(self._beginning) or NONE
        if not self._streamed:
            return found or begun
        if found is not None:
            return found._replace(prompt=begun.prompt)
        # Each event brings about a token, but for the last, which says that it is the last.
        return Usage(begun.prompt, max(0, self.events - 1), estimated=True)


def _unframed(tail: bytes) -> bytes:
    """The end of a stream from where it tells its usage, without what stands between chunks. Only that much: looking
    for it everywhere would cost more than relaying the last events did."""
    at = tail.rfind(_USAGE)
    if at < 0:
        at = tail.rfind(_TIMINGS)
    return _CHUNK_LINE.sub(b"", tail[at:] if at >= 0 else tail[-_LOOKED_AT:])


class StreamSummary(NamedTuple):
    """What a receipt tells of a streamed answer."""

    usage: Usage = NONE
    first_s: float | None = None  # from the request to the first event with something generated
    streamed: bool = True


NOT_SEEN = StreamSummary()


def summarize(tap: UsageTap, started: float) -> StreamSummary:
    first_s = None if tap.first_at is None else max(0.0, tap.first_at - started)
    return StreamSummary(tap.usage(), first_s, tap.streamed)
