"""Images: the mock behind a worker's ingress, asked by OpenAI's client; and what goes wrong on the way."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from corral.contract import backend_pb2 as pb
from tests.integration.inference.conftest import Serve
from tests.integration.inference.media_requests import left_behind, post, send_form
from tests.integration.inference.scripted_backend import scripted
from tests.support.mock_media import digest, image_request, image_size, image_text
from tests.support.waiting import until

GENERATIONS = "/v1/images/generations"
EDITS = "/v1/images/edits"
JPEG = b"\xff\xd8\xff\xe0 a photo"
ENCODED = base64.b64encode(JPEG).decode()  # begins with a slash, as a path does


def images_of(answer: Any) -> list[bytes]:
    return [base64.b64decode(each.b64_json) for each in answer.data]


async def test_images_from_text(serve: Serve, tmp_path: Path) -> None:
    mock = await serve(definition={"step": 7})
    answer = await mock.client.images.generate(
        model="m", prompt="a horse | a cow", n=2, size="64x32", extra_body={"seed": 5}
    )
    first, second = images_of(answer)
    assert image_size(first) == (64, 32)
    said = {"prompt": "a horse", "negative": "a cow", "step": 7, "seed": 5, "src": "", "refs": []}
    assert image_request(first) == said
    assert image_request(second) == {**said, "seed": 6}, "another image than the first"
    assert (answer.size, answer.output_format) == ("64x32", "png")
    assert left_behind(tmp_path) == []


async def test_an_image_as_a_data_url_and_from_other_images(serve: Serve, tmp_path: Path) -> None:
    mock = await serve()
    status, answer = await mock.ask(
        GENERATIONS,
        {
            "prompt": "x",
            "response_format": "url",
            "negative_prompt": "y",
            "step": 3,
            "file": ENCODED,
            "ref_images": [f"data:image/jpeg;base64,{ENCODED}", base64.b64encode(b"two").decode()],
        },
    )
    assert status == 200, answer
    head, _, payload = answer["data"][0]["url"].partition(",")
    assert head == "data:image/png;base64"
    content = base64.b64decode(payload)
    assert image_size(content) == (512, 512)
    said = image_request(content)
    assert (said["negative"], said["step"], said["src"]) == ("y", 3, digest(JPEG))
    assert said["refs"] == [digest(JPEG), digest(b"two")]
    assert left_behind(tmp_path) == []


async def test_edits_variations_and_masks(serve: Serve, tmp_path: Path) -> None:
    mock = await serve()
    edited = await mock.client.images.edit(model="m", image=("a.png", b"one"), prompt="a hat", size="8x8")
    said = image_request(images_of(edited)[0])
    assert (said["prompt"], said["src"], said["refs"]) == ("a hat", digest(b"one"), [digest(b"one")])
    several = await mock.client.images.edit(model="m", image=[("a.png", b"one"), ("b.png", b"two")], prompt="both")
    assert image_request(images_of(several)[0])["refs"] == [digest(b"one"), digest(b"two")]
    masked = await mock.client.images.edit(model="m", image=b"one", mask=b"mask", prompt="here")
    said = image_request(images_of(masked)[0])
    both = json.dumps({"image": "b25l", "mask_image": "bWFzaw=="}, separators=(",", ":")).encode()
    assert (said["src"], said["refs"]) == (digest(both), [digest(b"one"), digest(b"mask")])
    status, answer = await send_form(mock, "/v1/images/variations", {"image": b"one"}, n="1")
    said = image_request(base64.b64decode(answer["data"][0]["b64_json"]))
    assert (said["prompt"], said["src"]) == ("", digest(b"one"))
    status, answer = await mock.ask(EDITS, {"images": [{"image_url": f"data:;base64,{ENCODED}"}], "prompt": "p"})
    assert (status, image_request(base64.b64decode(answer["data"][0]["b64_json"]))["src"]) == (200, digest(JPEG))
    status, answer = await send_form(mock, "/v1/images/inpainting", {"image": b"one"}, prompt="x")
    assert (status, answer["error"]["param"]) == (400, "mask")
    assert left_behind(tmp_path) == []


async def test_an_image_is_enlarged(serve: Serve, tmp_path: Path) -> None:
    mock = await serve()
    small = images_of(await mock.client.images.generate(model="m", prompt="x", size="16x8"))[0]
    status, answer = await send_form(mock, "/v1/images/upscale", {"image": small}, scale="4")
    assert status == 200, answer
    large = base64.b64decode(answer["data"][0]["b64_json"])
    assert (image_size(large), image_text(large)) == ((64, 32), digest(small))
    assert (await send_form(mock, "/v1/images/upscale", {"image": small}, scale="3"))[1]["error"]["param"] == "scale"
    status, answer = await send_form(mock, "/v1/images/upscale", {"image": b"text"})
    assert (status, answer["error"]["message"]) == (400, "the image is no PNG")
    assert left_behind(tmp_path) == []


WRONG: list[tuple[Any, str, str]] = [
    ({}, "prompt", "prompt must be a text"),
    ({"prompt": 5}, "prompt", "must be a string"),
    ({"prompt": "x", "size": "large"}, "size", "WIDTHxHEIGHT"),
    ({"prompt": "x", "size": "0x64"}, "size", "WIDTHxHEIGHT"),
    ({"prompt": "x", "size": "99999x64"}, "size", "at most 8192"),
    ({"prompt": "x", "n": 11}, "n", "between 1 and 10"),
    ({"prompt": "x", "n": 0}, "n", "between 1 and 10"),
    ({"prompt": "x", "step": 0}, "step", "between 1 and 1000"),
    ({"prompt": "x", "response_format": "bmp"}, "response_format", "b64_json, url"),
    ({"prompt": "x", "output_format": "jpeg"}, "output_format", "writes png"),
    ({"prompt": "x", "stream": True}, "stream", "not streamed"),
    ({"prompt": "x", "file": "%%%"}, "file", "not base64"),
    ({"prompt": "x", "file": "data:image/png,abc"}, "file", "base64"),
    ({"prompt": "x", "file": ""}, "file", "empty"),
    ({"prompt": "x", "file": "https://example.com/a.png"}, "file", "URLs and paths are not read"),
    ({"prompt": "x", "file": "file:///etc/passwd"}, "file", "URLs and paths are not read"),
    ({"prompt": "x", "ref_images": ["aGk="] * 17}, "ref_images", "more than 16 files"),
    ({"prompt": "x", "ref_images": [5]}, "ref_images", "list of strings"),
]


async def test_what_a_client_can_fix_is_named(tmp_path: Path) -> None:
    async with scripted(tmp_path) as backend:

        def write() -> pb.Result:
            Path(backend.script.last("GenerateImage").dst).write_bytes(b"\x89PNG")
            return pb.Result(success=True)

        backend.script.says["GenerateImage"] = write
        for body, param, words in WRONG:
            status, answer = await backend.ask(GENERATIONS, body)
            assert (status, answer["error"]["param"]) == (400, param), body
            assert words in answer["error"]["message"]
            assert left_behind(tmp_path) == []


async def test_bodies_of_a_wrong_kind_or_size(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mock = await serve()
    status, answer = await post(mock, EDITS, data=b"\x89PNG", headers={"content-type": "image/png"})
    assert (status, answer["error"]["code"]) == (415, "unsupported_media_type")
    status, answer = await send_form(mock, EDITS, {"image": b""}, prompt="x")
    assert (status, answer["error"]["message"]) == (400, "image is an empty file.")
    status, answer = await send_form(mock, EDITS, {"picture": b"one"}, prompt="x")
    assert (status, answer["error"]["param"]) == (400, "image")
    status, answer = await send_form(mock, EDITS, {"image": b"x"})
    assert (status, answer["error"]["param"]) == (400, "prompt")
    assert (await mock.ask(GENERATIONS, method="GET"))[0] == 405
    monkeypatch.setattr("corral.inference.openai.media_body.MAX_BODY_BYTES", 1000)
    status, answer = await mock.ask(GENERATIONS, {"prompt": "x" * 2000})
    assert (status, answer["error"]["code"]) == (413, "request_too_large")
    assert left_behind(tmp_path) == []


async def test_a_backend_that_fails_or_writes_nothing(serve: Serve, tmp_path: Path) -> None:
    mock = await serve()
    for prompt, status, words in (
        ("[[refuses=out of memory]] x", 500, "GenerateImage: out of memory"),
        ("[[no_file]] x", 502, "wrote no file"),
        ("[[busy]] x", 503, "all slots are taken"),
        ("[[exit=3]] x", 502, ""),
    ):
        found, answer = await mock.ask(GENERATIONS, {"prompt": prompt, "file": ENCODED})
        assert found in (status, 503), answer
        assert words in answer["error"]["message"]
        assert left_behind(tmp_path) == []


async def test_a_backend_that_writes_something_else(tmp_path: Path) -> None:
    async with scripted(tmp_path) as backend:

        def write(kind: str) -> Any:
            def answer() -> pb.Result:
                path = Path(backend.script.last("GenerateImage").dst)
                if kind == "link":
                    path.symlink_to("/etc/hostname")
                elif kind == "folder":
                    path.mkdir()
                else:
                    path.write_text(kind)
                return pb.Result(success=True)

            return answer

        for kind, words in (("", "no file"), ("link", "no file"), ("folder", "no file"), ("a text", "no image")):
            backend.script.says["GenerateImage"] = write(kind)
            status, answer = await backend.ask(GENERATIONS, {"prompt": "x"})
            assert (status, answer["error"]["code"]) == (502, "backend_failed"), kind
            assert words in answer["error"]["message"]
            assert left_behind(tmp_path) == []
        backend.script.says.clear()
        status, answer = await backend.ask(GENERATIONS, {"prompt": "x"})
        assert (status, "does not implement GenerateImage: use a model" in answer["error"]["message"]) == (501, True)


async def test_a_client_that_leaves_cancels_the_call(serve: Serve, tmp_path: Path) -> None:
    mock = await serve()
    asking = asyncio.ensure_future(mock.ask(GENERATIONS, {"prompt": "[[hang]] x", "file": ENCODED}))

    async def is_busy() -> bool:
        return bool((await mock.ask("/status", method="GET"))[1]["state"] == "busy")

    async def is_ready() -> bool:
        return bool((await mock.ask("/status", method="GET"))[1]["state"] == "ready")

    await until(is_busy, "the call has begun")
    assert len(left_behind(tmp_path)) == 1
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await until(is_ready, "the backend is free again")
    await until(lambda: left_behind(tmp_path) == [], "the request's files removed")
    assert mock.in_flight == 0


async def test_a_client_that_leaves_during_its_upload(serve: Serve, tmp_path: Path) -> None:
    mock = await serve()
    sent = asyncio.Event()

    async def endless() -> Any:
        yield b'--b\r\nContent-Disposition: form-data; name="image"; filename="x"\r\n\r\n' + b"x" * 100_000
        sent.set()
        await asyncio.Event().wait()

    headers = {"content-type": "multipart/form-data; boundary=b"}
    asking = asyncio.ensure_future(post(mock, EDITS, data=endless(), headers=headers))
    await sent.wait()
    await until(lambda: len(left_behind(tmp_path)) == 1, "the upload has begun")
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await until(lambda: left_behind(tmp_path) == [], "the request's files removed")


async def test_large_images_are_sent_in_pieces(tmp_path: Path) -> None:
    content = b"\x89PNG" + bytes(range(256)) * 4000  # of a length that base64 pads
    async with scripted(tmp_path) as backend:

        def write() -> pb.Result:
            Path(backend.script.last("GenerateImage").dst).write_bytes(content)
            return pb.Result(success=True)

        backend.script.says["GenerateImage"] = write
        answer = await backend.client.images.generate(model="m", prompt="x", n=2)
        assert images_of(answer) == [content, content]


async def test_a_form_with_too_many_files(serve: Serve) -> None:
    mock = await serve()
    form = aiohttp.FormData()
    for _ in range(17):
        form.add_field("image[]", b"x", filename="x.png")
    status, answer = await post(mock, EDITS, data=form)
    assert (status, answer["error"]["param"]) == (400, "image")
