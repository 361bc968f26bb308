"""Replicas by orders over a real bus: started with what is on the machine, on both protocols, and stopped."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.support.blob_source import blob_source
from tests.support.nats import NatsServer, nats_server
from tests.support.ordering import OrderedFleet, digest, mock_copy, ordered_worker, tiny_order
from tests.support.waiting import until

__all__ = ["nats_server"]


async def start(fleet: OrderedFleet, process_id: str, **order: Any) -> dict[str, Any]:
    body = {"process_id": process_id, "model": "m", "replica": 0, "backend": "tiny", **order}
    body |= {"op_id": f"op-{process_id}", "attempt": 1, "accept": True}
    accepted = await fleet.ask("replica.start", body)
    assert accepted == {"success": True, "accepted": True, "process_id": process_id}
    return await fleet.result("replica.start", f"op-{process_id}")


async def stop(fleet: OrderedFleet, process_id: str, *, force: bool = False) -> dict[str, Any]:
    body = {"process_id": process_id, "op_id": f"stop-{process_id}", "attempt": 1, "accept": True, "force": force}
    assert (await fleet.ask("replica.stop", body))["accepted"]
    return await fleet.result("replica.stop", f"stop-{process_id}")


async def test_an_openai_replica_is_started_reached_and_stopped(nats_server: NatsServer, tmp_path: Path) -> None:
    async with ordered_worker(nats_server, tmp_path) as fleet:
        assert (await fleet.order("install", "op-1", tiny_order("a")))["success"]
        result = await start(fleet, "p1", digest=digest("a"), protocol="openai", definition={"parallel": 3})
        assert result == {"op_id": "op-p1", "attempt": 1, "success": True, "process_id": "p1"}
        await until(lambda: [row["slots"] for row in fleet.last_beat("processes").get("processes", [])] == [3])
        token = fleet.controller.ingress_token(scope="replicas")
        assert (await fleet.worker.get("/replicas/p1/v1/models", token))[0] == 200
        repeated = await fleet.ask("replica.start", {"process_id": "p1", "model": "m", "replica": 0, "backend": "tiny"})
        assert repeated == {"success": True, "process_id": "p1"}
        stopped = await stop(fleet, "p1")
        assert (stopped["success"], stopped["process_id"]) == (True, "p1")
        assert (await fleet.worker.get("/replicas/p1/v1/models", token))[0] == 410
        again = await fleet.ask("replica.stop", {"process_id": "p1"})
        assert again == {"success": True, "process_id": "p1"}


async def test_what_is_under_way_ends_before_the_process_does(nats_server: NatsServer, tmp_path: Path) -> None:
    async with ordered_worker(nats_server, tmp_path, drain_timeout="60s") as fleet:
        assert (await fleet.order("install", "op-1", tiny_order("a")))["success"]
        token = fleet.controller.ingress_token(scope="replicas")

        async def take(process_id: str, path: str) -> int:
            return (await fleet.worker.get(f"/replicas/{process_id}{path}", token))[0]

        async def takes_no_more() -> bool:
            return await take("p1", "/") == 410

        async with asyncio.TaskGroup() as tasks:
            assert (await start(fleet, "p1"))["success"]
            late = tasks.create_task(take("p1", f"/when{tmp_path}/one"))
            await until((tmp_path / "one.asked").exists)
            stopping = tasks.create_task(stop(fleet, "p1"))
            await until(takes_no_more, "end of new requests")
            assert not late.done()
            (tmp_path / "one").touch()
        assert late.result() == 200
        assert stopping.result()["success"]

        async with asyncio.TaskGroup() as tasks:
            assert (await start(fleet, "p2"))["success"]
            cut = tasks.create_task(take("p2", f"/when{tmp_path}/two"))
            await until((tmp_path / "two.asked").exists)
            assert (await stop(fleet, "p2", force=True))["success"]
        assert cut.result() == 502


async def test_a_grpc_replica_has_its_model_loaded(nats_server: NatsServer, tmp_path: Path) -> None:
    source = mock_copy(tmp_path / "mock")
    async with ordered_worker(nats_server, tmp_path) as fleet:
        order = {"backend": "mock", "variant": "mock", "sources": [{"kind": "directory", "uri": str(source)}]}
        assert (await fleet.order("install", "op-1", order))["success"]
        result = await start(fleet, "p1", backend="mock", definition={"context_size": 512})
        assert result["success"], result
        refused = await start(
            fleet,
            "p2",
            backend="mock",
            replica=1,
            definition={"options": {"Options": ["load_fails:out of luck"]}},
        )
        assert refused["success"] is False
        assert "out of luck" in refused["error"]
        await until(lambda: [row["process_id"] for row in fleet.last_beat("processes")["processes"]] == ["p1"])


async def test_what_is_missing_is_named(nats_server: NatsServer, tmp_path: Path) -> None:
    async with ordered_worker(nats_server, tmp_path) as fleet:
        absent = await start(fleet, "p1")
        assert (absent["success"], absent["error"]) == (False, "tiny is not installed on this machine")
        assert "final" not in absent  # it may come yet
        assert (await fleet.order("install", "op-1", tiny_order("a")))["success"]
        other = await start(fleet, "p2", digest=digest("b"))
        assert other["error"] == f"tiny {digest('b')} is not installed on this machine"
        files = await start(fleet, "p3", files=[{"path": "weights.gguf"}])
        assert files["success"] is False
        assert "weights.gguf is not on this machine" in files["error"]
        for path in ("../../secret", "/etc/passwd"):
            outside = await start(fleet, f"p-{len(path)}", files=[{"path": path}])
            assert (outside["success"], outside["final"]) == (False, True)
        hostile = await fleet.ask("replica.start", {"process_id": "../../x", "model": "m", "backend": "tiny"})
        assert (hostile["success"], "../../x" in hostile["error"]) == (False, True)
        spoken = await start(fleet, "p4", protocol="grpc")
        assert (spoken["success"], spoken["final"]) == (False, True)
        (tmp_path / "w" / "models" / "weights.gguf").write_bytes(b"1234")
        short = await start(fleet, "p5", files=[{"path": "weights.gguf", "size_bytes": 9}])
        assert "has 4 bytes here, not 9" in short["error"]
        there = await start(fleet, "p6", files=[{"path": "weights.gguf", "size_bytes": 4}])
        assert there["success"], there


async def test_files_are_fetched_before_the_process_starts(nats_server: NatsServer, tmp_path: Path) -> None:
    async with ordered_worker(nats_server, tmp_path) as fleet, blob_source(tmp_path) as source:
        assert (await fleet.order("install", "op-1", tiny_order("a")))["success"]
        file = source.add("m/0123456789ab/weights.gguf", b"w" * 3_000_000)
        files = [{"path": file.path, "digest": file.digest, "size_bytes": file.size_bytes}]
        lost = await start(fleet, "p1", files=files, sources=list(source.urls), source_token="wrong")
        assert (lost["success"], "final" in lost) == (False, False)
        assert "m/0123456789ab/weights.gguf" in lost["error"]
        there = await start(fleet, "p2", files=files, sources=list(source.urls), source_token=source.token)
        assert there["success"], there
        assert (tmp_path / "w/models/m/0123456789ab/weights.gguf").stat().st_size == 3_000_000
        told = fleet.told("replica.start.op-p2.progress")
        assert told[-1] | {"seq": 0, "rate": 0} == {
            "op_id": "op-p2",
            "attempt": 1,
            "seq": 0,
            "process_id": "p2",
            "phase": "starting",
            "file": "m/0123456789ab/weights.gguf",
            "file_index": 1,
            "total_files": 1,
            "current_bytes": 3_000_000,
            "total_bytes": 3_000_000,
            "rate": 0,
            "sources": {"controller": 3_000_000},
        }
        assert (await stop(fleet, "p2"))["success"]
        assert (await fleet.ask("model.delete", {"model_name": "m"}))["success"]
        assert list((tmp_path / "w/models/.blobs/sha256").iterdir()) == []


async def test_a_process_that_crashes_tells_its_last_lines(nats_server: NatsServer, tmp_path: Path) -> None:
    async with ordered_worker(nats_server, tmp_path) as fleet:
        assert (await fleet.order("install", "op-1", tiny_order("a", "lines=30 crash=3")))["success"]
        result = await start(fleet, "p1")
        assert result["success"] is False
        assert "tiny line 30" in result["error"]
        assert "tiny line 11" in result["error"]
        assert "tiny line 10\n" not in result["error"]


async def test_backends_are_stopped_when_the_worker_leaves(nats_server: NatsServer, tmp_path: Path) -> None:
    async with ordered_worker(nats_server, tmp_path) as fleet:
        assert (await fleet.order("install", "op-1", tiny_order("a")))["success"]
        assert (await start(fleet, "p1"))["success"]
        await fleet.worker.leave()
        exits = list((tmp_path / "w" / "processes").glob("p1/exit.json"))
        assert len(exits) == 1
