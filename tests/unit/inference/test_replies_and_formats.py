"""Replies put together, and how they are written."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.contract import backend_pb2 as pb
from corral.inference.grpc.replies import Delta, ReplyReader, ToolCallPart, join_deltas
from corral.inference.openai.completion_format import ChatFormat, TextFormat
from corral.inference.openai.tool_calls import could_be_call, find_calls
from corral.inference.openai.transcript_format import FORMATS
from corral.inference.request_files import LocalFiles
from corral.inference.routes.speech import audio_format, sample_rate, samples_offset, wav_header
from corral.sdk.backend import StopWords


@given(st.text(max_size=30), st.lists(st.integers(0, 100), max_size=6), st.booleans())
def test_a_text_is_the_same_however_it_is_cut(text: str, places: list[int], tools: bool) -> None:
    whole = text.encode()
    ends = sorted(place % (len(whole) + 1) for place in places)
    reading = ReplyReader(["f"] if tools else ())
    pieces = [whole[start:end] for start, end in zip([0, *ends], [*ends, len(whole)], strict=True)]
    deltas = [reading.feed(pb.Reply(message=piece)) for piece in pieces]
    assert join_deltas([*deltas, reading.finish()]).content == text


@given(st.text(max_size=200), st.one_of(st.none(), st.text(max_size=50)))
def test_a_piece_is_json_whatever_it_says(text: str, reasoning: str | None) -> None:
    for shape in (ChatFormat("m", "id", 5), TextFormat("m", "id", 5)):
        piece = shape.piece(Delta(text, reasoning or ""))
        assert piece.startswith(b"data: {")
        assert piece.endswith(b"}\n\n")
        assert piece.count(b"\n") == 2
        told = json.loads(piece.removeprefix(b"data: "))
        choice = told["choices"][0]
        assert (choice["delta"].get("content", "") if "delta" in choice else choice["text"]) == text
        assert (told["model"], told["created"], choice["finish_reason"]) == ("m", 5, None)


def test_counts_are_never_undone() -> None:
    reading = ReplyReader()
    reading.feed(pb.Reply(message=b"a", tokens=1, prompt_tokens=9))
    reading.feed(pb.Reply(message=b"b"))
    assert (reading.tokens, reading.prompt_tokens) == (1, 9)


def test_parts_of_a_call_come_together() -> None:
    deltas = [
        Delta(calls=(ToolCallPart(1, "g"),)),
        Delta(calls=(ToolCallPart(0, "f", "{", "c"), ToolCallPart(1, "", "[]"))),
    ]
    assert join_deltas([*deltas, Delta(calls=(ToolCallPart(0, "", "}"),))]).calls == (
        ToolCallPart(0, "f", "{}", "c"),
        ToolCallPart(1, "g", "[]"),
    )


@pytest.mark.parametrize(
    ("text", "left", "calls"),
    [
        ("plain", "plain", []),
        ('{"name":"f","arguments":{"a":1}}', "", [("f", '{"a":1}')]),
        ('{"name":"f","parameters":{}}', "", [("f", "{}")]),
        ('{"name":"g"}', '{"name":"g"}', []),
        ('[{"name":"f"},{"name":"f"}]', "", [("f", "{}"), ("f", "{}")]),
        ('[{"name":"f"},5]', '[{"name":"f"},5]', []),
        ('I call <tool_call>{"name":"f"}</tool_call>', "I call", [("f", "{}")]),
        ("<tool_call>oops</tool_call>", "<tool_call>oops</tool_call>", []),
        ("[]", "[]", []),
    ],
)
def test_calls_in_text(text: str, left: str, calls: list[tuple[str, str]]) -> None:
    assert find_calls(text, {"f"}) == (left, calls)


def test_only_what_may_be_a_call_is_held_back() -> None:
    assert all(could_be_call(text) for text in ("", "  ", "{", '["', "<", "<tool", "<tool_call>{"))
    assert not any(could_be_call(text) for text in ("a", "<b>", "<tools", "-", '"'))


RESULT = pb.TranscriptResult(
    text="Hello. Bye.",
    language="en",
    segments=[
        pb.TranscriptSegment(id=0, start=0, end=1_500_000_000, text=" Hello.", speaker="A"),
        pb.TranscriptSegment(
            id=1,
            start=3_661_001_000_000,
            end=3_662_000_000_000,
            text="Bye.",
            words=[pb.TranscriptWord(start=0, end=1_000_000_000, text="Bye.")],
        ),
    ],
)


def test_transcripts_as_subtitles() -> None:
    assert FORMATS["srt"](RESULT, "transcribe")[1].decode() == (
        "1\n00:00:00,000 --> 00:00:01,500\nHello.\n\n2\n01:01:01,001 --> 01:01:02,000\nBye.\n"
    )
    assert FORMATS["vtt"](RESULT, "transcribe")[1].decode() == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nHello.\n\n01:01:01.001 --> 01:01:02.000\nBye.\n"
    )


def test_transcripts_as_json() -> None:
    told = json.loads(FORMATS["verbose_json"](RESULT, "transcribe")[1])
    assert told == {
        "task": "transcribe",
        "language": "en",
        "duration": 3662.0,
        "text": "Hello. Bye.",
        "segments": [
            {"id": 0, "start": 0.0, "end": 1.5, "text": " Hello.", "tokens": [], "speaker": "A"},
            {"id": 1, "start": 3661.001, "end": 3662.0, "text": "Bye.", "tokens": []},
        ],
        "words": [{"word": "Bye.", "start": 0.0, "end": 1.0}],
    }
    diarized = json.loads(FORMATS["diarized_json"](RESULT, "transcribe")[1])
    assert [segment["speaker"] for segment in diarized["segments"]] == ["A", ""]
    assert FORMATS["text"](pb.TranscriptResult(segments=RESULT.segments), "x")[1] == b"Hello. Bye.\n"


def test_sound_is_told_by_its_first_bytes() -> None:
    header = wav_header(22050)
    assert (audio_format(header), samples_offset(header), len(header)) == ("wav", 44, 44)
    listed = header[:36] + b"LIST\x03\0\0\0abc\0" + header[36:]
    assert samples_offset(listed) == 44 + 12
    assert [audio_format(start) for start in (b"ID3", b"\xff\xfb", b"OggS", b"fLaC", b"")] == [
        "mp3",
        "mp3",
        "opus",
        "flac",
        "wav",
    ]
    assert [sample_rate(told) for told in (b'{"sample_rate":24000}', b"", b"x", b"[]", b'{"sample_rate":"x"}')] == [
        24000,
        16000,
        16000,
        16000,
        16000,
    ]


words = st.lists(st.text(alphabet="ab<", min_size=1, max_size=4), min_size=1, max_size=3)


@given(words, st.lists(st.text(alphabet="ab<c", max_size=5), max_size=8))
def test_stop_words_cut_where_they_stand_however_they_come(stop: list[str], pieces: list[str]) -> None:
    whole = "".join(pieces)
    places = [place for word in stop if (place := whole.find(word)) >= 0]
    cutter, said = StopWords(stop), ""
    for piece in pieces:
        said += cutter.feed(piece)
        if cutter.found:
            break
    said += cutter.rest()
    assert cutter.found == bool(places)
    if not places:
        assert said == whole
    else:
        # Of words that overlap, the one that is complete first counts.
        assert whole.startswith(said)
        assert not any(word in said for word in stop)
        assert any(whole.startswith(said + word) for word in stop)


async def test_files_of_those_who_are_no_more_are_removed(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path / "requests")
    async with files.open() as folder:
        (folder.here / "input.wav").write_text("x")
        dead = tmp_path / "requests" / "4194999-abc"
        dead.mkdir()
        (dead / "input.wav").write_text("x")
        (tmp_path / "requests" / "somebody else's").mkdir()
        files.sweep()
        assert sorted(path.name for path in (tmp_path / "requests").iterdir()) == sorted(
            [folder.here.name, "somebody else's"]
        )
        assert folder.here.name.startswith(f"{os.getpid()}-")
        assert (folder.here.stat().st_mode & 0o777) == 0o700
    assert [path.name for path in (tmp_path / "requests").iterdir()] == ["somebody else's"]


@pytest.mark.parametrize("text", ["<tool_call>" * 20_000, "<tool_call>" + " " * 200_000, "<tool_call>\n" * 20_000])
def test_a_call_that_is_begun_and_never_ended_is_text_at_once(text: str) -> None:
    """A model that got stuck must not stop its worker with it."""
    began = time.process_time()
    assert find_calls(text, {"f"}) == (text, [])
    assert time.process_time() - began < 2
