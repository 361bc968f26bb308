"""A model whose backend speaks only gRPC, asked through the whole fleet by OpenAI's own client, from cold."""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support.fleet import PATIENT, Fleet
from tests.support.grown_fleet import grown_fleet
from tests.support.mock_media import digest, image_request, image_size, sound_request, video_request
from tests.support.waiting import wait_for

POLLY = """
name: polly
backend: mock-grpc
parameters: {max_tokens: 6}
stopwords: [" never"]
parallel: 4
"""
HELLO: Any = [{"role": "user", "content": "one two three four five six seven"}]
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with grown_fleet(tmp_path_factory.mktemp("grpc"), env=PATIENT) as fleet:
        file = fleet.root / "polly.yaml"
        file.write_text(POLLY)
        ran = fleet.cli("models", "install", "-f", str(file))
        assert ran.returncode == 0, ran.stderr
        yield fleet


@pytest.fixture
def client(fleet: Fleet) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=fleet.url + "/v1", api_key=fleet.key, max_retries=0, timeout=60) as client:
        yield client


def test_everything_a_client_asks(fleet: Fleet, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="polly", messages=HELLO)  # installs, starts and loads first
    assert answer.model == "polly"
    assert answer.choices[0].message.content == "mock 1: one two three four five"  # the definition's max_tokens
    assert answer.choices[0].finish_reason == "length"

    words: Any = [{"role": "user", "content": "say never again"}]
    stream = client.chat.completions.create(model="polly", messages=words, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "mock 1: say"  # its stop words

    asked: Any = [{"role": "user", "content": "[[tool=weather]] Rome"}]
    called = client.chat.completions.create(model="polly", messages=asked, tools=TOOLS)
    assert called.choices[0].finish_reason == "tool_calls"

    vectors = client.embeddings.create(model="polly", input=["a", "b"])
    assert [len(row.embedding) for row in vectors.data] == [8, 8]

    sound = client.audio.speech.create(model="polly", voice="ann", input="good morning")
    heard = client.audio.transcriptions.create(model="polly", file=("x.wav", sound.content))
    assert heard.text == "ann: good morning"

    for path, body, answer_key in (
        ("/v1/tokenize", {"content": "a bc"}, "tokens"),
        ("/v1/rerank", {"query": "a", "documents": ["a", "b"]}, "results"),
        ("/v1/vad", {"audio": [0.0, 0.5]}, "segments"),
    ):
        found = fleet.api("POST", path, {"model": "polly", **body})
        assert found.status == 200, found.body
        assert found.json()[answer_key]

    with pytest.raises(openai.BadRequestError, match="temperature must be a number"):
        client.chat.completions.create(model="polly", messages=HELLO, temperature="hot")  # type: ignore[call-overload]


def test_images_from_text_and_from_images(fleet: Fleet, client: openai.OpenAI) -> None:
    drawn = client.images.generate(model="polly", prompt="a horse", size="16x8")
    content = base64.b64decode((drawn.data or [])[0].b64_json or "")
    assert image_size(content) == (16, 8)
    edited = client.images.edit(model="polly", image=content, prompt="a hat")
    assert image_request(base64.b64decode((edited.data or [])[0].b64_json or ""))["src"] == digest(content)
    with pytest.raises(openai.BadRequestError, match="size must be WIDTHxHEIGHT"):
        client.images.generate(model="polly", prompt="a horse", size="large")
    with pytest.raises(openai.BadRequestError, match="prompt must be a text"):
        client.images.generate(model="polly", prompt="")
    with pytest.raises(openai.BadRequestError, match="`model`"):
        client.images.edit(image=content, prompt="a hat")


def test_other_media_are_routed_by_their_model_and_leave_receipts(fleet: Fleet, client: openai.OpenAI) -> None:
    encoded = base64.b64encode(b"given").decode()
    video = fleet.api("POST", "/v1/videos", {"model": "polly", "prompt": "a horse", "start_image": encoded})
    assert video.status == 200, video.body
    assert video_request(base64.b64decode(video.json()["data"][0]["b64_json"]))["start"] == digest(b"given")
    sound = fleet.api("POST", "/v1/sound-generation", {"model_id": "polly", "text": "rain"})
    assert (sound.status, sound_request(sound.body)) == (200, {"text": "rain"})
    speech = fleet.api("POST", "/v1/audio/speech", {"model": "polly", "input": "hi", "stream_format": "sse"})
    assert (speech.status, b"speech.audio.done" in speech.body) == (200, True)
    for path, body, answer_key in (
        ("/v1/audio/transformations", {"audio": encoded, "response_format": "b64_json"}, "data"),
        ("/v1/audio/classification", {"file": encoded}, "detections"),
        ("/v1/3d/generations", {"image": encoded}, "data"),
        ("/v1/face/verify", {"img1": encoded, "img2": encoded}, "verified"),
        ("/v1/voice/embed", {"audio": encoded}, "embedding"),
    ):
        found = fleet.api("POST", path, {"model": "polly", **body})
        assert found.status == 200, found.body
        assert found.json()[answer_key]
    key = fleet.cli("keys", "create", "painter", "--role", "inference", "--json")
    assert key.returncode == 0, key.stderr
    secret = json.loads(key.stdout)["secret"]
    drawn = fleet.api("POST", "/v1/images/generations", {"model": "polly", "prompt": "x"}, key=secret)
    assert drawn.status == 200, drawn.body
    for path, body, status in (
        ("/v1/videos", {"prompt": "a horse"}, 400),
        ("/v1/sound-generation", {"text": "rain"}, 400),
        ("/v1/videos", {"model": "nobody", "prompt": "a horse"}, 404),
        ("/videos", {"model": "polly", "prompt": "a horse"}, 404),
    ):
        assert fleet.api("POST", path, body).status == status

    def has_receipts() -> bool:
        rows = fleet.api("GET", "/api/requests?limit=100").json()["requests"]
        counted = [row for row in rows if row["model"] == "polly" and row["status"] == 200]
        return {"/v1/videos", "/v1/sound-generation"} <= {row.get("path", "") for row in counted}

    wait_for(has_receipts, "receipts of the requests")


def test_who_leaves_stops_the_generation(fleet: Fleet, client: openai.OpenAI) -> None:
    """With all slots taken by streams nobody reads any more, the next request would wait for ever."""
    hanging: Any = [{"role": "user", "content": "[[hang_after=2]] a b c"}]
    for _ in range(8):
        stream = client.chat.completions.create(model="polly", messages=hanging, stream=True)
        assert len(list(itertools.islice(stream, 2))) == 2
        stream.close()
    assert client.chat.completions.create(model="polly", messages=HELLO).choices


def test_a_process_that_dies_is_replaced(fleet: Fleet, client: openai.OpenAI) -> None:
    dying: Any = [{"role": "user", "content": "[[crash_after=2]] [[piece_delay_s=0.2]] a b c"}]
    stream = client.chat.completions.create(model="polly", messages=dying, stream=True)
    with pytest.raises(openai.APIError, match="broke the connection"):
        list(stream)
    assert client.chat.completions.create(model="polly", messages=HELLO).choices  # waits for the new one
