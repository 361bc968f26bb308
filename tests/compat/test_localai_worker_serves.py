"""Models on a LocalAI worker: placed, loaded, asked, looked after and ended by Corral controllers, by the contract."""

from __future__ import annotations

import asyncio
import base64
import io
import tarfile
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.compat.localai_fleet import ServingFleet, ServingWorker
from tests.support.mock_media import (
    digest,
    image_request,
    image_size,
    object_request,
    sound_request,
    video_request,
)
from tests.support.postgres import Postgres, postgres
from tests.support.waiting import until

__all__ = ["postgres"]

HELLO: Any = [{"role": "user", "content": "one two three"}]


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory, postgres: Postgres) -> Iterator[ServingFleet]:
    yard = ServingFleet(tmp_path_factory.mktemp("yard"), postgres.new_database())
    try:
        yard.cluster.start()
        yield yard
    finally:
        yard.cluster.close()


async def test_everything_a_client_asks_through_any_controller(yard: ServingFleet) -> None:
    weights = yard.folder / "weights.bin"
    weights.write_bytes(b"weights" * 40_000)
    async with yard.worker("old-hand") as worker, yard.client() as client, yard.client(yard.two) as other:
        await yard.model(
            "polly",
            download_files=[{"filename": "w/weights.bin", "uri": weights.as_uri()}],
            parameters={"model": "w/weights.bin"},
        )
        worker.files.cut_after = 100_000  # its first upload breaks off, and goes on there
        answer = await client.chat.completions.create(model="polly", messages=HELLO)
        assert answer.choices[0].message.content == "mock 1: one two three"

        asked = worker.asked("backend.install")
        assert [(each["backend"], each["model_id"], each.get("replica_index", 0)) for each in asked] == [
            ("engine", "polly", 0)
        ]
        assert "accept" not in asked[0]
        staged = [path for path in worker.files.left() if path.endswith("w/weights.bin")]
        assert len(staged) == 1
        assert staged[0].startswith("models/polly/")
        puts = [status for method, path, status in worker.files.asked if method == "PUT"]
        assert puts == [500, 200], "resumed, and verified by the worker"

        stream = await other.chat.completions.create(model="polly", messages=HELLO, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "mock 1: one two three"
        vectors = await other.embeddings.create(model="polly", input=["a", "b"])
        assert [len(row.embedding) for row in vectors.data] == [8, 8]
        assert len(worker.asked("backend.install")) == 1, "the other controller serves the same process"

        before = worker.files.left()
        sound = await client.audio.speech.create(model="polly", voice="ann", input="good morning")
        heard = await other.audio.transcriptions.create(model="polly", file=("x.wav", sound.content))
        assert heard.text == "ann: good morning"
        await until(lambda: worker.files.left() == before, "files of requests removed")
        assert len([path for path in worker.files.uploads() if ".corral-requests" in path]) == 2

        told = await yard.api("GET", "/api/why/models/polly")
        assert [row["node"] for row in told["replicas"]] == ["old-hand"]


async def test_files_of_media_go_to_the_worker_and_come_back(yard: ServingFleet) -> None:
    async with yard.worker("fine-hand") as worker, yard.client() as client:
        await yard.model("painter")
        drawn = await client.images.generate(model="painter", prompt="a horse", size="16x8", n=2)
        contents = [base64.b64decode(each.b64_json or "") for each in drawn.data or ()]
        assert [image_size(content) for content in contents] == [(16, 8), (16, 8)]
        edited = await client.images.edit(model="painter", image=contents, prompt="a hat")
        said = image_request(base64.b64decode((edited.data or [])[0].b64_json or ""))
        assert (said["src"], said["refs"]) == (digest(contents[0]), [digest(content) for content in contents])
        assert len([path for path in worker.files.uploads() if ".corral-requests" in path]) == 5, "of 2 requests"
        with pytest.raises(openai.InternalServerError, match="wrote no file"):
            await client.images.generate(model="painter", prompt="[[no_file]] x")
        with pytest.raises(openai.InternalServerError, match="out of paint"):
            await client.images.generate(model="painter", prompt="[[refuses=out of paint]] x")
        hanging = asyncio.ensure_future(client.images.edit(model="painter", image=contents[0], prompt="[[hang]] x"))
        await until(lambda: any(".corral-requests" in path for path in worker.files.left()), "files of the request")
        hanging.cancel()
        await asyncio.gather(hanging, return_exceptions=True)
        await until(lambda: not [path for path in worker.files.left() if ".corral-requests" in path], "files removed")


async def test_videos_sounds_voices_and_depths(yard: ServingFleet) -> None:
    async with yard.worker("deft-hand") as worker:
        await yard.model("artist")

        async def ask(path: str, **body: object) -> Any:
            return await yard.api("POST", path, {"model": "artist", **body})

        start = base64.b64encode(b"start").decode()
        video = await ask("/v1/videos", prompt="a horse", start_image=start, audio=start)
        said = video_request(base64.b64decode(video["data"][0]["b64_json"]))
        assert (said["start"], said["audio"], said["end"]) == (digest(b"start"), digest(b"start"), "")
        made = await ask("/v1/3d/generations", image=start)
        assert object_request(base64.b64decode(made["data"][0]["b64_json"]))["src"] == digest(b"start")

        sound_body = {"model_id": "artist", "text": "rain"}
        sound = await asyncio.to_thread(yard.cluster.api, yard.one, "POST", "/v1/sound-generation", sound_body)
        assert (sound.status, sound_request(sound.body)) == (200, {"text": "rain"})
        changed = await ask("/v1/audio/transformations", audio=start, response_format="b64_json", params={"stems": 2})
        assert changed["stems"] == ["stem0", "stem1"]
        assert [base64.b64decode(each["b64_json"])[44:] for each in changed["data"]] == [b"stem 0", b"stem 1"]
        assert (await ask("/v1/voice/verify", audio1=start, audio2=start))["verified"] is True
        assert (await ask("/v1/audio/classification", file=start, top_k=1))["detections"][0]["label"] == "t"

        picture = (await ask("/v1/images/generations", prompt="x", size="2x2"))["data"][0]["b64_json"]
        depth = await ask("/v1/depth", image=picture, exports=["glb", "colmap"])
        assert depth["depth"] == [0.5] * 4
        exported = {each["name"]: base64.b64decode(each["b64_json"]) for each in depth["exports"]}
        assert exported["pointcloud.glb"] == b"glTF cloud"
        assert sorted(exported) == ["colmap/cameras.txt", "colmap/points.txt", "pointcloud.glb"]
        assert (await ask("/v1/detection", image=picture))["detections"][0]["width"] == 2
        await until(lambda: not [path for path in worker.files.left() if ".corral-requests" in path], "files removed")


async def test_an_archive_is_unpacked_before_its_files_are_sent(yard: ServingFleet) -> None:
    packed = yard.folder / "voice.tar.gz"
    with tarfile.open(packed, "w:gz") as archive:
        for name, text in {"it/model.onnx": b"weights", "it/tokens.txt": b"a b"}.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text))
    async with yard.worker("voice-hand") as worker, yard.client() as client:
        await yard.model(
            "voice",
            download_files=[{"filename": "voice.tar.gz", "uri": packed.as_uri()}],
            parameters={"model": "it/model.onnx"},
        )
        await client.chat.completions.create(model="voice", messages=HELLO)
        there = [path.split("/", 3)[3] for path in worker.files.left() if path.startswith("models/voice/")]
        assert there == ["it/model.onnx", "it/tokens.txt"]


