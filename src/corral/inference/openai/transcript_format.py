"""OpenAI's formats of a transcript: JSON, text, subtitles. Pure. Backends send times in nanoseconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from corral.contract import backend_pb2 as pb
from corral.contract.codec import encode

NS = 1_000_000_000
Written = tuple[bytes, bytes]  # content type, body
_JSON = b"application/json"
_TEXT = b"text/plain; charset=utf-8"


def _json(result: pb.TranscriptResult, _task: str) -> Written:
    return _JSON, encode({"text": text_of(result)})


def _text(result: pb.TranscriptResult, _task: str) -> Written:
    return _TEXT, text_of(result).encode() + b"\n"


def _verbose(result: pb.TranscriptResult, task: str) -> Written:
    answer: dict[str, Any] = {
        "task": task,
        "language": result.language,
        "duration": duration_of(result),
        "text": text_of(result),
        "segments": [_segment(each) for each in result.segments],
    }
    if words := [word for segment in result.segments for word in segment.words]:
        answer["words"] = [{"word": word.text, "start": word.start / NS, "end": word.end / NS} for word in words]
    return _JSON, encode(answer)


def _diarized(result: pb.TranscriptResult, task: str) -> Written:
    segments = [
        {
            "type": "transcript.text.segment",
            "id": str(each.id),
            "start": each.start / NS,
            "end": each.end / NS,
            "text": each.text,
            "speaker": each.speaker,
        }
        for each in result.segments
    ]
    answer = {"task": task, "duration": duration_of(result), "text": text_of(result), "segments": segments}
    return _JSON, encode(answer)


def _srt(result: pb.TranscriptResult, _task: str) -> Written:
    blocks = [
        f"{number}\n{_clock(each.start, ',')} --> {_clock(each.end, ',')}\n{each.text.strip()}\n"
        for number, each in enumerate(result.segments, 1)
    ]
    return b"application/x-subrip", "\n".join(blocks).encode()


def _vtt(result: pb.TranscriptResult, _task: str) -> Written:
    blocks = [
        f"{_clock(each.start, '.')} --> {_clock(each.end, '.')}\n{each.text.strip()}\n" for each in result.segments
    ]
    return b"text/vtt; charset=utf-8", "\n".join(["WEBVTT\n", *blocks]).encode()


FORMATS: dict[str, Callable[[pb.TranscriptResult, str], Written]] = {
    "json": _json,
    "text": _text,
    "verbose_json": _verbose,
    "diarized_json": _diarized,
    "srt": _srt,
    "vtt": _vtt,
}


def text_of(result: pb.TranscriptResult) -> str:
    return result.text or _joined(result.segments)


def duration_of(result: pb.TranscriptResult) -> float:
    return result.duration or max((each.end / NS for each in result.segments), default=0.0)


def _joined(segments: Sequence[pb.TranscriptSegment]) -> str:
    return " ".join(each.text.strip() for each in segments)


def _segment(each: pb.TranscriptSegment) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "id": each.id,
        "start": each.start / NS,
        "end": each.end / NS,
        "text": each.text,
        "tokens": list(each.tokens),
    }
    return answer | {"speaker": each.speaker} if each.speaker else answer


def _clock(at_ns: int, point: str) -> str:
    milliseconds = max(0, round(at_ns / 1_000_000))
    seconds, milliseconds = divmod(milliseconds, 1000)
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}{point}{milliseconds:03}"
