"""The other doors of a gRPC process, by the mock through the worker's ingress and OpenAI's own client."""

from __future__ import annotations

import io
import wave
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from tests.integration.inference.conftest import Bridged, Serve

TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def left_behind(folder: Path) -> list[Path]:
    return list((folder / "requests").iterdir())


async def test_vectors_ranks_and_tokens(serve: Serve) -> None:
    mock = await serve(slots=2)
    one, two, again = (await mock.client.embeddings.create(model="m", input=["a", "b", "a"])).data
    assert len(one.embedding) == 8
    assert one.embedding == again.embedding != two.embedding
    documents = ["the sky", "a grey horse", {"text": "the grey sky"}]
    status, answer = await mock.ask("/v1/rerank", {"query": "grey sky", "documents": documents, "top_n": 2})
    assert status == 200
    assert [(row["index"], row["relevance_score"]) for row in answer["results"]] == [(2, 1.0), (0, 0.5)]
    assert answer["results"][0]["document"] == {"text": "the grey sky"}
    assert (answer["model"], answer["usage"]["total_tokens"]) == ("m", 10)
    assert await mock.ask("/v1/tokenize", {"content": "a bc"}) == (200, {"tokens": [1, 2], "count": 2})
    assert await mock.ask("/v1/detokenize", {"tokens": [1, 2]}) == (200, {"content": "x xx"})
    assert (await mock.ask("/v1/vad", {"audio": [0, 0.5, 0.5, 0]}))[1]["segments"][0]["start"] == pytest.approx(
        1 / 8000
    )


async def test_how_the_process_is(serve: Serve) -> None:
    mock = await serve()
    assert await mock.ask("/health", method="GET") == (200, {"status": "ok"})
    status, answer = await mock.ask("/status", method="GET")
    assert (status, answer["state"]) == (200, "ready")
    assert answer["memory"]["total"] > 1_000_000
    models = await mock.client.models.list()
    assert [model.id for model in models.data] == ["m"]


async def test_tools_and_stop_words(serve: Serve) -> None:
    mock = await serve()
    asked: Any = [{"role": "user", "content": "[[tool=weather]] in Rome"}]
    answer = await mock.client.chat.completions.create(model="m", messages=asked, tools=TOOLS)
    assert answer.choices[0].message.tool_calls is not None
    (made,) = answer.choices[0].message.tool_calls
    assert made.type == "function"
    assert (made.function.name, made.function.arguments) == ("weather", '{"said": "in Rome"}')
    async with mock.client.chat.completions.stream(model="m", messages=asked, tools=TOOLS) as stream:
        whole = await stream.get_final_completion()  # the client puts the pieces together
    assert whole.choices[0].message.tool_calls is not None
    (streamed,) = whole.choices[0].message.tool_calls
    assert (streamed.function.name, streamed.function.arguments) == ("weather", '{"said": "in Rome"}')
    assert whole.choices[0].finish_reason == "tool_calls"
    words: Any = [{"role": "user", "content": "one two three"}]
    cut = await mock.client.chat.completions.create(model="m", messages=words, stop=[" three", "never"])
    assert cut.choices[0].message.content == "mock 1: one two"


async def test_speech_there_and_back(serve: Serve, tmp_path: Path) -> None:
    mock = await serve()
    spoken = await mock.client.audio.speech.create(model="m", voice="ann", input="good morning")
    assert spoken.response.headers["content-type"] == "audio/wav"
    with wave.open(io.BytesIO(spoken.content)) as sound:
        assert (sound.getframerate(), sound.getnchannels(), sound.getsampwidth()) == (8000, 1, 2)
        assert sound.readframes(100).startswith(b"mock says ann: good")
    samples = await mock.client.audio.speech.create(model="m", voice="", input="hi", response_format="pcm")
    assert samples.content == b"mock says hi"
    with pytest.raises(openai.BadRequestError, match="writes wav"):
        await mock.client.audio.speech.create(model="m", voice="", input="hi", response_format="mp3")
    status, streamed = await mock.ask("/v1/audio/speech", {"input": "hi", "stream": True, "response_format": "pcm"})
    assert (status, streamed) == (200, "mock says hi")
    heard = await mock.client.audio.transcriptions.create(model="m", file=("x.wav", spoken.content))
    assert heard.text == "ann: good morning"
    assert left_behind(tmp_path) == []


async def test_forms_of_a_transcript(serve: Serve, tmp_path: Path) -> None:
    mock = await serve()
    file = ("../../etc/long name.mp3", b"\r\n--not a boundary" * 200_000)
    said = "3600000 bytes in en"
    plain = await mock.client.audio.transcriptions.create(model="m", file=file, language="en")
    assert plain.text == said
    text = await mock.client.audio.transcriptions.create(model="m", file=file, response_format="text", language="en")
    assert text == said + "\n"
    long = await mock.client.audio.transcriptions.create(
        model="m", file=file, response_format="verbose_json", timestamp_granularities=["word", "segment"], language="en"
    )
    assert (long.text, long.language) == (said, "en")
    stream = await mock.client.audio.transcriptions.create(model="m", file=file, stream=True, language="en")
    assert [event.model_dump(exclude_none=True) async for event in stream] == [
        {"type": "transcript.text.delta", "delta": said},
        {"type": "transcript.text.done", "text": said},
    ]
    assert await form(mock, "/v1/audio/translations", file=b"x") == (200, {"text": "1 bytes"})
    diarized = await form(mock, "/v1/audio/diarization", file=b"x", include_text="true")
    assert diarized[1]["segments"] == [{"id": 0, "start": 0.0, "end": 1.0, "speaker": "SPEAKER_00", "text": "1 bytes"}]
    assert left_behind(tmp_path) == []


async def form(mock: Bridged, path: str, *, file: bytes, called: str = "file", **fields: str) -> tuple[int, Any]:
    told = aiohttp.FormData()
    for name, value in fields.items():
        told.add_field(name, value)
    told.add_field(called, file, filename="x.wav")
    async with (
        aiohttp.ClientSession() as session,
        session.post(mock.url + path, data=told, headers=mock.site.headers()) as answer,
    ):
        return answer.status, await answer.json()


async def test_forms_that_are_wrong(serve: Serve, tmp_path: Path) -> None:
    mock = await serve()
    path = "/v1/audio/transcriptions"
    for fields, param in (
        ({"response_format": "pdf"}, "response_format"),
        ({"temperature": "hot"}, "temperature"),
        ({"stream": "perhaps"}, "stream"),
        ({"timestamp_granularities[]": "letter"}, "timestamp_granularities"),
    ):
        status, answer = await form(mock, path, file=b"x", **fields)
        assert (status, answer["error"]["param"]) == (400, param)
    status, answer = await form(mock, path, file=b"x", called="attachment", model="m")
    assert (status, answer["error"]["param"]) == (400, "file")
    assert left_behind(tmp_path) == []