async def test_who_leaves_stops_the_generation(yard: ServingFleet) -> None:
    """With all slots taken by streams nobody reads any more, the next request would wait for ever."""
    hanging: Any = [{"role": "user", "content": "[[hang_after=2]] a b c"}]
    async with yard.worker("left-hand"), yard.client() as client:
        await yard.model("leaver", parallel=2)
        for _ in range(5):
            stream = await client.chat.completions.create(model="leaver", messages=hanging, stream=True)
            pieces = aiter(stream)
            for _ in range(2):
                await anext(pieces)
            await stream.close()
        assert (await client.chat.completions.create(model="leaver", messages=HELLO)).choices


async def test_one_that_dies_is_replaced_an_edit_and_a_drain_move_it_and_it_is_unloaded(yard: ServingFleet) -> None:
    async with yard.worker("third-hand") as worker, yard.client() as client:
        await yard.model("mortal")
        await yard.api("POST", "/api/nodes/scheduling", {"model_name": "mortal", "min_replicas": 1})
        assert (await client.chat.completions.create(model="mortal", messages=HELLO)).choices
        first = (await yard.rows("mortal"))[0]
        worker.processes.kill("mortal#0")

        async def replaced() -> bool:
            rows = await yard.rows("mortal")
            return [row["state"] for row in rows] == ["loaded"] and rows[0]["process_id"] != first["process_id"]

        await until(replaced, "another process")
        assert (await client.chat.completions.create(model="mortal", messages=HELLO)).choices
        assert len(worker.asked("backend.install")) == 2

        await yard.api("PATCH", "/api/models/mortal", {"changes": {"context_size": 2048}})
        await until(lambda: list(worker.backends.processes) == ["mortal#1"], "the new revision, and no other")
        assert (await client.chat.completions.create(model="mortal", messages=HELLO)).choices

        async with yard.worker("spare-hand") as spare:
            await yard.api("POST", "/api/nodes/third-hand/drain")
            await until(
                lambda: not worker.backends.processes and bool(spare.backends.processes), "move to another node"
            )
            await yard.api("POST", "/api/nodes/third-hand/resume")
            assert (await client.chat.completions.create(model="mortal", messages=HELLO)).choices
            await unload(yard, spare, client)


