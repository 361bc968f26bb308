"""A Corral worker, in a process of its own, under a LocalAI controller: told as LocalAI's are, it does as they do."""

from __future__ import annotations

import asyncio
import json
from datetime import datetime
from pathlib import Path

import pytest

from tests.compat.corral_worker import CorralWorker, is_ready, publish, run_worker
from tests.support.fleet import http
from tests.support.nats import Cable, NatsServer, nats_server
from tests.support.waiting import until

__all__ = ["nats_server"]


async def test_the_whole_life_of_a_backend(nats_server: NatsServer, tmp_path: Path) -> None:
    async with run_worker(nats_server, tmp_path) as worker:
        controller = worker.controller
        publish(controller, "1")

        told = controller.registrations[0]
        assert (told["name"], told["address"]) == ("w1", f"127.0.0.1:{worker.base}")
        assert told["http_address"] == f"127.0.0.1:{worker.base - 1}"
        assert told["token"] == controller.token
        assert told["labels"] == {"tier": "fast", "room": "barn", "node.replica-slots": "1"}
        assert not (await worker.ask("backend.list", b"null"))["backends"]

        # An admin install: no model, so the process goes by the backend's name.
        admin = await worker.install("mock", op_id="op-1")
        assert admin["success"], admin
        host, port = admin["address"].rsplit(":", 1)
        assert host == "127.0.0.1"
        assert worker.base <= int(port) <= worker.base + 400
        assert await controller.health(admin["address"], controller.token) == "OK"
        assert await controller.health(admin["address"], "another") == "UNAUTHENTICATED"
        assert await controller.health(admin["address"], "") == "UNAUTHENTICATED"
        assert await controller.running("w1") == [("mock", 0)]
        assert controller.progress
        for event in controller.progress:
            assert (event["op_id"], event["node_id"]) == ("op-1", controller.node_id("w1"))
            assert event["backend"] == "mock"
            assert 0 <= event["percentage"] <= 100
            assert event["phase"] in ("resolving", "downloading", "verifying", "extracting", "starting")
        percentages = [event["percentage"] for event in controller.progress]
        assert percentages == sorted(percentages), "it shows the latest, so that must not go back"
        assert all(event["percentage"] <= 95 for event in controller.progress if event["phase"] != "starting")
        assert percentages[-1] < 100, "whether it runs is not known before the answer"

        rows = await worker.rows()
        assert set(rows) == {"mock", "mock-grpc"}
        build = rows["mock-grpc"]
        assert (build["is_system"], build["is_meta"], rows["mock"]["is_meta"]) == (False, False, True)
        assert build["version"] == "1"
        assert build["gallery_url"] == f"{controller.url}/index.yaml"
        assert datetime.fromisoformat(build["installed_at"]).tzinfo is not None

        # Models: each slot its own process, and one that runs is the answer without a look at the gallery.
        first = await worker.install("mock", model_id="m#1")
        second = await worker.install("mock", model_id="m#1", replica_index=1)
        assert len({admin["address"], first["address"], second["address"]}) == 3
        assert await controller.running("w1") == [("m#1", 0), ("m#1", 1), ("mock", 0)]
        reads, controller.gallery = controller.gallery_reads, []
        assert await worker.install("mock", model_id="m#1") == first
        assert controller.gallery_reads == reads
        assert await controller.load_and_predict(first["address"], "m#1", "hello") == "mock 1: hello"

        # What it wrote, for whoever shows the shared token.
        logs = worker.http_url + "/v1/backend-logs"
        shown = await asyncio.to_thread(http, "GET", logs, key=controller.token)
        assert (shown.status, shown.json()) == (200, ["m#1", "mock"])

        async def written() -> bool:
            lines = await asyncio.to_thread(http, "GET", logs + "/m%231%230", key=controller.token)
            return any("loading m#1" in line["text"] for line in lines.json())

        await until(written, "line of the process")  # it is read from a file, a moment after it was written
        assert (await asyncio.to_thread(http, "GET", logs)).status == 401
        assert (await asyncio.to_thread(http, "GET", logs, key="another")).status == 401

        # Free, stop exactly, stop what is not there.
        assert await worker.ask("model.unload", {"model_name": "m#1", "address": first["address"]}) == {"success": True}
        assert await controller.health(first["address"], controller.token) == "OK"
        wrong = {"model_name": "m#1", "process_key": "m#1#0", "expected_address": second["address"]}
        refused = await worker.ask("model.stop", wrong)
        assert (refused["matched"], refused["terminated"]) == (True, False)
        assert "address mismatch" in refused["error"]
        stopped = await worker.ask("model.stop", wrong | {"expected_address": first["address"]})
        assert (stopped["matched"], stopped["freed"], stopped["terminated"]) == (True, True, True)
        gone = await worker.ask("model.stop", wrong)
        assert (gone["matched"], gone["terminated"]) == (False, True)
        assert await controller.running("w1") == [("m#1", 1), ("mock", 0)]

        # Upgrade: users stopped and named, fetched again, nothing started.
        publish(controller, "2")
        order = {"backend": "mock", "backend_galleries": controller.galleries, "op_id": "op-2"}
        upgraded = await worker.ask("backend.upgrade", order)
        assert sorted(upgraded.pop("stopped_process_keys")) == ["m#1#1", "mock#0"]
        assert upgraded == {"success": True, "reports_stopped_processes": True}
        assert any(event["op_id"] == "op-2" for event in controller.progress)
        assert (await worker.rows())["mock-grpc"]["version"] == "2"
        assert await controller.running("w1") == []
        again = await worker.install("mock", model_id="m#1")
        assert await controller.load_and_predict(again["address"], "m#1", "hello") == "mock 2: hello"

        # Stop by model, by exact key, by backend, or everything; but nothing for what cannot be read.
        for model in ("m", "n"):
            await worker.install("mock", model_id=model)
        await controller.tell("w1", "backend.stop", b"{nonsense")
        await controller.tell("w1", "backend.stop", b'{"backend":"m#1#7"}')
        await controller.tell("w1", "backend.stop", b'{"backend":"m"}')
        await controller.until_running("w1", [("m#1", 0), ("n", 0)])
        await controller.tell("w1", "backend.stop", b'{"backend":"m#1#0"}')
        await controller.until_running("w1", [("n", 0)])
        await controller.tell("w1", "backend.stop", b'{"backend":"mock-grpc","force":true}')
        await controller.until_running("w1", [])
        await worker.install("mock")
        await controller.tell("w1", "backend.stop", b"null")
        await controller.until_running("w1", [])

        # Delete stops and removes; a second time there is nothing.
        await worker.install("mock", model_id="m")
        deleted = await worker.ask("backend.delete", {"backend": "mock"})
        expected = {"success": True, "stopped_process_keys": ["m#0"], "reports_stopped_processes": True}
        assert deleted == expected
        assert await worker.rows() == {}
        assert (await worker.ask("backend.delete", {"backend": "mock"}))["success"] is False

        # The model's files.
        (tmp_path / "models").mkdir(exist_ok=True)
        for name in ("m.gguf", "m.gguf.sha256", "other.gguf"):
            (tmp_path / "models" / name).write_text("x")
        assert await worker.ask("model.delete", {"model_name": "m.gguf"}) == {"success": True}
        assert [path.name for path in (tmp_path / "models").iterdir()] == ["other.gguf"]
        assert (await worker.ask("model.delete", {"model_name": "../worker.log"}))["success"] is False
        assert (tmp_path / "worker.log").exists()

        assert controller.strangers == [], "nothing a LocalAI controller would not know"
        await controller.tell("w1", "stop", b"null")
        assert await asyncio.to_thread(worker.process.wait, 40) == 0
        assert [call for call in controller.calls if call in ("drain", "deregister")] == ["drain", "deregister"]
        assert controller.nodes["w1"]["status"] == "offline"


