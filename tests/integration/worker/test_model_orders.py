"""Orders about models, as the contract has them, over a real bus."""

from __future__ import annotations

from pathlib import Path

from tests.support.nats import NatsServer, nats_server
from tests.support.ordering import mock_copy, ordered_worker
from tests.support.supervising import listens
from tests.support.waiting import until

__all__ = ["nats_server"]


async def test_unload_and_exact_stop(nats_server: NatsServer, tmp_path: Path) -> None:
    source = mock_copy(tmp_path / "mock")
    async with ordered_worker(nats_server, tmp_path) as fleet:
        order = {"backend": "mock", "uri": str(source), "name": "mock", "model_id": "m"}
        address = (await fleet.ask("backend.install", order))["address"]
        assert await fleet.ask("model.unload", {"model_name": "m"}) == {"success": True}
        assert listens(int(address.split(":")[1]))
        unknown = await fleet.ask("model.stop", {"model_name": "x", "process_key": "x#0", "expected_address": address})
        assert unknown == {"matched": False, "freed": False, "terminated": True, "process_key": "x#0"}
        wrong = await fleet.ask("model.stop", {"model_name": "m", "process_key": "m#0", "expected_address": "h:1"})
        assert (wrong["matched"], wrong["terminated"], wrong["address"]) == (True, False, address)
        assert wrong["error"].startswith("address mismatch")
        ended = await fleet.ask("model.stop", {"model_name": "m", "process_key": "m#0", "expected_address": address})
        assert ended == {
            "matched": True,
            "freed": True,
            "terminated": True,
            "process_key": "m#0",
            "address": address,
        }
        assert await fleet.running() == []


async def test_delete_removes_files_and_nothing_else(nats_server: NatsServer, tmp_path: Path) -> None:
    async with ordered_worker(nats_server, tmp_path) as fleet:
        models = tmp_path / "w" / "models"
        (models / "m").mkdir()
        (models / "m" / "weights").write_text("1")
        (models / "n").write_text("1")
        (models / "n.yaml").write_text("1")
        (models / "nn").write_text("1")
        assert await fleet.ask("model.delete", {"model_name": "m"}) == {"success": True}
        assert await fleet.ask("model.delete", {"model_name": "n"}) == {"success": True}
        assert await fleet.ask("model.delete", {"model_name": "n"}) == {"success": True}
        assert [path.name for path in models.iterdir()] == ["nn"]
        for name in ("", "../x", "/etc/passwd", "a/../../x", "."):
            refused = await fleet.ask("model.delete", {"model_name": name})
            assert refused["success"] is False, name


async def test_stop_by_any_of_its_meanings(nats_server: NatsServer, tmp_path: Path) -> None:
    source = mock_copy(tmp_path / "mock")
    async with ordered_worker(nats_server, tmp_path, max_replicas_per_model="2") as fleet:
        order = {"backend": "mock", "uri": str(source), "name": "mock"}
        for model, replica in (("m", 0), ("m", 1), ("k", 0)):
            reply = await fleet.ask("backend.install", order | {"model_id": model, "replica_index": replica})
            assert reply["success"], reply

        def left() -> list[str]:
            rows = fleet.last_beat("processes").get("processes", [])
            return sorted(f"{row['model']}#{row['replica']}" for row in rows)

        await until(lambda: left() == ["k#0", "m#0", "m#1"])
        await fleet.tell("backend.stop", ["nonsense"])
        await fleet.tell("backend.stop", {"backend": "m#1"})
        await until(lambda: left() == ["k#0", "m#0"])
        await fleet.tell("backend.stop", {"backend": "m", "force": True})
        await until(lambda: left() == ["k#0"])
        await fleet.tell("backend.stop", {})
        await until(lambda: left() == [])
