"""Objects, depth, faces and voices: by the mock behind a worker's ingress."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from corral.contract import backend_pb2 as pb
from tests.integration.inference.conftest import Bridged, Serve
from tests.integration.inference.media_requests import left_behind, send_form
from tests.integration.inference.scripted_backend import scripted
from tests.support.mock_media import digest


async def picture_of(mock: Bridged) -> bytes:
    answer = await mock.client.images.generate(model="m", prompt="x", size="4x2")
    return base64.b64decode((answer.data or [])[0].b64_json or "")


def base64_of(content: bytes) -> str:
    return base64.b64encode(content).decode()


async def test_objects_in_an_image(serve: Serve, tmp_path: Path) -> None:
    mock = await serve()
    picture = await picture_of(mock)
    status, answer = await mock.ask("/v1/detection", {"image": base64_of(picture)})
    whole = {"x": 0, "y": 0, "width": 4, "height": 2, "class_name": digest(picture), "confidence": 0.5}
    assert (status, answer) == (200, {"detections": [whole]})
    body = {"image": f"data:image/png;base64,{base64_of(picture)}", "prompt": "a horse", "points": [1, 1, 1]}
    status, answer = await mock.ask("/v1/detection", {**body, "boxes": [1, 1, 3, 2]})
    horse, box = answer["detections"]
    assert (horse["class_name"], base64.b64decode(horse["mask"])[:4]) == ("a horse", b"\x89PNG")
    assert (box["x"], box["y"], box["width"], box["height"]) == (1, 1, 2, 1)
    status, answer = await send_form(mock, "/v1/detection", {"image": picture}, boxes="1,1,3,2", threshold="0.4")
    assert (status, len(answer["detections"])) == (200, 1)
    for wrong, status, param in (
        ({}, 400, "image"),
        ({"image": "http://localhost/x.png"}, 400, "image"),
        ({**body, "points": [1, 1]}, 400, "points"),
        ({**body, "points": "1,1,1"}, 400, "points"),
        ({**body, "boxes": [1, 1, 1, "x"]}, 400, "boxes"),
        ({**body, "threshold": "high"}, 400, "threshold"),
        ({"image": base64_of(b"no image")}, 400, None),
    ):
        found, answer = await mock.ask("/v1/detection", wrong)
        assert (found, answer["error"]["param"]) == (status, param), answer
    assert left_behind(tmp_path) == []


async def test_the_depth_of_an_image(serve: Serve, tmp_path: Path) -> None:
    mock = await serve()
    picture = base64_of(await picture_of(mock))
    status, answer = await mock.ask("/v1/depth", {"image": picture})
    assert status == 200, answer
    assert (answer["width"], answer["height"], answer["is_metric"]) == (4, 2, True)
    assert (answer["depth"], answer["confidence"]) == ([0.5] * 8, [1.0] * 8)
    assert "points" not in answer, "only on request"
    status, answer = await mock.ask("/v1/depth", {"image": picture, "include_points": True})
    assert (answer["points"], answer["num_points"], answer["point_colors"]) == ([1, 2, 3], 1, base64_of(b"rgb"))
    assert "depth" not in answer
    status, answer = await mock.ask("/v1/depth", {"image": picture, "exports": ["glb", "colmap"]})
    assert {each["name"]: base64.b64decode(each["b64_json"]) for each in answer["exports"]} == {
        "pointcloud.glb": b"glTF cloud",
        "colmap/points.txt": b"1 2 3",
        "colmap/cameras.txt": b"one",
    }
    status, answer = await mock.ask("/v1/depth", {"image": picture, "exports": ["../x"]})
    assert (status, answer["error"]["param"]) == (400, "exports")
    assert left_behind(tmp_path) == []


async def test_exports_that_are_missing_or_links(tmp_path: Path) -> None:
    async with scripted(tmp_path) as backend:

        def link() -> pb.DepthResponse:
            folder = Path(backend.script.last("Depth").dst)
            (folder / "x.glb").symlink_to("/etc/hostname")
            (folder / "etc").symlink_to("/etc")
            return pb.DepthResponse(export_paths=["/etc/hostname"])

        for answer in (pb.DepthResponse(), link):
            backend.script.says["Depth"] = answer
            status, refused = await backend.ask("/v1/depth", {"image": "aGk=", "exports": ["glb"]})
            assert (status, "wrote no file" in refused["error"]["message"]) == (502, True)
            assert left_behind(tmp_path) == []


async def test_faces(serve: Serve, tmp_path: Path) -> None:
    mock = await serve()
    one, two = base64_of(b"one"), base64_of(b"two")
    status, answer = await mock.ask("/v1/face/verify", {"img1": one, "img2": one, "threshold": 0.25})
    assert (status, answer["verified"], answer["threshold"], answer["model"]) == (200, True, 0.25, "mock")
    assert answer["img1_area"] == {"x": 0, "y": 0, "w": 2, "h": 3}
    assert "img1_is_real" not in answer, "it was not checked"
    status, answer = await mock.ask("/v1/face/verify", {"img1": one, "img2": two, "anti_spoofing": True})
    assert (answer["verified"], answer["img1_is_real"]) == (False, True)
    status, answer = await mock.ask("/v1/face/analyze", {"img": one, "actions": ["age", "gender"]})
    assert (status, answer["faces"][0]["age"], answer["faces"][0]["gender"]) == (200, 30, {"Woman": 0.75})
    assert "is_real" not in answer["faces"][0]
    status, answer = await mock.ask("/v1/face/embed", {"img": one})
    assert (status, len(answer["embedding"]), answer["dim"], answer["model"]) == (200, 8, 8, "m")
    assert (await mock.ask("/v1/face/verify", {"img1": one}))[1]["error"]["param"] == "img2"
    assert left_behind(tmp_path) == []


async def test_voices(serve: Serve, tmp_path: Path) -> None:
    mock = await serve()
    status, answer = await send_form(mock, "/v1/voice/verify", {"audio1": b"a", "audio2": b"a"}, threshold="0.5")
    assert (status, answer["verified"], answer["threshold"]) == (200, True, 0.5)
    body: Any = {"audio1": base64_of(b"a"), "audio2": base64_of(b"b")}
    assert (await mock.ask("/v1/voice/verify", body))[1]["verified"] is False
    status, answer = await mock.ask("/v1/voice/analyze", {"audio": base64_of(b"a"), "actions": ["age", "emotion"]})
    assert (status, [each["dominant_emotion"] for each in answer["segments"]]) == (200, [digest(b"a")] * 2)
    status, answer = await mock.ask("/v1/voice/embed", {"audio": base64_of(b"\1\2")})
    assert (status, answer) == (200, {"embedding": [1, 2], "dim": 2, "model": "mock"})
    assert (await mock.ask("/v1/voice/embed", {}))[1]["error"]["param"] == "audio"
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize("path", ["/v1/detection", "/v1/depth"])
async def test_a_backend_without_the_rpc(tmp_path: Path, path: str) -> None:
    async with scripted(tmp_path) as backend:
        status, answer = await backend.ask(path, {"image": "aGk="})
        assert (status, answer["error"]["code"]) == (501, "not_implemented")
