"""Upgrades over a real bus: fetched aside, started beside, switched, drained; reverted if the new one will not run."""

from __future__ import annotations

import asyncio
import errno
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from corral.worker.installer.folder import BackendFolder
from corral.worker.installer.installer import Installer
from tests.support.nats import NatsServer, nats_server
from tests.support.ordering import OrderedFleet, digest, mock_copy, ordered_worker, tiny_order
from tests.support.supervising import listens
from tests.support.waiting import until

__all__ = ["nats_server"]


def processes(fleet: OrderedFleet) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = fleet.last_beat("processes").get("processes", [])
    return rows


async def start_replica(fleet: OrderedFleet, process_id: str, **more: Any) -> dict[str, Any]:
    order = {"process_id": process_id, "model": "m", "replica": 0, "backend": "tiny", **more}
    accepted = await fleet.ask("replica.start", order | {"op_id": process_id, "attempt": 1, "accept": True})
    assert accepted == {"success": True, "accepted": True, "process_id": process_id}
    return await fleet.result("replica.start", process_id)


async def answer(fleet: OrderedFleet, process_id: str) -> int:
    token = fleet.controller.ingress_token(scope="replicas")
    status, _ = await fleet.worker.get(f"/replicas/{process_id}/x", token)
    return status


async def test_fetched_first_then_switched(nats_server: NatsServer, tmp_path: Path) -> None:
    async with ordered_worker(nats_server, tmp_path) as fleet:
        assert (await fleet.order("install", "op-1", tiny_order("a")))["success"]
        fetched = await fleet.order("upgrade", "op-2", tiny_order("b") | {"fetch_only": True}, attempt=1)
        assert (fetched["success"], fetched["fetched"], fetched["digest"]) == (True, True, digest("b"))
        row = (await fleet.backends())["tiny"]
        assert (row["digest"], row["fetched"]) == (digest("a"), [digest("b")])
        assert "previous" not in row
        switched = await fleet.order("upgrade", "op-2", tiny_order("b"), attempt=2)
        assert (switched["success"], switched["digest"]) == (True, digest("b"))
        row = (await fleet.backends())["tiny"]
        assert (row["digest"], row["previous"], row["version"]) == (digest("b"), [digest("a")], "b")
        assert "fetched" not in row
        back = await fleet.order("upgrade", "op-3", tiny_order("a") | {"sources": tiny_order("a")["sources"]})
        assert back["digest"] == digest("a")
        assert (await fleet.backends())["tiny"]["digest"] == digest("a")


@pytest.mark.parametrize("fetched_before", [True, False])
async def test_a_pointer_that_cannot_be_moved_is_a_failed_switch(
    nats_server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fetched_before: bool
) -> None:
    """No process runs, so moving the pointer is all there is to the switch. The rollout stops by the phase."""
    async with ordered_worker(nats_server, tmp_path) as fleet:
        assert (await fleet.order("install", "op-1", tiny_order("a")))["success"]
        if fetched_before:
            assert (await fleet.order("upgrade", "op-2", tiny_order("b") | {"fetch_only": True}, attempt=1))["success"]

        def fail(*_: object) -> None:
            raise OSError(errno.EROFS, "Read-only file system")

        monkeypatch.setattr(BackendFolder, "switch", fail)
        result = await fleet.order("upgrade", "op-2", tiny_order("b"), attempt=2)
        assert (result["success"], result["phase"]) == (False, "starting")
        assert "Read-only file system" in result["error"]
        assert (await fleet.backends())["tiny"]["digest"] == digest("a")


async def test_a_running_process_is_replaced_without_a_gap(nats_server: NatsServer, tmp_path: Path) -> None:
    async with ordered_worker(nats_server, tmp_path) as fleet:
        assert (await fleet.order("install", "op-1", tiny_order("a")))["success"]
        assert (await start_replica(fleet, "p1"))["success"]
        await until(lambda: [row["state"] for row in processes(fleet)] == ["ready"])
        statuses: list[int] = []
        going_on = True

        async def ask_on() -> None:
            """As a gateway does: whoever is told 410 picks again from what the node says."""
            while going_on:
                serving = [row["process_id"] for row in processes(fleet) if row["state"] == "ready"]
                for process_id in reversed(serving):
                    status = await answer(fleet, process_id)
                    if status != 410:
                        statuses.append(status)
                        break
                await asyncio.sleep(0)

        asking = asyncio.ensure_future(ask_on())
        result = await fleet.order("upgrade", "op-2", tiny_order("b"))
        assert result["success"], result
        await until(lambda: [row["digest"] for row in processes(fleet)] == [digest("b")])
        going_on = False
        await asking
        assert set(statuses) == {200}
        (row,) = processes(fleet)
        assert row["process_id"] != "p1"
        assert (row["state"], row["model"], row["backend"]) == ("ready", "m", "tiny")
        assert (await fleet.backends())["tiny"]["digest"] == digest("b")