async def test_while_it_waits_for_approval_it_says_where_to_approve_it(nats_server: NatsServer, tmp_path: Path) -> None:
    async with run_worker(nats_server, tmp_path, auto_approve=False) as worker:
        await until(lambda: "waiting for approval" in worker.process.output(), "its first words", 60)
        assert "approve w1 on the Nodes page of LocalAI" in worker.process.output()
        assert "corral nodes approve" not in worker.process.output(), "there is no Corral controller"
        worker.controller.auto_approve = True
        await until(lambda: is_ready(worker), "ready worker", 60)


async def test_refusals_say_why(nats_server: NatsServer, tmp_path: Path) -> None:
    async with run_worker(nats_server, tmp_path) as worker:
        publish(worker.controller, "1")
        spoken = await worker.install("spoken")
        assert spoken["success"] is False
        assert "spoken speaks OpenAI's HTTP, and a LocalAI controller calls backends by gRPC only" in spoken["error"]
        unknown = await worker.install("never-heard-of")
        assert unknown["success"] is False
        assert "never-heard-of" in unknown["error"]
        bad = await worker.ask("backend.install", {"backend": "mock", "backend_galleries": "[{"})
        assert bad["success"] is False
        assert "galler" in bad["error"]
        for subject in ("backend.install", "backend.upgrade", "backend.delete", "model.unload", "model.stop"):
            reply = await worker.ask(subject, b"{nonsense")
            assert reply["error"].startswith("invalid request: "), (subject, reply)
        assert (await worker.ask("model.delete", b"{nonsense"))["error"].startswith("invalid request")
        assert await worker.ask("models.running", b"") == {"models": []}
        assert await worker.rows() == {}


