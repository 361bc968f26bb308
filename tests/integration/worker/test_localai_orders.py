"""Orders of a LocalAI controller: it names backend and galleries, calls processes itself, and knows no `accept`."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import yaml

from corral.worker.supervisor.grpc_calls import ask_health
from tests.support.nats import NatsServer, nats_server
from tests.support.ordering import mock_copy, ordered_worker
from tests.support.processes import free_port
from tests.support.waiting import until

__all__ = ["nats_server"]


def gallery(folder: Path, *entries: dict[str, object]) -> str:
    """A gallery file where the worker may read it, as orders name it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "index.yaml").write_text(yaml.safe_dump(list(entries)))
    return json.dumps([{"name": "theirs", "url": f"file://{folder}/index.yaml"}])


async def test_installed_from_its_gallery_started_where_it_can_call_it(nats_server: NatsServer, tmp_path: Path) -> None:
    source = mock_copy(tmp_path / "mock")
    galleries = gallery(
        tmp_path / "galleries",
        {"name": "engine", "alias": "engine", "capabilities": {"default": "cpu-engine"}},
        {"name": "cpu-engine", "alias": "engine", "uri": str(source), "version": "7"},
    )
    base = free_port()
    async with ordered_worker(
        nats_server,
        tmp_path,
        localai=True,
        gallery_folder=str(tmp_path / "galleries"),
        serve_address=f"0.0.0.0:{base}",
        advertise_address=f"127.0.0.1:{base}",
    ) as fleet:
        order = {"backend": "engine", "model_id": "m", "backend_galleries": galleries, "op_id": "op-1"}
        reply = await fleet.ask("backend.install", order)
        assert reply["success"], reply
        host, port = reply["address"].split(":")
        assert host == "127.0.0.1"
        assert base <= int(port) <= 65535
        assert await ask_health(reply["address"], fleet.controller.shared_token, 5.0) is None
        assert await ask_health(reply["address"], "another", 5.0) is not None
        rows = await fleet.backends()
        assert set(rows) == {"engine", "cpu-engine"}
        assert (rows["engine"]["is_meta"], rows["cpu-engine"]["version"]) == (True, "7")
        events = fleet.told("backend.install.op-1.progress")
        assert events
        assert all(event["op_id"] == "op-1" for event in events)
        assert await fleet.ask("backend.install", order) == reply
        stopped = await fleet.ask(
            "model.stop", {"model_name": "m", "process_key": "m#0", "expected_address": reply["address"]}
        )
        assert (stopped["matched"], stopped["terminated"]) == (True, True)
        deleted = await fleet.ask("backend.delete", {"backend": "engine"})
        assert deleted == {"success": True, "reports_stopped_processes": True}
        assert await fleet.backends() == {}
        await until(lambda: fleet.controller.named("w1").beats)
        assert fleet.told("heartbeat") == []  # it would not know what that is


async def test_its_names_mean_its_own_builds_and_openai_ones_are_refused(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    source = mock_copy(tmp_path / "mock")
    manifest = {"protocol": "openai", "command": ["./run.sh"]}
    galleries = gallery(tmp_path / "galleries", {"name": "spoken", "uri": str(source), "corral": manifest})
    async with ordered_worker(nats_server, tmp_path, localai=True, gallery_folder=str(tmp_path / "galleries")) as fleet:
        ours = await fleet.ask("backend.install", {"backend": "llama-cpp", "backend_galleries": galleries})
        assert ours["success"] is False
        assert "llama-cpp" in ours["error"]
        spoken = await fleet.ask("backend.install", {"backend": "spoken", "backend_galleries": galleries})
        assert spoken["success"] is False
        assert "OpenAI" in spoken["error"]
        assert await fleet.backends() == {}


async def test_a_dead_process_is_started_again_when_it_is_asked_for(nats_server: NatsServer, tmp_path: Path) -> None:
    source = mock_copy(tmp_path / "mock")
    async with ordered_worker(nats_server, tmp_path, localai=True) as fleet:
        order = {"backend": "mock", "uri": str(source), "name": "mock", "model_id": "m"}
        first = await fleet.ask("backend.install", order)
        assert first["success"], first
        (state,) = (tmp_path / "w" / "processes").glob("*/state.json")
        os.kill(json.loads(state.read_bytes())["pid"], signal.SIGKILL)

        async def nothing_runs() -> bool:
            return await fleet.running() == []

        await until(nothing_runs)
        second = await fleet.ask("backend.install", order)
        assert second["success"], second
        assert len(await fleet.running()) == 1