@pytest.mark.parametrize("in_place", [False, True])
async def test_requests_of_the_old_process_end_however_long_they_take(
    nats_server: NatsServer, tmp_path: Path, in_place: bool
) -> None:
    """`--drain-timeout` is for a worker that leaves: an answer may well take longer than that."""
    async with ordered_worker(nats_server, tmp_path, drain_timeout="1ms") as fleet:
        assert (await fleet.order("install", "op-1", tiny_order("a")))["success"]
        assert (await start_replica(fleet, "p1"))["success"]
        token = fleet.controller.ingress_token(scope="replicas")
        old = json.loads((await fleet.worker.get("/replicas/p1", token))[1])["pid"]

        async def is_retired() -> bool:
            """Another process answers, or none while only one fits."""
            status, said = await fleet.worker.get("/replicas/p1", token)
            return status == 410 or json.loads(said)["pid"] != old

        async with asyncio.TaskGroup() as tasks:
            slow = tasks.create_task(fleet.worker.get(f"/replicas/p1/when{tmp_path}/slow", token))
            await until((tmp_path / "slow.asked").exists)
            upgrade = tasks.create_task(fleet.order("upgrade", "op-2", tiny_order("b") | {"in_place": in_place}))
            await until(is_retired)
            # A drain that is limited by --drain-timeout would be over before this heartbeat.
            beats = len(fleet.told("heartbeat"))
            await until(lambda: len(fleet.told("heartbeat")) > beats + 2)
            assert not slow.done()
            assert "p1" in [row["process_id"] for row in processes(fleet)]
            (tmp_path / "slow").touch()
        assert slow.result()[0] == 200
        assert upgrade.result()["success"]
        await until(lambda: [row["digest"] for row in processes(fleet)] == [digest("b")])


@pytest.mark.parametrize("in_place", [False, True])
async def test_gateways_that_know_only_the_old_process_reach_the_new_one(
    nats_server: NatsServer, tmp_path: Path, in_place: bool
) -> None:
    """They learn of it from the controller, whose database may be away. The process serves the same replica."""
    async with ordered_worker(nats_server, tmp_path) as fleet:
        assert (await fleet.order("install", "op-1", tiny_order("a")))["success"]
        assert (await start_replica(fleet, "p1"))["success"]
        for version in ("b", "c"):  # also the one that knows only the first of three
            result = await fleet.order("upgrade", f"op-{version}", tiny_order(version) | {"in_place": in_place})
            assert result["success"], result
            assert await answer(fleet, "p1") == 200
        await until(lambda: [row["digest"] for row in processes(fleet)] == [digest("c")])
        (row,) = processes(fleet)
        assert await answer(fleet, row["process_id"]) == 200
        stop = {"process_id": row["process_id"], "op_id": "stop", "attempt": 1, "accept": True}
        await fleet.ask("replica.stop", stop)

        async def is_gone() -> bool:
            return await answer(fleet, "p1") == 410

        await until(is_gone)


async def test_a_new_process_that_crashes_leaves_everything_as_it_was(nats_server: NatsServer, tmp_path: Path) -> None:
    async with ordered_worker(nats_server, tmp_path) as fleet:
        assert (await fleet.order("install", "op-1", tiny_order("a")))["success"]
        assert (await start_replica(fleet, "p1"))["success"]
        result = await fleet.order("upgrade", "op-2", tiny_order("b", "lines=3 crash=7"))
        assert (result["success"], result["phase"], result["code"]) == (False, "starting", "start_failed")
        assert "tiny line 3" in result["error"]
        assert "permanent" not in result
        assert (await fleet.backends())["tiny"]["digest"] == digest("a")
        assert await answer(fleet, "p1") == 200
        await until(lambda: [row["process_id"] for row in processes(fleet)] == ["p1"])
        mended = await fleet.order("upgrade", "op-3", tiny_order("c"))
        assert mended["success"], mended
        await until(lambda: [row["digest"] for row in processes(fleet)] == [digest("c")])


async def test_where_only_one_fits_the_old_process_ends_first(nats_server: NatsServer, tmp_path: Path) -> None:
    async with ordered_worker(nats_server, tmp_path) as fleet:
        assert (await fleet.order("install", "op-1", tiny_order("a")))["success"]
        assert (await start_replica(fleet, "p1"))["success"]
        result = await fleet.order("upgrade", "op-2", tiny_order("b") | {"in_place": True})
        assert (result["success"], result["digest"]) == (True, digest("b"))
        await until(lambda: [row["digest"] for row in processes(fleet)] == [digest("b")])
        at_once = max(len(beat["processes"]) for beat in fleet.told("heartbeat") if "processes" in beat)
        assert at_once == 1


