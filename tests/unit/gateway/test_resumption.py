"""What a client is sent of a stream that breaks, wherever it breaks, byte by byte."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.contract.http import RelayResult
from corral.contract.manifest import Continues
from corral.gateway.http.stream_resumer import StreamResumer
from corral.gateway.resumption.events import EventSplitter
from corral.gateway.resumption.request import Progress, ResumableRequest, read_resumable
from corral.gateway.resumption.stream import Next, ResumableStream

CHAT, COMPLETIONS = b"/v1/chat/completions", b"/v1/completions"
EVENTS = ((b"content-type", b"text/event-stream"),)
WAYS = Continues(chat="prefill", completions="prompt")
WORDS = ["Grüße", " an", " 😀", " alle", "!"]
PROMPT_TOKENS = 7


def request(path: bytes = CHAT, **fields: Any) -> ResumableRequest:
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}], "prompt": "hi", **fields}
    found = read_resumable(path, json.dumps(body).encode())
    assert found is not None
    return found


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields, ensure_ascii=False).encode() + b"\n\n"


def response(
    name: str, words: list[str], *, before: int = 0, usage: bool = True, chat: bool = True, finish: str = "stop"
) -> bytes:
    """The whole response of one replica. `before`: tokens that the prompt has besides its own."""
    same = {"id": name, "object": "chunk", "created": len(name), "model": "m"}

    def choice(text: str | None, reason: str | None = None, **role: str) -> bytes:
        part = {"delta": {**role, **({} if text is None else {"content": text})}} if chat else {"text": text or ""}
        return event(**same, choices=[{"index": 0, **part, "finish_reason": reason}])

    out = choice(None, role="assistant") if chat else b""
    out += b"".join(choice(word) for word in words) + choice(None, finish)
    if usage:
        prompt, completion = PROMPT_TOKENS + before, len(words)
        tokens = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        out += event(**same, choices=[], usage=tokens, timings={"prompt_n": prompt})
    return out + b"data: [DONE]\n\n"


class Seen:
    """What a client reads in a stream."""

    def __init__(self, sent: bytes) -> None:
        assert sent.endswith(b"\n\n"), "half an event was sent"
        raw = [line.removeprefix(b"data: ") for line in sent.split(b"\n\n") if line]
        self.done = raw.count(b"[DONE]")
        self.events = [json.loads(each) for each in raw if each != b"[DONE]"]
        choices = [each["choices"][0] for each in self.events if each["choices"]]
        self.text = "".join(c["delta"].get("content") or "" if "delta" in c else c["text"] for c in choices)
        self.roles = [c["delta"]["role"] for c in choices if "role" in c.get("delta", {})]
        self.reasons = [c["finish_reason"] for c in choices if c["finish_reason"]]
        self.usages = [each["usage"] for each in self.events if "usage" in each]
        self.same = {tuple(each.get(name) for name in ("id", "object", "created", "model")) for each in self.events}
        assert raw[-1] == b"[DONE]" or not self.done


def run(stream: ResumableStream, whole: bytes, at: int, *, chat: bool = True, usage: bool = True) -> tuple[bytes, int]:
    """The stream breaks after `at` bytes, and a second replica continues it: what the client is sent, and how often a
    replica was asked."""
    assert stream.head(200, EVENTS)
    sent, asked = stream.data(whole[:at]), 0
    complete = at == len(whole)
    while (step := stream.next(complete=complete)) in (Next.CONTINUE, Next.COUNT):
        asked += 1
        assert asked <= 2
        progress = stream.begin_continuation(only_counts=step is Next.COUNT)
        assert progress is not None
        body = json.loads(stream.request.continuation(WAYS, "m", progress, only_counts=step is Next.COUNT))
        assert body["stream_options"]["include_usage"] is True
        if step is Next.COUNT:
            assert body["max_tokens"] == 1
        if chat:
            prefix = body["messages"][1]["content"] if progress.text else ""
            assert [each["role"] for each in body["messages"]] == ["user", "assistant"][: 1 + bool(progress.text)]
        else:
            prefix = body["prompt"].removeprefix("hi")
        assert prefix == progress.text
        rest = list(WORDS)
        while prefix:
            assert prefix.startswith(rest[0])
            prefix = prefix.removeprefix(rest.pop(0))
        rest = ["x"] if step is Next.COUNT else rest
        assert stream.head(200, EVENTS)
        sent += stream.data(response("the-second", rest, before=progress.tokens, chat=chat))
        complete = True
    assert step in (Next.END, Next.CLOSE)
    return sent + stream.end(step), asked


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("wants_usage", [True, False])
def test_wherever_it_breaks_the_client_reads_one_whole_stream(chat: bool, wants_usage: bool) -> None:
    whole = response("first", WORDS, usage=wants_usage, chat=chat)
    options = {"stream_options": {"include_usage": True}} if wants_usage else {}
    for at in range(len(whole) + 1):
        stream = ResumableStream(request(CHAT if chat else COMPLETIONS, **options))
        sent, asked = run(stream, whole, at, chat=chat)
        seen = Seen(sent)
        assert seen.text == "".join(WORDS), at
        assert (seen.done, seen.reasons, seen.roles) == (1, ["stop"], ["assistant"] if chat else []), at
        assert len(seen.same) == 1, at
        tokens = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": 5, "total_tokens": PROMPT_TOKENS + 5}
        assert seen.usages == ([tokens] if wants_usage else []), at
        if asked:
            assert stream.usage()[:2] == (PROMPT_TOKENS, 5), at
            assert not any("timings" in each for each in seen.events[-1:]), at
        else:
            assert sent.startswith(whole[: sent.rfind(b"data: [DONE]")]), "nothing is changed without need"


@given(cuts=st.lists(st.integers(0, 2000), max_size=12), at=st.integers(0, 2000))
def test_pieces_of_any_size_make_no_difference(cuts: list[int], at: int) -> None:
    whole = response("first", WORDS)
    stream = ResumableStream(request(stream_options={"include_usage": True}))
    stream.head(200, EVENTS)
    places = [0, *sorted(min(cut, at, len(whole)) for cut in cuts), min(at, len(whole))]
    sent = b"".join(stream.data(whole[a:b]) for a, b in itertools.pairwise(places))
    other = ResumableStream(request(stream_options={"include_usage": True}))
    other.head(200, EVENTS)
    assert sent == other.data(whole[: min(at, len(whole))])
    assert stream.next(complete=False) is other.next(complete=False)


def test_a_stream_that_does_not_break_is_passed_on_unchanged() -> None:
    odd = (
        b": a comment\r\n\r\n"
        b'event: x\ndata: {"choices":[{"delta":{"content":"a"}}]}\n\n'
        b'data:{"choices":[{"delta":{"content":null},"finish_reason":"stop"}]}\r\n\r\n'
        b"data: [DONE]\n\ntrailing"
    )
    stream = ResumableStream(request())
    stream.head(200, EVENTS)
    sent = b"".join(stream.data(odd[at : at + 1]) for at in range(len(odd)))
    step = stream.next(complete=True)
    assert (step, sent + stream.end(step)) == (Next.END, odd)


@pytest.mark.parametrize("end", [b"data: [DONE]\n\n", b"", b"data: [DO"])
async def test_a_client_that_goes_when_it_has_read_the_last_event_has_the_whole_stream(end: bytes) -> None:
    """The end of the body comes after it, and clients do not wait for that."""
    stream = ResumableStream(request())
    stream.head(200, EVENTS)
    stream.data(response("one", WORDS, usage=False).removesuffix(b"data: [DONE]\n\n") + end)
    unused: Any = None
    resumer = StreamResumer(unused, unused, unused, unused)
    left = RelayResult(200, complete=False, client_gone=True, first_byte_s=0.1, total_s=0.2, bytes_sent=9)
    resumed = await resumer.complete(stream, unused, left, unused, unused, unused)
    assert (resumed.complete, resumed.client_gone) == ((True, False) if end.endswith(b"]\n\n") else (False, True))


def test_half_a_character_is_held_back_until_its_other_half_comes() -> None:
    halves = [rb'data: {"choices":[{"delta":{"content":"\ud83d"}}]}' + b"\n\n"]
    halves.append(rb'data: {"choices":[{"delta":{"content":"\ude00"}}]}' + b"\n\n")
    stream = ResumableStream(request())
    stream.head(200, EVENTS)
    assert stream.data(halves[0]) == b""
    assert stream.data(halves[1]) == halves[0] + halves[1]
    assert stream.data(halves[0]) == b""
    assert stream.next(complete=False) is Next.CONTINUE
    assert stream.begin_continuation(only_counts=False) == Progress("😀", 2), "the half that nobody saw does not count"


@pytest.mark.parametrize(
    "odd",
    [
        {"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]},
        {"choices": [{"delta": {"reasoning_content": "hm"}}]},
        {"choices": [{"delta": {"content": "a"}, "logprobs": {"content": []}, "index": 1}]},
        {"choices": [{"delta": {"content": "a"}}, {"delta": {"content": "b"}}]},
        {"error": {"message": "no"}},
        {"something": "else"},
    ],
)
def test_what_is_not_plain_text_is_passed_on_and_never_continued(odd: dict[str, Any]) -> None:
    stream = ResumableStream(request())
    stream.head(200, EVENTS)
    whole = event(choices=[{"delta": {"content": "a"}}]) + event(**odd) + b"data: {"
    assert stream.data(whole) + stream.end(Next.CUT) == whole
    assert stream.next(complete=False) is Next.CUT
    assert stream.next(complete=True) is Next.END


def test_text_at_the_limit_of_tokens_is_ended_and_not_continued() -> None:
    stream = ResumableStream(request(max_tokens=5))
    stream.head(200, EVENTS)
    whole = response("first", WORDS, finish="length", usage=False)
    sent = stream.data(whole[: whole.find(b'"length"')])
    assert stream.next(complete=False) is Next.CLOSE
    seen = Seen(sent + stream.end(Next.CLOSE))
    assert (seen.text, seen.reasons, seen.done, len(seen.same)) == ("".join(WORDS), ["length"], 1, 1)


def test_a_continuation_breaks_too_and_tokens_still_count_once() -> None:
    stream = ResumableStream(request(stream_options={"include_usage": True}))
    first = response("first", WORDS)
    stream.head(200, EVENTS)
    sent = stream.data(first[: first.find(b" an")])
    for name, words, before, cut in (("second", WORDS[1:], 1, True), ("third", WORDS[3:], 3, False)):
        assert stream.next(complete=False) is Next.CONTINUE
        assert stream.begin_continuation(only_counts=False) == Progress("".join(WORDS[:before]), before)
        stream.head(200, EVENTS)
        whole = response(name, words, before=before)
        sent += stream.data(whole[: whole.find(b" alle")] if cut else whole)
    assert stream.next(complete=True) is Next.END
    seen = Seen(sent)
    assert (seen.text, seen.done, len(seen.same)) == ("".join(WORDS), 1, 1)
    assert seen.usages == [{"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}]


@pytest.mark.parametrize(
    ("status", "headers", "body"),
    [
        (200, ((b"content-type", b"application/json"),), b"{}"),
        (200, EVENTS, b'data: {"error":{"message":"no"}}\n\n'),
        (500, EVENTS, response("second", WORDS)),
    ],
)
def test_what_is_no_continuation_is_not_sent(status: int, headers: Any, body: bytes) -> None:
    stream = ResumableStream(request())
    stream.head(200, EVENTS)
    sent = stream.data(event(choices=[{"delta": {"content": "a"}}]))
    assert stream.begin_continuation(only_counts=False) == Progress("a", 1)
    if stream.head(status, headers):
        sent += stream.data(body)
    assert sent == event(choices=[{"delta": {"content": "a"}}])
    assert stream.next(complete=True) is Next.CUT


def test_an_event_without_end_is_not_kept_for_ever() -> None:
    stream = ResumableStream(request())
    stream.head(200, EVENTS)
    piece = b"data: " + b"x" * (700 * 1024)
    assert stream.data(piece) == b""
    assert stream.data(piece) == piece + piece
    assert stream.next(complete=False) is Next.CUT


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": False},
        {"tools": [{"type": "function"}]},
        {"functions": [{}]},
        {"response_format": {"type": "json_object"}},
        {"json_schema": {}, "grammar": "root ::= x"},
        {"guided_json": {"type": "object"}},
        {"n": 2},
        {"best_of": 3},
        {"logprobs": True},
        {"logprobs": 0},
        {"top_logprobs": 2},
        {"echo": True},
        {"modalities": ["text", "audio"]},
        {"messages": None, "tools": [1]},
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_other_requests_are_not_resumable(fields: dict[str, Any], path: bytes) -> None:
    body = {"stream": True, "messages": [{"role": "user", "content": "hi"}], "prompt": "hi"}
    assert read_resumable(path, json.dumps(body).encode()) is not None
    assert read_resumable(path, json.dumps(body | fields).encode()) is None


def test_other_paths_and_bodies_are_not_resumable() -> None:
    assert read_resumable(b"/v1/responses", b'{"stream":true,"messages":[]}') is None
    for body in (b"", b"[]", b"{", b'{"stream":true}', b'{"stream":1,"messages":[]}', b"\xff"):
        assert read_resumable(CHAT, body) is None


def test_harmless_fields_do_not_matter() -> None:
    body: dict[str, Any] = {
        "n": 1,
        "tools": [],
        "response_format": {"type": "text"},
        "logprobs": None,
        "seed": 4,
        "tool_choice": "none",
    }
    assert request(**body).max_tokens is None


def test_what_is_left_of_the_limits_goes_to_the_next_replica() -> None:
    asked = request(max_tokens=10, max_completion_tokens=8, min_tokens=4, stop=["x"], temperature=0)
    assert asked.max_tokens == 8
    body = json.loads(asked.continuation(WAYS, "own", Progress("a b", 3)))
    assert (body["max_tokens"], body["max_completion_tokens"], body["min_tokens"]) == (7, 5, 1)
    assert (body["model"], body["stop"], body["temperature"]) == ("own", ["x"], 0)
    counting = json.loads(asked.continuation(WAYS, "own", Progress("a b", 3), only_counts=True))
    assert (counting["max_tokens"], counting["max_completion_tokens"], counting["min_tokens"]) == (1, 1, 0)


def test_vllm_is_asked_with_its_own_fields() -> None:
    ways = Continues(chat="continue_final_message")
    body = json.loads(request().continuation(ways, "m", Progress("a", 1)))
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
    assert not request(COMPLETIONS).can_continue_on(ways)
    assert "continue_final_message" not in json.loads(request().continuation(ways, "m", Progress()))


def test_a_text_that_the_client_began_itself_is_not_continued() -> None:
    own = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "He"}]
    with pytest.raises(ValueError, match="of its own"):
        request(messages=own).continuation(WAYS, "m", Progress("llo", 1))
    with pytest.raises(ValueError, match="not one text"):
        request(COMPLETIONS, prompt=["a", "b"]).continuation(WAYS, "m", Progress("llo", 1))


def test_events_are_split_at_empty_lines_however_they_are_written() -> None:
    splitter = EventSplitter()
    whole = b"data: a\n\ndata: b\r\n\r\ndata: c\n\r\nrest"
    found = [each for at in range(len(whole)) for each in splitter.feed(whole[at : at + 1])]
    assert found == [b"data: a\n\n", b"data: b\r\n\r\n", b"data: c\n\r\n"]
    assert splitter.rest == b"rest"
