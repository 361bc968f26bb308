"""Orders about model files over a real bus: staged and reported, listed, cancelled, and removed when not needed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.support.blob_server import BlobServer
from tests.support.blob_source import blob_source
from tests.support.nats import NatsServer, nats_server
from tests.support.ordering import OrderedFleet, ordered_worker
from tests.support.waiting import until

__all__ = ["nats_server"]

WEIGHTS = os.urandom(3_600_000)


def described(*files: Any) -> list[dict[str, Any]]:
    return [{"path": file.path, "digest": file.digest, "size_bytes": file.size_bytes} for file in files]


async def stage(fleet: OrderedFleet, op: str, source: Any, *files: Any, attempt: int = 1) -> dict[str, Any]:
    order = {"op_id": op, "attempt": attempt, "model": "m", "files": described(*files), "accept": True}
    order |= {"sources": list(source.urls), "source_token": source.token}
    assert await fleet.ask("model.stage", order) == {"success": True, "accepted": True}
    return await fleet.result("model.stage", op, attempt)


async def test_files_are_staged_listed_and_removed(nats_server: NatsServer, tmp_path: Path) -> None:
    async with blob_source(tmp_path) as source, ordered_worker(nats_server, tmp_path) as fleet:
        weights, words = source.add("m/abc/w.gguf", WEIGHTS), source.add("m/abc/t.json", b"{}")
        models = tmp_path / "w" / "models"
        before = await fleet.ask("models.files", {"files": described(weights)})
        assert (before["have_bytes"], (models / ".blobs").exists()) == ([0], False), "asking makes no folder"
        assert await stage(fleet, "op-1", source, weights, words) == {
            "op_id": "op-1",
            "attempt": 1,
            "success": True,
            "model": "m",
        }
        assert (models / "m/abc/w.gguf").read_bytes() == WEIGHTS
        last = fleet.told("model.stage.op-1.progress")[-1]
        assert (last["backend"], last["total_bytes"], last["current_bytes"]) == ("m", 3_600_002, 3_600_002)
        repeated = await stage(fleet, "op-1", source, weights, words)
        assert (repeated["success"], source.listener.sent_bytes) == (True, 3_600_002), (
            "the same order, its outcome again"
        )
        listed = await fleet.ask("models.files", {"files": described(weights, words)})
        assert (listed["have_bytes"], listed["cache_bytes"]) == ([3_600_000, 2], 3_600_002)
        assert listed["free_bytes"] > 0

        nothing = await fleet.ask("models.collect", {"keep": ["m/abc/"], "dry_run": False})
        assert nothing["removed"] == []
        record = next((models / ".blobs" / "sets").glob("*.json"))
        fresh = await fleet.ask("models.collect", {"keep": [], "dry_run": False})
        assert fresh["removed"] == [], "what was used a moment ago may be of a model that is newer than the list"
        os.utime(record, (1.0, 1.0))
        freed = {"name": "m/abc", "files": 2, "size_bytes": 3_600_002, "why": "no model needs these files"}
        dry = await fleet.ask("models.collect", {"keep": ["n/"], "dry_run": True})
        assert (dry["removed"], (models / "m/abc/w.gguf").exists()) == ([freed], True)
        real = await fleet.ask("models.collect", {"keep": ["n/"], "dry_run": False})
        assert real["removed"] == [freed]
        assert (os.listdir(models / ".blobs" / "sha256"), (models / "m").exists()) == ([], False)


async def test_a_cancelled_transfer_is_kept_for_the_next(nats_server: NatsServer, tmp_path: Path) -> None:
    async with blob_source(tmp_path) as source, BlobServer() as slow, ordered_worker(nats_server, tmp_path) as fleet:
        weights = source.add("m/abc/w.gguf", WEIGHTS)
        slow.put(f"/blobs/{weights.digest}", WEIGHTS)
        slow.hold_after = 2_500_000
        order = {"op_id": "op-1", "attempt": 1, "model": "m", "files": described(weights), "accept": True}
        assert (await fleet.ask("model.stage", order | {"sources": [slow.url("")]}))["accepted"]

        async def half() -> bool:
            return bool((await fleet.ask("models.files", {"files": described(weights)}))["have_bytes"][0] > 100_000)

        await until(half)
        assert await fleet.ask("model.stage.cancel", {"op_id": "op-1", "model": "other"}) == {
            "success": False,
            "error": "no such order is running",
        }
        assert (await fleet.ask("model.stage.cancel", {"op_id": "op-1", "model": "m"}))["success"]
        ended = await fleet.result("model.stage", "op-1")
        assert (ended["success"], ended["cancelled"]) == (False, True)
        slow.pause.set()
        assert (await stage(fleet, "op-2", source, weights))["success"]
        assert source.listener.sent_bytes < len(WEIGHTS), "the rest"


async def test_an_order_that_cannot_be_carried_out_says_why(nats_server: NatsServer, tmp_path: Path) -> None:
    async with blob_source(tmp_path) as source, ordered_worker(nats_server, tmp_path) as fleet:
        weights = source.add("../outside.gguf", b"abc")
        refused = await stage(fleet, "op-1", source, weights)
        assert (refused["success"], refused["final"]) == (False, True)
        assert "does not stay inside the models folder" in refused["error"]
        listed = await fleet.ask("models.files", {"files": described(weights)})
        assert "does not stay inside" in listed["error"]
