"""Orders of a Corral controller over a real bus: accepted at once, reported later, never lost and never done twice."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

from tests.support.blob_server import BlobServer
from tests.support.nats import NatsServer, nats_server
from tests.support.ordering import OrderedFleet, digest, ordered_worker, tarred, tiny_order
from tests.support.waiting import promised, until

__all__ = ["nats_server"]

RUN = b"#!/bin/sh\nexec sleep 3600\n"


def download(server: BlobServer, name: str, size: int = 1_000_000) -> dict[str, Any]:
    """An order whose content comes over HTTP."""
    content = tarred({"run.sh": RUN, "weights": os.urandom(size)})
    sha = "sha256:" + hashlib.sha256(content).hexdigest()
    url = server.put(f"/{name}.tar", content, etag='"1"')
    source = {"kind": "http", "uri": url, "digest": sha, "size": len(content)}
    return {"backend": name, "variant": name, "digest": sha, "sources": [source]}


def reports(fleet: OrderedFleet) -> dict[str, dict[str, Any]]:
    return {each["op_id"]: each for each in fleet.last_beat("orders").get("orders", ())}


async def test_an_install_is_accepted_then_reported_and_stands_in_the_heartbeat(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    async with ordered_worker(nats_server, tmp_path) as fleet:
        result = await fleet.order("install", "op-1", tiny_order("a"), attempt=3)
        assert result == {
            "op_id": "op-1",
            "attempt": 3,
            "node_id": fleet.node,
            "backend": "tiny",
            "success": True,
            "variant": "tiny",
            "version": "a",
            "digest": digest("a"),
        }
        await until(lambda: "op-1" in reports(fleet) and "result" in reports(fleet)["op-1"])
        assert reports(fleet)["op-1"] == {
            "op_id": "op-1",
            "attempt": 3,
            "kind": "install",
            "backend": "tiny",
            "result": result,
        }
        beat = fleet.last_beat("inventory")
        (row,) = beat["inventory"]
        assert (row["name"], row["digest"], row["version"]) == ("tiny", digest("a"), "a")
        listed = await fleet.ask("backend.list", {})
        assert (listed["seq"], listed["backends"]) == (beat["inventory_seq"], beat["inventory"])
        assert await fleet.running() == []  # nobody asked for a process


async def test_progress_is_numbered_never_goes_back_and_ends_before_the_result(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    async with BlobServer() as server, ordered_worker(nats_server, tmp_path) as fleet:
        order = download(server, "big", 3_000_000)
        assert (await fleet.order("install", "op-1", order, attempt=2))["success"]
        events = fleet.told("backend.install.op-1.progress")
        first = events[0]["seq"]
        assert [event["seq"] for event in events] == list(range(first, first + len(events)))
        assert {event["attempt"] for event in events} == {2}
        assert {event["node_id"] for event in events} == {fleet.node}
        phases = [event["phase"] for event in events]
        order_of = ["resolving", "downloading", "verifying", "extracting", "starting"]
        assert phases == sorted(phases, key=order_of.index)
        last = [each for each in fleet.heard if each.subject == "backend.install.op-1.progress"][-1]
        ended = next(each for each in fleet.heard if each.subject == "backend.install.op-1.result")
        assert last.at <= ended.at


async def test_the_same_order_again_is_answered_from_memory_also_after_a_restart(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    async with ordered_worker(nats_server, tmp_path) as fleet:
        first = await fleet.order("install", "op-1", tiny_order("a"))
        assert first["success"]
        assert (await fleet.order("delete", "op-2", {"backend": "tiny"}))["success"]
        fleet.heard.clear()
        assert await fleet.order("install", "op-1", tiny_order("a")) == first
        assert await fleet.backends() == {}  # it was not carried out again
        again = await fleet.order("install", "op-1", tiny_order("a"), attempt=2)
        assert again["success"]
        assert "tiny" in await fleet.backends()
        outcomes = json.loads((tmp_path / "w" / "outcomes.json").read_bytes())["outcomes"]
        assert [(each["kind"], each["backend"]["attempt"]) for each in outcomes] == [
            ("install", 1),
            ("delete", 1),
            ("install", 2),
        ]


async def test_an_outcome_outlives_the_worker(nats_server: NatsServer, tmp_path: Path) -> None:
    async with ordered_worker(nats_server, tmp_path) as fleet:
        first = await fleet.order("install", "op-1", tiny_order("a"))
        second = await fleet.order("delete", "op-2", {"backend": "tiny"})
    (tmp_path / "w" / "identity.json").unlink()  # another controller script: it must join anew
    async with ordered_worker(nats_server, tmp_path) as fleet:
        assert await fleet.order("install", "op-1", tiny_order("a")) == first
        assert await fleet.order("delete", "op-2", {"backend": "tiny"}) == second
        assert await fleet.backends() == {}
        await until(lambda: {"op-1", "op-2"} <= set(reports(fleet)))


async def test_accept_without_an_operation_is_ignored(nats_server: NatsServer, tmp_path: Path) -> None:
    async with ordered_worker(nats_server, tmp_path) as fleet:
        reply = await fleet.ask("backend.install", tiny_order("a") | {"accept": True})
        assert reply == {"success": True}
        assert "tiny" in await fleet.backends()


async def test_a_cancel_stops_the_bytes_at_once(nats_server: NatsServer, tmp_path: Path) -> None:
    async with BlobServer() as server, ordered_worker(nats_server, tmp_path) as fleet:
        order = download(server, "big", 30_000_000)
        body = order | {"op_id": "op-1", "attempt": 1, "accept": True}
        assert (await fleet.ask("backend.install", body))["accepted"]
        await until(lambda: server.bytes_sent > 1_000_000)
        server.pause.clear()
        await until(lambda: "op-1" in reports(fleet))
        assert "result" not in reports(fleet)["op-1"]
        began = time.monotonic()
        assert await fleet.ask("backend.cancel", {"op_id": "op-1", "backend": "big"}) == {
            "success": True,
            "running": True,
        }
        result = await fleet.result("backend.install", "op-1")
        assert (result["success"], result["cancelled"]) == (False, True)
        assert time.monotonic() - began < promised(2)
        server.pause.set()
        await until(lambda: server.broken_off == 1)
        assert await fleet.backends() == {}
        assert list((tmp_path / "w" / "blobs" / "incoming").iterdir()) == []
        assert await fleet.ask("backend.cancel", {"op_id": "op-1", "backend": "big"}) == {"success": True}


async def test_a_pause_keeps_the_bytes_and_the_next_order_goes_on_from_them(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    async with BlobServer() as server, ordered_worker(nats_server, tmp_path) as fleet:
        size = 20_000_000
        order = download(server, "big", size) | {"attempt": 1, "accept": True}
        assert (await fleet.ask("backend.install", order | {"op_id": "op-1"}))["accepted"]
        incoming = tmp_path / "w" / "blobs" / "incoming"
        await until(lambda: sum(path.stat().st_size for path in incoming.glob("*.part")) > 5_000_000)
        server.pause.clear()
        assert (await fleet.ask("backend.cancel", {"op_id": "op-1", "backend": "big", "keep": True}))["running"]
        assert (await fleet.result("backend.install", "op-1"))["cancelled"]
        kept = sum(path.stat().st_size for path in incoming.glob("*.part"))
        assert kept > 5_000_000
        server.pause.set()
        await until(lambda: server.broken_off == 1)
        before = server.bytes_sent
        assert (await fleet.ask("backend.install", order | {"op_id": "op-2"}))["accepted"]
        assert (await fleet.result("backend.install", "op-2"))["success"]
        assert server.bytes_sent - before < size - kept + 1_000_000, "only the rest"


async def test_a_worker_that_leaves_keeps_the_bytes_and_tells_no_outcome(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    async with BlobServer() as server, ordered_worker(nats_server, tmp_path) as fleet:
        body = download(server, "big", 20_000_000) | {"op_id": "op-1", "attempt": 1, "accept": True}
        assert (await fleet.ask("backend.install", body))["accepted"]
        incoming = tmp_path / "w" / "blobs" / "incoming"
        await until(lambda: sum(path.stat().st_size for path in incoming.glob("*.part")) > 1_000_000)
        server.pause.clear()
        await fleet.worker.leave()
        assert sum(path.stat().st_size for path in incoming.glob("*.part")) > 1_000_000
        assert fleet.told("backend.install.op-1.result") == []
        assert not (tmp_path / "w" / "outcomes.json").exists()


async def test_orders_are_counted(nats_server: NatsServer, tmp_path: Path) -> None:
    async with ordered_worker(nats_server, tmp_path) as fleet:
        await fleet.order("install", "op-1", tiny_order("a"))
        await fleet.order("install", "op-2", {"backend": "nothing-like-it"})
        status, text = await fleet.worker.get("/metrics", fleet.controller.ingress_token(scope="logs"))
        assert status == 200
        assert 'corral_worker_orders_total{kind="install",outcome="success"} 1.0' in text
        assert 'corral_worker_orders_total{kind="install",outcome="failed"} 1.0' in text
        assert "corral_worker_orders_under_way 0.0" in text


async def test_different_backends_run_side_by_side_and_equal_requests_share_one_download(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    async with BlobServer() as server, ordered_worker(nats_server, tmp_path) as fleet:
        one, two = download(server, "one", 200_000), download(server, "two", 200_000)
        server.pause.clear()
        orders = [("op-1", one), ("op-2", two), ("op-3", one)]
        for op, order in orders:
            assert (await fleet.ask("backend.install", order | {"op_id": op, "attempt": 1, "accept": True}))["accepted"]
        await until(lambda: {asked.path for asked in server.asked} == {"/one.tar", "/two.tar"})
        await until(lambda: {"op-1", "op-2", "op-3"} <= set(reports(fleet)))
        server.pause.set()
        results = [await fleet.result("backend.install", op) for op, _ in orders]
        assert all(result["success"] for result in results)
        assert len(server.asked) == 2
        assert set(await fleet.backends()) == {"one", "two"}


async def test_one_backend_is_worked_on_by_one_order_at_a_time_under_any_of_its_names(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    async with BlobServer() as server, ordered_worker(nats_server, tmp_path) as fleet:
        as_meta = download(server, "one", 200_000) | {"backend": "engine", "variant": "cpu-engine"}
        as_build = download(server, "two", 200_000) | {"backend": "cpu-engine", "variant": "cpu-engine"}
        server.pause.clear()
        for op, order in (("op-1", as_meta), ("op-2", as_build)):
            assert (await fleet.ask("backend.install", order | {"op_id": op, "attempt": 1, "accept": True}))["accepted"]
            await until(lambda: server.asked)  # so that it is the first that holds the backend
        await until(lambda: {"op-1", "op-2"} <= set(reports(fleet)))
        assert {asked.path for asked in server.asked} == {"/one.tar"}
        server.pause.set()
        assert (await fleet.result("backend.install", "op-1"))["digest"] == as_meta["digest"]
        assert (await fleet.result("backend.install", "op-2"))["digest"] == as_build["digest"]
        rows = await fleet.backends()
        assert rows["engine"]["meta_backend_for"] == "cpu-engine"
        assert (rows["cpu-engine"]["digest"], rows["cpu-engine"]["previous"]) == (
            as_build["digest"],
            [as_meta["digest"]],
        )


async def test_refusals_that_time_does_not_cure_say_so(nats_server: NatsServer, tmp_path: Path) -> None:
    async with BlobServer() as server, ordered_worker(nats_server, tmp_path) as fleet:
        wrong = download(server, "wrong", 1000)
        wrong["digest"] = wrong["sources"][0]["digest"] = digest("f")
        result = await fleet.order("install", "op-1", wrong)
        assert (result["success"], result["code"], result["permanent"]) == (False, "wrong_digest", True)
        assert result["phase"] in ("downloading", "verifying")
        unknown = await fleet.order("install", "op-2", {"backend": "mokc"})
        assert (unknown["success"], unknown["permanent"], unknown["phase"]) == (False, True, "resolving")
        assert "mock" in unknown["error"]  # the nearest name
        server.statuses.append((403, {}))
        shut = await fleet.order("install", "op-3", download(server, "shut", 1000))
        assert (shut["success"], shut["code"]) == (False, "denied")
        assert "permanent" not in shut


async def test_an_order_without_sources_is_looked_up_by_the_worker(nats_server: NatsServer, tmp_path: Path) -> None:
    async with ordered_worker(nats_server, tmp_path) as fleet:
        result = await fleet.order("install", "op-1", {"backend": "mock"})
        assert result["success"], result
        row = (await fleet.backends())["mock"]
        assert row["digest"] == result["digest"]
        registered = fleet.controller.named("w1").registrations[-1]
        assert registered["python"].startswith("3.")


async def test_deleting_what_is_not_there_is_done_already(nats_server: NatsServer, tmp_path: Path) -> None:
    async with ordered_worker(nats_server, tmp_path) as fleet:
        assert (await fleet.order("delete", "op-1", {"backend": "nothing"}))["success"]
        refused = await fleet.ask("backend.delete", {"backend": "nothing"})
        assert refused["success"] is False
        assert "nothing" in refused["error"]


async def test_nonsense_is_refused_and_harms_nobody(nats_server: NatsServer, tmp_path: Path) -> None:
    async with ordered_worker(nats_server, tmp_path) as fleet:
        for order in ("backend.install", "backend.upgrade", "backend.delete"):
            reply = await fleet.ask(order, {"backend": ["not", "a", "name"]})
            assert reply["success"] is False
            assert reply["error"].startswith("invalid request: ")
        escaping = await fleet.order("install", "op-1", tiny_order("a", backend="../../etc"))
        assert (escaping["success"], escaping["code"], escaping["permanent"]) == (False, "invalid", True)
        bad = await fleet.ask("backend.install", {"backend": "x", "backend_galleries": "{not json"})
        assert bad["success"] is False
        assert "galleries" in bad["error"]
        await asyncio.gather(*(fleet.ask("backend.list", {}) for _ in range(20)))