async def test_a_forced_install_of_an_older_controller_fetches_again_and_starts_afresh(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    async with run_worker(nats_server, tmp_path) as worker:
        publish(worker.controller, "1")
        first = await worker.install("mock", model_id="m")
        other = await worker.install("mock", model_id="n")
        before = (await worker.rows())["mock-grpc"]["installed_at"]
        forced = await worker.install("mock", model_id="m", force=True)
        assert forced["success"], forced
        assert (await worker.rows())["mock-grpc"]["installed_at"] > before
        assert await worker.controller.running("w1") == [("m", 0)], "all replicas of the backend were stopped"
        assert await worker.controller.health(forced["address"], worker.controller.token) == "OK"
        for address in {first["address"], other["address"]} - {forced["address"]}:
            assert await worker.controller.health(address, worker.controller.token) == "UNAVAILABLE"


@pytest.mark.timeout(120)
async def test_heartbeats_only_while_the_bus_is_there(nats_server: NatsServer, tmp_path: Path) -> None:
    async with (
        Cable(int(nats_server.url.rsplit(":", 1)[1])) as cable,
        run_worker(nats_server, tmp_path, bus_url=cable.url) as worker,
    ):
        publish(worker.controller, "1")
        running = await worker.install("mock", model_id="m")
        await cable.cut()
        await until(lambda: _status(worker, 503), "not ready")
        beats = worker.controller.beats
        count = len(beats)
        answer = await asyncio.to_thread(http, "GET", worker.http_url + "/readyz")
        assert answer.body.startswith(b"not ready: ")
        # The process is the controller's to call, bus or no bus; and in the time that takes no beat comes.
        for _ in range(5):
            assert await worker.controller.health(running["address"], worker.controller.token) == "OK"
            await asyncio.to_thread(http, "GET", worker.http_url + "/healthz")
        assert len(beats) - count <= 1, "one may have been on its way"
        await cable.heal()
        await until(lambda: _status(worker, 200), "ready again")
        await until(lambda: len(beats) > count + 1, "heartbeats again")
        assert await worker.install("mock", model_id="m") == running


async def _status(worker: CorralWorker, status: int) -> bool:
    return (await asyncio.to_thread(http, "GET", worker.http_url + "/readyz")).status == status


async def test_the_settings_of_localai_stand_for_ours(nats_server: NatsServer, tmp_path: Path) -> None:
    async with run_worker(nats_server, tmp_path) as worker:
        publish(worker.controller, "1")
        assert (await worker.install("mock"))["success"]
        assert (tmp_path / "backends").is_dir()
        written = [path for path in (tmp_path / "backends").rglob("metadata.json")]
        names = {json.loads(path.read_bytes())["name"] for path in written}
        assert names == {"mock", "mock-grpc"}
