"""A model with a file under a LocalAI controller: staged over HTTP or through an object storage, loaded, used.

The controller is scripted (`localai_controller.py`, `localai_stager.py`); worker and backend are real processes.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import nats.errors
import pytest

from tests.compat.corral_worker import CorralWorker, publish, run_worker
from tests.compat.localai_stager import HttpStager, StagingFailed, StorageStager, input_key, model_key
from tests.support.nats import NatsServer, nats_server
from tests.support.object_storage import open_object_storage
from tests.support.waiting import until

__all__ = ["nats_server"]

WEIGHTS = os.urandom(3_000_000)


async def use_model(worker: CorralWorker, stager: HttpStager | StorageStager, temp: str) -> None:
    """What a LocalAI frontend does with a model that has a file, and with requests that have files."""
    controller = worker.controller
    publish(controller, "1")
    path = await stager.ensure(WEIGHTS, model_key("whale", "whale.gguf"))
    assert await asyncio.to_thread(Path(path).read_bytes) == WEIGHTS
    installed = await worker.install("mock", model_id="whale")
    assert installed["success"], installed
    address = installed["address"]
    await controller.load_file(address, "whale", path, str(Path(path).parent))
    assert await controller.predict(address, "hello") == "mock 1: hello"
    sound = await stager.ensure(b"RIFF" + b"x" * 96, input_key("question.wav"))
    assert await controller.transcribe(address, sound) == "100 bytes"
    await controller.speak(address, "good evening", temp)
    assert b"mock says good evening" in await stager.fetch(temp)


async def test_a_model_with_a_file_over_http(nats_server: NatsServer, tmp_path: Path) -> None:
    async with run_worker(nats_server, tmp_path) as worker:
        stager = HttpStager(worker.http_url, worker.controller.token, cut_after=[1_000_000, 500_000])
        status, body = await stager.call("POST", "/v1/files/temp")
        assert status == 200
        temp = body.decode().split('"')[3]
        await use_model(worker, stager, temp)
        weights = [
            (range_, status) for method, range_, status in stager.asked if method == "PUT" and "/3000000" in range_
        ]
        assert [status for _, status in weights][-1] == 200
        assert len(weights) == 3, "two were cut"
        starts = [int(range_.split()[1].split("-")[0]) for range_, _ in weights]
        assert starts == sorted(starts)
        assert starts[0] == 0
        assert starts[1] > 0, "it went on where it stopped"
        # A second time nothing is sent.
        asked = len(stager.asked)
        assert await stager.ensure(WEIGHTS, model_key("whale", "whale.gguf")) == str(
            tmp_path / "models/whale/whale.gguf"
        )
        assert stager.asked[asked:] == [("HEAD", "models/whale/whale.gguf", 200)]
        status, body = await stager.call("GET", "/v1/files-list/models/whale")
        assert (status, body) == (200, b'{"files":["whale.gguf","whale.gguf.sha256"]}')
        # Deleted with its model.
        assert await worker.ask("model.delete", {"model_name": "whale"}) == {"success": True}
        assert not (tmp_path / "models/whale").exists()
        # Without the token, or with another one, nothing.
        for token in ("", "another"):
            stranger = HttpStager(worker.http_url, token)
            for method, path in (("PUT", "/v1/files/x"), ("GET", "/v1/files-list/models/"), ("POST", "/v1/files/temp")):
                assert await stranger.call(method, path) == (401, b"unauthorized\n")
            with pytest.raises(StagingFailed, match="status 401: unauthorized"):
                await stranger.ensure(b"x", "models/x")
        # Without an object storage nobody listens on the subjects of files.
        with pytest.raises(nats.errors.TimeoutError):
            await worker.controller.ask("w1", "files.temp", {}, timeout_s=1)


async def test_a_worker_killed_in_the_middle_of_an_upload(nats_server: NatsServer, tmp_path: Path) -> None:
    async with run_worker(nats_server, tmp_path) as worker:
        stager = HttpStager(worker.http_url, worker.controller.token, cut_after=[2_000_000], attempts=1)
        with pytest.raises(StagingFailed):
            await stager.ensure(WEIGHTS, "models/whale/whale.gguf")
        await until(lambda: list((tmp_path / "models/whale").glob(".corral-upload-*")), "bytes")
        await asyncio.to_thread(worker.process.kill)
    assert not (tmp_path / "models/whale/whale.gguf").exists()
    async with run_worker(nats_server, tmp_path) as worker:
        stager = HttpStager(worker.http_url, worker.controller.token)
        path = await stager.ensure(WEIGHTS, "models/whale/whale.gguf")
        assert await asyncio.to_thread(Path(path).read_bytes) == WEIGHTS
        [(_, range_, _)] = [call for call in stager.asked if call[0] == "PUT"]
        assert int(range_.split()[1].split("-")[0]) > 0, "the bytes of the first worker count"


async def test_a_model_with_a_file_through_an_object_storage(nats_server: NatsServer, tmp_path: Path) -> None:
    with open_object_storage() as storage:
        settings: dict[str, Any] = {
            "LOCALAI_STORAGE_URL": storage.url,
            "LOCALAI_STORAGE_BUCKET": "localai",
            "LOCALAI_STORAGE_REGION": "us-east-1",
            "LOCALAI_STORAGE_ACCESS_KEY": "access",
            "LOCALAI_STORAGE_SECRET_KEY": "hush-hush",
        }
        async with run_worker(nats_server, tmp_path, **settings) as worker:
            stager = StorageStager(worker.controller, storage, "w1")
            temp = await stager.temp()
            assert Path(temp).parent == tmp_path / "cache/staging-tmp"
            assert Path(temp).name.startswith("localai-staging-")
            await use_model(worker, stager, temp)
            assert "models/whale/whale.gguf" in storage.list_keys()
            assert not [key for key in storage.list_keys() if key.startswith("ephemeral/fetch")]
            whale = tmp_path / "cache/models/whale/whale.gguf"
            assert whale.read_bytes() == WEIGHTS
            # Upstream would never fetch a changed file again.
            await asyncio.to_thread(storage.put, "models/whale/whale.gguf", b"better weights")
            assert await worker.ask("files.ensure", {"key": "models/whale/whale.gguf"}) == {"local_path": str(whale)}
            assert whale.read_bytes() == b"better weights"
            listed = await worker.ask("files.listdir", {"key_prefix": "ephemeral/inputs"})
            assert [name.rpartition("/")[2] for name in listed["files"]] == ["question.wav"]
            outside = {"local_path": "/etc/hostname", "key": "ephemeral/stolen"}
            assert (await worker.ask("files.stage", outside))["error"] == "path outside allowed directories"
            assert "invalid key prefix" in (await worker.ask("files.listdir", {"key_prefix": "../../"}))["error"]
            assert "outside allowed directory" in (await worker.ask("files.ensure", {"key": "../x"}))["error"]
            none = await worker.ask("files.ensure", {"key": "models/none"})
            assert "models/none is not in the object storage" in none["error"]
            assert await worker.ask("model.delete", {"model_name": "whale"}) == {"success": True}
            assert not whale.exists()
            assert "hush-hush" not in worker.process.output()
