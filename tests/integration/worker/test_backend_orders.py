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
