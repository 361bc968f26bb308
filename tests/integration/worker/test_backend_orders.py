"""Backends by orders over a real bus, as the contract has them: answered when they are done."""

from __future__ import annotations

from pathlib import Path

from tests.support.nats import NatsServer, nats_server
from tests.support.ordering import mock_copy, ordered_worker
from tests.support.supervising import listens
from tests.support.waiting import until

__all__ = ["nats_server"]


async def test_mock_from_a_folder_is_installed_started_listed_stopped_and_deleted(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    source = mock_copy(tmp_path / "mock")
    async with ordered_worker(nats_server, tmp_path) as fleet:
        install = {"backend": "mock", "uri": f"file://{source}", "name": "mock"}
        reply = await fleet.ask("backend.install", install)
        assert reply["success"], reply
        host, port = reply["address"].split(":")
        assert host == "127.0.0.1"
        assert listens(int(port))

        row = (await fleet.backends())["mock"]
        assert (row["is_system"], row["is_meta"]) == (False, False)
        assert row["digest"].startswith("sha256:")
        assert await fleet.running() == [{"model_id": "mock", "replica_index": 0, "address": reply["address"]}]

        again = await fleet.ask("backend.install", install)
        assert again == reply

        await fleet.tell("backend.stop", {"backend": "mock"})
        await until(lambda: fleet.last_beat("processes").get("processes") == [])
        assert not listens(int(port))
        assert await fleet.running() == []

        deleted = await fleet.ask("backend.delete", {"backend": "mock"})
        assert deleted == {"success": True, "reports_stopped_processes": True}
        assert await fleet.backends() == {}
        assert not list((tmp_path / "w" / "backends").glob("[a-z]*"))


async def test_every_file_of_a_backend_is_read_again_on_demand(nats_server: NatsServer, tmp_path: Path) -> None:
    source = mock_copy(tmp_path / "mock")
    async with ordered_worker(nats_server, tmp_path) as fleet:
        assert await fleet.ask("backend.verify", {"backend": "mock"}) == {
            "success": False,
            "error": "mock is not installed here",
        }
        order = {
            "backend": "mock",
            "uri": f"file://{source}",
            "name": "mock",
            "accept": True,
            "op_id": "o",
            "attempt": 1,
        }
        await fleet.ask("backend.install", order)
        await until(fleet.backends)
        digest = (await fleet.backends())["mock"]["digest"]
        assert await fleet.ask("backend.verify", {"backend": "mock"}) == {"success": True, "digest": digest}

        versions = tmp_path / "w" / "backends" / "mock" / "versions"
        files = sorted(path for path in versions.rglob("*.py") if path.stat().st_size)
        gone, bent = files[0], files[1]
        gone.unlink()
        bent.chmod(0o644)
        bent.write_bytes(b"#" + bent.read_bytes())
        found = await fleet.ask("backend.verify", {"backend": "mock"})
        assert (found["success"], found["damaged"]) == (True, 2)
        assert [path.rpartition("/")[2] for path in found["missing"]] == [gone.name]
        assert [path.rpartition("/")[2] for path in found["changed"]] == [bent.name]