async def unload(yard: ServingFleet, worker: ServingWorker, client: openai.AsyncOpenAI) -> None:
    await yard.api("DELETE", "/api/nodes/scheduling/mortal")
    words: Any = [{"role": "user", "content": "[[piece_delay_s=0.5]] " + "word " * 7}]
    stream = await client.chat.completions.create(model="mortal", messages=words, stream=True)
    await yard.api("POST", "/api/models/mortal/unload")
    assert len([chunk async for chunk in stream if chunk.choices[0].delta.content]) == 8, "busy is never stopped"
    await until(lambda: not worker.backends.processes, "end of the process")
    ended = worker.asked("model.stop")[-1]
    assert (ended["model_name"], ended["process_key"]) == ("mortal", "mortal#0")
    assert ended["expected_address"].startswith("127.0.0.1:"), "the worker compares with its own address"

    async def none_left() -> bool:
        return await yard.rows("mortal") == []

    await until(none_left, "no row")


async def test_a_load_that_fails_says_why_and_leaves_nothing(yard: ServingFleet) -> None:
    async with yard.worker("sore-hand") as worker, yard.client() as client:
        await yard.model("broken", options=["load_fails:no such tensor"])
        with pytest.raises(openai.APIStatusError, match=r"no such tensor(.|\n)*its last lines(.|\n)*Listening on"):
            await client.chat.completions.create(model="broken", messages=HELLO)
        await until(lambda: not worker.backends.processes, "end of the process")
        await yard.model("liar", options=["identity:another"])
        with pytest.raises(openai.APIStatusError, match="holds another model"):
            await client.chat.completions.create(model="liar", messages=HELLO)
        await yard.model("loud", backend="http-engine")
        with pytest.raises(openai.APIStatusError, match="LocalAI worker runs gRPC only"):
            await client.chat.completions.create(model="loud", messages=HELLO)


@pytest.mark.long
async def test_controllers_that_come_back_find_what_runs_and_begin_anew_what_was_loading(yard: ServingFleet) -> None:
    async with yard.worker("last-hand") as worker, yard.client() as client, yard.client(yard.two) as other:
        await yard.model("stayer")
        assert (await client.chat.completions.create(model="stayer", messages=HELLO)).choices
        await yard.model("slow", options=["load_delay_s:2"])
        waiting = asyncio.create_task(client.chat.completions.create(model="slow", messages=HELLO))
        await until(lambda: "slow#0" in worker.backends.processes, "process that loads")
        for member in yard.cluster.members:  # whoever leads, too
            assert member.controller is not None
            member.controller.kill()
        for member in yard.cluster.members:
            yard.cluster.start_controller(member)
            await asyncio.to_thread(yard.cluster.wait_ready, member)
        for each in (client, other):

            async def answers(each: openai.AsyncOpenAI = each) -> bool:
                try:
                    return bool((await each.chat.completions.create(model="stayer", messages=HELLO)).choices)
                except openai.APIStatusError as error:
                    raise AssertionError(str(error)) from error

            await until(answers, "an answer")
        assert (await waiting).choices, "who waited through all of it"
        assert [each["model_id"] for each in worker.asked("backend.install")] == ["stayer", "slow", "slow"]
        assert sorted(worker.backends.processes) == ["slow#0", "stayer#0"]