async def test_where_only_one_fits_a_new_process_that_crashes_makes_way_for_the_old_one(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    async with ordered_worker(nats_server, tmp_path) as fleet:
        assert (await fleet.order("install", "op-1", tiny_order("a")))["success"]
        assert (await start_replica(fleet, "p1"))["success"]
        result = await fleet.order("upgrade", "op-2", tiny_order("b", "lines=1 crash=7") | {"in_place": True})
        assert (result["success"], result["phase"]) == (False, "starting")
        assert "tiny line 1" in result["error"]
        assert (await fleet.backends())["tiny"]["digest"] == digest("a")
        await until(lambda: [(row["digest"], row["state"]) for row in processes(fleet)] == [(digest("a"), "ready")])
        (row,) = processes(fleet)
        assert row["process_id"] != "p1"  # another process, so another id
        assert await answer(fleet, row["process_id"]) == 200


@pytest.mark.parametrize(
    ("want", "said"),
    [("post=9", "broke the connection at its first request"), ("post=500", "answered its first request with 500")],
)
async def test_a_new_process_that_breaks_when_it_is_first_asked_is_reverted_too(
    nats_server: NatsServer, tmp_path: Path, want: str, said: str
) -> None:
    async with ordered_worker(nats_server, tmp_path) as fleet:
        assert (await fleet.order("install", "op-1", tiny_order("a")))["success"]
        assert (await start_replica(fleet, "p1"))["success"]
        result = await fleet.order("upgrade", "op-2", tiny_order("b", want))
        assert (result["success"], result["phase"]) == (False, "starting")
        assert said in result["error"]
        assert (await fleet.backends())["tiny"]["digest"] == digest("a")
        assert await answer(fleet, "p1") == 200
        await until(lambda: [row["process_id"] for row in processes(fleet)] == ["p1"])


@pytest.mark.parametrize("want", ["post=404", "post=501", "post=503"])
async def test_a_new_process_that_does_not_chat_is_none_the_worse(
    nats_server: NatsServer, tmp_path: Path, want: str
) -> None:
    async with ordered_worker(nats_server, tmp_path) as fleet:
        assert (await fleet.order("install", "op-1", tiny_order("a")))["success"]
        assert (await start_replica(fleet, "p1"))["success"]
        assert (await fleet.order("upgrade", "op-2", tiny_order("b", want)))["success"]


async def test_a_cancelled_upgrade_goes_back(nats_server: NatsServer, tmp_path: Path) -> None:
    async with ordered_worker(nats_server, tmp_path) as fleet:
        assert (await fleet.order("install", "op-1", tiny_order("a")))["success"]
        assert (await start_replica(fleet, "p1"))["success"]
        order = tiny_order("b", "silent=1") | {"op_id": "op-2", "attempt": 1, "accept": True}
        assert (await fleet.ask("backend.upgrade", order))["accepted"]
        await until(lambda: "starting" in [row["state"] for row in processes(fleet)])
        assert (await fleet.ask("backend.cancel", {"op_id": "op-2", "backend": "tiny"}))["running"]
        result = await fleet.result("backend.upgrade", "op-2")
        assert (result["success"], result["cancelled"]) == (False, True)
        assert (await fleet.backends())["tiny"]["digest"] == digest("a")
        assert await answer(fleet, "p1") == 200
        await until(lambda: [row["process_id"] for row in processes(fleet)] == ["p1"])


async def test_an_upgrade_as_the_contract_has_it(nats_server: NatsServer, tmp_path: Path) -> None:
    source = mock_copy(tmp_path / "mock")
    async with ordered_worker(nats_server, tmp_path) as fleet:
        install = {"backend": "mock", "uri": str(source), "name": "mock", "model_id": "q#3", "replica_index": 1}
        before = await fleet.ask("backend.install", install)
        assert before["success"], before
        first = (await fleet.backends())["mock"]
        (source / "VERSION").write_text("2\n")
        upgraded = await fleet.ask("backend.upgrade", {"backend": "mock", "uri": str(source), "name": "mock"})
        assert upgraded == {
            "success": True,
            "stopped_process_keys": ["q#3#1"],
            "reports_stopped_processes": True,
        }
        assert await fleet.running() == []  # nothing is started
        now = (await fleet.backends())["mock"]
        assert now["digest"] != first["digest"]
        assert now["previous"] == [first["digest"]]
        after = await fleet.ask("backend.install", install)
        assert after["success"], after
        assert await fleet.running() == [{"model_id": "q#3", "replica_index": 1, "address": after["address"]}]


async def test_what_is_asked_for_in_mid_upgrade_is_not_left_with_the_old_version(
    nats_server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A controller whose process was stopped asks for it again at once, before the version is switched."""
    source = mock_copy(tmp_path / "mock")
    switch = Installer.install
    async with ordered_worker(nats_server, tmp_path) as fleet:
        install = {"backend": "mock", "uri": str(source), "name": "mock", "model_id": "m"}
        assert (await fleet.ask("backend.install", install))["success"]
        (source / "VERSION").write_text("2\n")

        async def ask_first(installer: Installer, *words: Any) -> Any:
            monkeypatch.setattr(Installer, "install", switch)
            assert (await fleet.ask("backend.install", install))["success"]
            return await switch(installer, *words)

        monkeypatch.setattr(Installer, "install", ask_first)
        upgraded = await fleet.ask("backend.upgrade", {"backend": "mock", "uri": str(source), "name": "mock"})
        assert (upgraded["success"], upgraded["stopped_process_keys"]) == (True, ["m#0"])
        assert await fleet.running() == []


async def test_a_failed_upgrade_as_the_contract_has_it_stops_nothing(nats_server: NatsServer, tmp_path: Path) -> None:
    source = mock_copy(tmp_path / "mock")
    async with ordered_worker(nats_server, tmp_path) as fleet:
        reply = await fleet.ask("backend.install", {"backend": "mock", "uri": str(source), "name": "mock"})
        assert reply["success"], reply
        (source / "run.sh").unlink()
        failed = await fleet.ask("backend.upgrade", {"backend": "mock", "uri": str(source), "name": "mock"})
        assert (failed["success"], failed["reports_stopped_processes"]) == (False, True)
        assert "run.sh" in failed["error"]
        assert listens(int(reply["address"].split(":")[1]))


async def test_force_reinstalls_and_starts_afresh(nats_server: NatsServer, tmp_path: Path) -> None:
    source = mock_copy(tmp_path / "mock")
    async with ordered_worker(nats_server, tmp_path) as fleet:
        order = {"backend": "mock", "uri": str(source), "name": "mock"}
        before = await fleet.ask("backend.install", order)
        await until(lambda: processes(fleet))
        first = processes(fleet)[0]["process_id"]
        again = await fleet.ask("backend.install", order | {"force": True})
        assert again["success"], again
        await until(lambda: [row["process_id"] for row in processes(fleet)] not in ([first], []))
        assert before["success"]
        assert len(list((tmp_path / "w" / "backends" / "mock" / "versions").glob("*.json"))) == 2


async def test_a_request_for_a_process_that_runs_touches_neither_gallery_nor_disk(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    source = mock_copy(tmp_path / "mock")
    async with ordered_worker(nats_server, tmp_path) as fleet:
        order = {"backend": "mock", "uri": str(source), "name": "mock", "model_id": "m"}
        reply = await fleet.ask("backend.install", order)
        (tmp_path / "w" / "backends").rename(tmp_path / "away")
        try:
            quick = {"backend": "mock", "model_id": "m", "backend_galleries": "nobody reads this"}
            assert await fleet.ask("backend.install", quick) == reply
        finally:
            (tmp_path / "away").rename(tmp_path / "w" / "backends")


@pytest.mark.parametrize("accepted", [True, False])
async def test_delete_stops_what_runs_of_it_first(nats_server: NatsServer, tmp_path: Path, accepted: bool) -> None:
    async with ordered_worker(nats_server, tmp_path) as fleet:
        assert (await fleet.order("install", "op-1", tiny_order("a")))["success"]
        assert (await start_replica(fleet, "p1"))["success"]
        if accepted:
            result = await fleet.order("delete", "op-2", {"backend": "tiny"})
        else:
            result = await fleet.ask("backend.delete", {"backend": "tiny"})
            assert result["reports_stopped_processes"] is True
        assert (result["success"], result["stopped_process_keys"]) == (True, ["m#0"])
        assert await fleet.backends() == {}
        await until(lambda: processes(fleet) == [])


async def test_through_the_ingress_only_with_a_token(nats_server: NatsServer, tmp_path: Path) -> None:
    async with ordered_worker(nats_server, tmp_path) as fleet:
        assert (await fleet.order("install", "op-1", tiny_order("a")))["success"]
        assert (await start_replica(fleet, "p1"))["success"]
        async with aiohttp.ClientSession() as session, session.get(f"{fleet.worker.ingress}/replicas/p1/x") as reply:
            assert reply.status == 401
