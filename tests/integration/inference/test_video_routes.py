"""Videos and 3D objects: by the mock behind a worker's ingress and OpenAI's own client."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import pytest

from corral.contract import backend_pb2 as pb
from tests.integration.inference.conftest import Serve
from tests.integration.inference.media_requests import left_behind, post, send_form
from tests.integration.inference.scripted_backend import scripted
from tests.support.mock_media import digest, object_request, video_request
from tests.support.waiting import until

VIDEOS = "/v1/videos"
OBJECTS = "/v1/3d/generations"


def content_of(answer: Any) -> bytes:
    return base64.b64decode(answer["data"][0]["b64_json"])


@pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")
async def test_a_video_in_openais_shape(serve: Serve, tmp_path: Path) -> None:
    mock = await serve(definition={"cfg_scale": 2.5, "step": 9})
    video = await mock.client.videos.create(
        model="m",
        prompt="a horse",
        seconds="4",
        size="720x1280",
        input_reference=("x.png", b"picture"),
        extra_body={"seed": "7"},
    )
    assert (video.object, video.status, video.progress, video.model) == ("video", "completed", 100, "m")
    assert (video.seconds, video.size, video.prompt, video.error) == ("4", "720x1280", "a horse", None)
    assert video_request(content_of(video.model_dump())) == {
        "prompt": "a horse",
        "negative": "",
        "size": [720, 1280],
        "frames": [96, 24],
        "seed": 7,
        "step": 9,
        "cfg_scale": 2.5,
        "params": {},
        "start": digest(b"picture"),
        "end": "",
        "audio": "",
    }
    assert left_behind(tmp_path) == []


async def test_a_video_in_localais_shape(serve: Serve, tmp_path: Path) -> None:
    mock = await serve()
    start, end, audio = (base64.b64encode(each).decode() for each in (b"start", b"end", b"audio"))
    body = {
        "prompt": "a horse",
        "negative_prompt": "a cow",
        "start_image": f"data:image/png;base64,{start}",
        "end_image": end,
        "audio": audio,
        "width": 64,
        "height": 32,
        "num_frames": 10,
        "fps": 5,
        "cfg_scale": 1.5,
        "params": {"motion": 0.5},
        "response_format": "url",
    }
    status, answer = await mock.ask("/v1/videos/generations", body)
    assert status == 200, answer
    head, _, payload = answer["data"][0]["url"].partition(",")
    assert (head, answer["seconds"], answer["size"]) == ("data:video/mp4;base64", "2", "64x32")
    said = video_request(base64.b64decode(payload))
    assert (said["start"], said["end"], said["audio"]) == (digest(b"start"), digest(b"end"), digest(b"audio"))
    assert (said["size"], said["frames"], said["params"]) == ([64, 32], [10, 5], {"motion": "0.5"})
    assert left_behind(tmp_path) == []


async def test_the_file_itself(serve: Serve, tmp_path: Path) -> None:
    mock = await serve()
    status, content = await post(mock, VIDEOS, json={"prompt": "x", "response_format": "file"})
    assert (status, video_request(content)["size"]) == (200, [0, 0]), "the engine's own size"
    status, content = await send_form(mock, OBJECTS, {"image": b"picture"}, response_format="file", quality="512")
    assert (status, object_request(content)) == (
        200,
        {"src": digest(b"picture"), "quality": "512", "background": ""},
    )
    encoded = base64.b64encode(b"picture").decode()
    status, answer = await mock.ask(OBJECTS, {"image": encoded, "background": "keep"})
    assert object_request(content_of(answer))["background"] == "keep"
    assert left_behind(tmp_path) == []


WRONG: list[tuple[str, Any, str]] = [
    (VIDEOS, {}, "prompt"),
    (VIDEOS, {"prompt": "x", "size": "wide"}, "size"),
    (VIDEOS, {"prompt": "x", "width": -1}, "width"),
    (VIDEOS, {"prompt": "x", "seconds": "long"}, "seconds"),
    (VIDEOS, {"prompt": "x", "seconds": 1e9}, "seconds"),
    (VIDEOS, {"prompt": "x", "seconds": True}, "seconds"),
    (VIDEOS, {"prompt": "x", "num_frames": 10**6}, "num_frames"),
    (VIDEOS, {"prompt": "x", "fps": 1000}, "fps"),
    (VIDEOS, {"prompt": "x", "params": {"lora": "../x"}}, "params"),
    (VIDEOS, {"prompt": "x", "start_image": "https://example.com/x.png"}, "start_image"),
    (VIDEOS, {"prompt": "x", "audio": "no base64"}, "audio"),
    (VIDEOS, {"prompt": "x", "response_format": "avi"}, "response_format"),
    (OBJECTS, {}, "image"),
    (OBJECTS, {"image": "aGk=", "quality": "best"}, "quality"),
    (OBJECTS, {"image": "aGk=", "background": "green"}, "background"),
    (OBJECTS, {"image": ["aGk=", "aGk="]}, "image"),
]


async def test_what_a_client_can_fix_is_named(tmp_path: Path) -> None:
    async with scripted(tmp_path) as backend:
        for path, body, param in WRONG:
            status, answer = await backend.ask(path, body)
            assert (status, answer["error"]["param"]) == (400, param), body
            assert left_behind(tmp_path) == []
        assert backend.script.heard == [], "nothing reached the backend"
        status, answer = await backend.ask(VIDEOS, {"prompt": "x"})
        assert (status, "does not implement GenerateVideo: use a model" in answer["error"]["message"]) == (501, True)

        def write() -> pb.Result:
            Path(backend.script.last("GenerateVideo").dst).write_text("a text")
            return pb.Result(success=True)

        backend.script.says["GenerateVideo"] = write
        status, answer = await backend.ask(VIDEOS, {"prompt": "x"})
        assert (status, answer["error"]["code"]) == (502, "backend_failed")


async def test_failures_and_clients_that_leave(serve: Serve, tmp_path: Path) -> None:
    mock = await serve()
    for prompt, status, words in (
        ("[[refuses=too long]] x", 500, "GenerateVideo: too long"),
        ("[[no_file]] x", 502, "wrote no file"),
    ):
        found, answer = await mock.ask(VIDEOS, {"prompt": prompt})
        assert (found, words in answer["error"]["message"]) == (status, True), answer
    asking = asyncio.ensure_future(mock.ask(VIDEOS, {"prompt": "[[hang]] x", "start_image": "aGk="}))

    async def is_ready() -> bool:
        return bool((await mock.ask("/status", method="GET"))[1]["state"] == "ready")

    await until(lambda: len(left_behind(tmp_path)) == 1, "the request has begun")
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await until(lambda: left_behind(tmp_path) == [], "the request's files removed")
    await until(is_ready, "the backend is free again")
