"""Models on a LocalAI worker whose files travel through an object storage: staged there, used, and objects of requests
deleted; and by HTTP when the storage, or the worker's access to it, fails."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.compat.localai_fleet import ServingFleet, ServingWorker
from tests.compat.localai_objects import LocalAIObjects
from tests.support.object_storage import ObjectStorage, open_object_storage
from tests.support.waiting import until

HELLO: Any = [{"role": "user", "content": "one two three"}]


@pytest.fixture(scope="module")
def storage() -> Iterator[ObjectStorage]:
    with open_object_storage() as storage:
        yield storage


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory, storage: ObjectStorage) -> Iterator[ServingFleet]:
    folder = tmp_path_factory.mktemp("yard")
    settings = {
        "LOCALAI_STORAGE_URL": storage.url,
        "LOCALAI_STORAGE_ACCESS_KEY": "access",
        "LOCALAI_STORAGE_SECRET_KEY": "hush-hush",
    }
    yard = ServingFleet(folder, f"sqlite:///{folder}/corral.db", members=1, **settings)
    try:
        yard.cluster.start()
        yield yard
        assert yard.one.controller is not None
        assert "hush-hush" not in yard.one.controller.output()
    finally:
        yard.cluster.close()


def give_storage(worker: ServingWorker, storage: ObjectStorage) -> LocalAIObjects:
    """Before it connects."""
    objects = LocalAIObjects(worker.files.models, storage)
    worker.backends.files = objects.handlers
    return objects


def requests_of(storage: ObjectStorage) -> list[str]:
    return [key for key in storage.list_keys() if key.startswith("ephemeral/")]


async def add_model(yard: ServingFleet, name: str) -> Path:
    weights = yard.folder / f"{name}.bin"
    weights.write_bytes(name.encode() * 2_000_000)
    source = {"filename": "w/weights one.bin", "uri": weights.as_uri()}
    await yard.model(name, download_files=[source], parameters={"model": "w/weights one.bin"})
    return weights


async def test_files_of_models_and_requests_are_objects(yard: ServingFleet, storage: ObjectStorage) -> None:
    async with (
        yard.worker("store-hand", prepare=lambda worker: give_storage(worker, storage)) as worker,
        yard.client() as client,
    ):
        objects = LocalAIObjects(worker.files.models, storage)
        weights = await add_model(yard, "whale")
        answer = await client.chat.completions.create(model="whale", messages=HELLO)
        assert answer.choices[0].message.content == "mock 1: one two three"
        [key] = [key for key in storage.list_keys() if key.startswith("models/whale/")]
        assert key.endswith("/w/weights one.bin")
        assert await asyncio.to_thread(storage.read, key) == weights.read_bytes()
        assert set(storage.metadata(key)) == {"created-at", "sha256", "corral-fleet"}
        assert objects.cached() == [key]
        assert worker.files.uploads() == [], "nothing by HTTP"

        sound = await client.audio.speech.create(model="whale", voice="ann", input="good morning")
        heard = await client.audio.transcriptions.create(model="whale", file=("x.wav", sound.content))
        assert heard.text == "ann: good morning"
        drawn = await client.images.generate(model="whale", prompt="a horse", size="16x8")
        picture = drawn.data[0].b64_json if drawn.data else ""
        body = {"model": "whale", "image": picture, "exports": ["glb", "colmap"]}
        depth = await yard.api("POST", "/v1/depth", body)
        exported = {each["name"]: base64.b64decode(each["b64_json"]) for each in depth["exports"]}
        assert sorted(exported) == ["colmap/cameras.txt", "colmap/points.txt", "pointcloud.glb"]
        assert worker.files.uploads() == [], "nothing by HTTP"
        await until(lambda: not requests_of(storage), "objects of requests deleted")


async def test_a_worker_that_cannot_reach_the_storage_gets_files_by_http(
    yard: ServingFleet, storage: ObjectStorage
) -> None:
    def refuse(worker: ServingWorker) -> None:
        give_storage(worker, storage).refuses = "operation error S3: GetObject, 403 Forbidden"

    async with yard.worker("poor-hand", prepare=refuse) as worker, yard.client() as client:
        await add_model(yard, "seal")
        answer = await client.chat.completions.create(model="seal", messages=HELLO)
        assert answer.choices[0].message.content == "mock 1: one two three"
        assert [path for path in worker.files.uploads() if path.endswith("weights one.bin")]
        sound = await client.audio.speech.create(model="seal", voice="ann", input="hi")
        heard = await client.audio.transcriptions.create(model="seal", file=("x.wav", sound.content))
        assert heard.text == "ann: hi"
        await until(lambda: not requests_of(storage), "objects of requests deleted")


async def test_a_worker_without_storage_gets_files_by_http(yard: ServingFleet) -> None:
    async with yard.worker("bare-hand") as worker, yard.client() as client:
        await add_model(yard, "orca")
        answer = await client.chat.completions.create(model="orca", messages=HELLO)
        assert answer.choices[0].message.content == "mock 1: one two three"
        assert [path for path in worker.files.uploads() if path.endswith("weights one.bin")]
