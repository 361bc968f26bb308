"""`/api/operations` from outside: codes and bodies of docs/reference/wire/operations.md, and the actions."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from corral.store.tables import operations
from tests.support.backend_api import Api, open_api
from tests.support.sqlite import sqlite_url
from tests.support.waiting import until

UNKNOWN = "00000000-0000-0000-0000-000000000000"


async def test_asking_answers_202_with_an_id_at_once(api: Api) -> None:
    barn = await api.fleet.corral("barn")
    barn.script.hold = asyncio.Event()
    answer = await api.post("/api/operations", {"kind": "install", "backend": "vllm"})
    assert answer.status == 202
    job = answer.json["jobID"]
    assert answer.json == {
        "jobID": job,
        "message": "installation of vllm started",
        "statusUrl": f"/api/backends/job/{job}",
    }
    await api.fleet.until_row(job, "barn", "downloading")
    same = await api.post("/api/operations", {"backend": "vllm"})
    assert same.json["jobID"] == job
    assert same.json["joined"] is True
    barn.script.hold.set()
    await api.fleet.until(job, "done")


async def test_an_entry_is_as_the_contract_writes_it(api: Api) -> None:
    barn = await api.fleet.corral("barn")
    await api.fleet.corral("stall", joins=False, status="offline")
    barn.script.hold = asyncio.Event()
    job = await api.install()
    await api.fleet.until_row(job, "barn", "downloading")
    await barn.progress(
        job,
        backend="vllm",
        attempt=1,
        seq=1,
        percentage=41.24,
        file_name="layer",
        phase="downloading",
        current_bytes=432013312,
        total_bytes=2**30,
        rate=1e6,
    )

    async def entry() -> dict[str, Any]:
        (found,) = (await api.get("/api/operations")).json["operations"]
        return dict(found)

    async def heard() -> bool:
        return bool((await entry())["nodes"][0].get("phase") == "downloading")

    await until(heard)
    found = await entry()
    (row, away) = found.pop("nodes")
    assert row == {
        "node_id": "id-of-barn",
        "node_name": "barn",
        "status": "downloading",
        "percentage": 41.2,
        "file_name": "layer",
        "current": "412.0 MiB",
        "total": "1.0 GiB",
        "phase": "downloading",
        "current_bytes": 432013312,
        "total_bytes": 2**30,
        "rate": 1e6,
        "eta_s": 641.7,
        "variant": "cpu-vllm",
        "version": "1.0",
        "digest": "sha256:cpu-vllm-1",
    }
    assert away["status"] == "queued"
    assert away["percentage"] == 0
    assert away["error"] == "node offline, will retry when healthy"
    told = {key: found[key] for key in ("id", "name", "fullName", "jobID", "progress", "taskType", "message")}
    assert told == {
        "id": "vllm",
        "name": "vllm",
        "fullName": "vllm",
        "jobID": job,
        "progress": 20,
        "taskType": "Installation",
        "message": "0 of 2 nodes done",
    }
    flags = ("isDeletion", "isBackend", "isQueued", "cancellable")
    assert [found[flag] for flag in flags] == [False, True, False, True]
    assert (found["phase"], found["currentBytes"], found["totalBytes"]) == ("downloading", 432013312, 2**30)
    assert (found["kind"], found["scope"], found["state"], found["created_by"]) == (
        "install",
        "all",
        "under_way",
        "boss",
    )
    shown = (await api.get(f"/api/operations/{job}")).json
    assert (shown["jobID"], shown["operation_id"], found["operation_id"]) == (job, job, job)
    barn.script.hold.set()
    await api.fleet.until_row(job, "barn", "success")


async def test_what_is_done_leaves_the_list_and_enters_the_history(api: Api) -> None:
    await api.fleet.corral("barn")
    job = await api.install()
    await api.fleet.until(job, "done")
    assert (await api.get("/api/operations")).json == {"operations": []}
    (record,) = (await api.get("/api/operations/history")).json["operations"]
    assert record.pop("startedAt") <= record.pop("finishedAt")
    assert record == {
        "id": "vllm",
        "name": "vllm",
        "jobID": job,
        "isBackend": True,
        "taskType": "installation",
        "outcome": "completed",
        "kind": "install",
        "created_by": "boss",
        "operation_id": job,
    }
    view = (await api.get(f"/api/operations/{job}")).json
    assert (view["progress"], view["message"], view["outcome"]) == (100, "completed", "completed")
    cleared = await api.call("DELETE", "/api/operations/history")
    assert (cleared.status, cleared.json) == (200, {"success": True})
    assert (await api.get("/api/operations/history")).json == {"operations": []}
    assert (await api.get(f"/api/operations/{job}")).status == 200


async def test_cancel_stops_the_bytes_and_a_second_cancel_is_400(api: Api) -> None:
    barn = await api.fleet.corral("barn")
    barn.script.hold = asyncio.Event()
    job = await api.install()
    await api.fleet.until_row(job, "barn", "downloading")
    answer = await api.post(f"/api/operations/{job}/cancel")
    assert answer.status == 200
    assert answer.json == {"success": True, "message": "operation cancelled", "jobID": job}
    await until(lambda: barn.orders("cancel"))
    assert barn.orders("cancel") == [{"op_id": job, "backend": "vllm"}]
    assert (await api.fleet.row(job, "barn")).status == "cancelled"
    again = await api.post(f"/api/operations/{job}/cancel")
    assert again.status == 400
    assert again.json == {"error": "the operation has already ended: cancelled", "code": "invalid"}
    assert (await api.get("/api/operations")).json == {"operations": []}


async def test_cancel_on_one_node_leaves_the_others(api: Api) -> None:
    barn, stall = await api.fleet.corral("barn"), await api.fleet.corral("stall")
    barn.script.hold = stall.script.hold = asyncio.Event()
    job = await api.install()
    await api.fleet.until_row(job, "barn", "downloading")
    await api.fleet.until_row(job, "stall", "downloading")
    answer = await api.post(f"/api/operations/{job}/cancel?node=barn")
    assert answer.json == {"success": True, "message": "cancelled on barn", "jobID": job}
    barn.script.hold.set()
    view = await api.fleet.until(job, "done")
    assert {row.node_name: row.status for row in view.nodes} == {"barn": "cancelled", "stall": "success"}
    missing = await api.post(f"/api/operations/{job}/cancel?node=bran")
    assert missing.status == 400


async def test_pause_is_a_cancel_that_retry_goes_on_from(api: Api) -> None:
    barn = await api.fleet.corral("barn")
    barn.script.hold = asyncio.Event()
    job = await api.install()
    await api.fleet.until_row(job, "barn", "downloading")
    paused = await api.post(f"/api/operations/{job}/pause")
    assert (paused.status, paused.json["success"]) == (200, True)
    barn.script.hold.set()
    again = await api.post(f"/api/operations/{job}/retry")
    assert again.status == 200
    assert again.json["message"] == "asked for anew"
    assert again.json["jobID"] != job
    await api.fleet.until(again.json["jobID"], "done")


async def test_retry_tries_what_fails_whole_or_on_one_node(api: Api) -> None:
    barn, stall = await api.fleet.corral("barn"), await api.fleet.corral("stall")
    for worker in (barn, stall):
        worker.script.failures = [{"error": "disk full"}, {"error": "disk still full"}]
    job = await api.install()
    view = await api.fleet.until(job, "failing")
    assert view.error == "barn: disk full; stall: disk full"
    one = await api.post(f"/api/operations/{job}/retry?node=barn")
    assert one.json == {"success": True, "message": "tried again now on barn", "jobID": job}

    async def failed_again() -> bool:
        return (await api.fleet.row(job, "barn")).error == "disk still full"

    await until(failed_again)
    assert (await api.fleet.row(job, "stall")).error == "disk full"
    stall.script.failures.clear()
    whole = await api.post(f"/api/operations/{job}/retry")
    assert whole.json == {"success": True, "message": "tried again now", "jobID": job}
    await api.fleet.until(job, "done")
    nothing = await api.post(f"/api/operations/{job}/retry")
    assert (nothing.status, nothing.json["error"]) == (400, "no node of the operation is failing")


async def test_withdraw_lets_end_what_runs_and_begins_nothing(api: Api) -> None:
    barn = await api.fleet.corral("barn")
    stall = await api.fleet.corral("stall", joins=False, status="offline")
    barn.script.hold = asyncio.Event()
    job = await api.install()
    await api.fleet.until_row(job, "barn", "downloading")
    answer = await api.post(f"/api/operations/{job}/withdraw")
    assert answer.json == {"success": True, "message": "operation withdrawn", "jobID": job}
    view = await api.fleet.until(job, "done")
    assert {row.status for row in view.nodes} == {"withdrawn"}
    barn.script.hold.set()
    await stall.start()
    await api.fleet.set_node("stall", status="healthy")
    await api.fleet.quiet()
    assert barn.orders("cancel") == []
    assert not stall.orders()


async def test_a_failed_one_stays_until_it_is_dismissed_and_dismiss_is_always_200(api: Api) -> None:
    barn = await api.fleet.corral("barn")
    barn.script.failures = [{"error": "no such image", "permanent": True}]
    job = await api.install()
    await api.fleet.until(job, "failing")
    (entry,) = (await api.get("/api/operations")).json["operations"]
    assert entry["error"] == "barn: no such image"
    for _ in range(2):
        dismissed = await api.post(f"/api/operations/{job}/dismiss")
        assert (dismissed.status, dismissed.json["success"]) == (200, True)
    assert (await api.post(f"/api/operations/{UNKNOWN}/dismiss")).status == 200
    assert (await api.get("/api/operations")).json == {"operations": []}
    (record,) = (await api.get("/api/operations/history")).json["operations"]
    assert (record["outcome"], record["error"]) == ("failed", "barn: no such image")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", ""),
        ("GET", "/events"),
        ("POST", "/cancel"),
        ("POST", "/pause"),
        ("POST", "/retry"),
        ("POST", "/withdraw"),
    ],
)
async def test_an_unknown_operation_is_404(api: Api, method: str, path: str) -> None:
    answer = await api.call(method, f"/api/operations/{UNKNOWN}{path}")
    assert answer.status == 404
    assert answer.json == {"error": f"there is no operation {UNKNOWN}", "code": "not_found"}


async def test_pages_of_all_operations_are_newest_first_and_miss_none(api: Api) -> None:
    await api.fleet.corral("barn")
    made = []
    for number in range(5):
        made.append(await api.install(uri=f"registry.test/own:{number}", name=f"own-{number}"))
    for job in made:
        await api.fleet.until(job, "done")
    seen: list[str] = []
    after = ""
    while True:
        page = (await api.get(f"/api/operations?all=true&limit=2&after={after}")).json["operations"]
        if not page:
            break
        assert len(page) <= 2
        seen += [entry["jobID"] for entry in page]
        after = seen[-1]
    assert seen == made[::-1]
    (bare, *_) = (await api.get("/api/operations?all=true&rows=false")).json["operations"]
    whole = (await api.get(f"/api/operations/{bare['jobID']}")).json
    assert [row["status"] for row in whole.pop("nodes")] == ["success"]
    assert bare == whole, "but for the rows it is the same"
    assert bare["counts"] == {"success": 1}
    assert (await api.get(f"/api/operations?all=true&after={UNKNOWN}")).status == 404


@pytest.mark.parametrize("limit", ["0", "-1", "1001", "many", ""])
async def test_a_limit_that_makes_no_sense_is_400(api: Api, limit: str) -> None:
    answer = await api.get(f"/api/operations?limit={limit}")
    assert answer.status == 400
    assert "limit" in answer.json["error"]


async def test_a_viewer_looks_and_changes_nothing(api: Api) -> None:
    await api.fleet.corral("barn")
    job = await api.install()
    await api.fleet.until(job, "done")
    for path in ("", "/history", f"/{job}"):
        assert (await api.get(f"/api/operations{path}", key=api.viewer)).status == 200
    refused = [("POST", ""), ("DELETE", "/history")]
    refused += [("POST", f"/{job}/{what}") for what in ("cancel", "pause", "retry", "withdraw", "dismiss")]
    for method, path in refused:
        answer = await api.call(method, f"/api/operations{path}", {}, key=api.viewer)
        assert (answer.status, answer.json["code"]) == (403, "denied"), path
    assert (await api.get("/api/operations", key="ck_nobody")).status == 401


async def test_the_same_from_every_controller_and_after_a_restart(tmp_path: Path) -> None:
    async with open_api(tmp_path) as api:
        barn = await api.fleet.corral("barn")
        barn.script.hold = asyncio.Event()
        second = await api.fleet.controller("c2", url=sqlite_url(tmp_path))
        await api.serve(second)
        job = await api.install()
        await api.fleet.until_row(job, "barn", "downloading")
        await barn.progress(job, backend="vllm", attempt=1, seq=1, percentage=50.0, phase="downloading")

        async def told(on: int) -> Any:
            return (await api.get(f"/api/operations/{job}", on=on)).json["nodes"][0]

        async def both_heard() -> bool:
            return all([(await told(on))["percentage"] == 50.0 for on in (0, 1)])

        await until(both_heard)
        assert await told(0) == await told(1)
        cancelled = await api.post(f"/api/operations/{job}/cancel", on=1)
        assert cancelled.status == 200
        assert (await api.get(f"/api/operations/{job}", on=0)).json["outcome"] == "cancelled"
    async with open_api(tmp_path) as api:  # the whole of it anew, on the same database
        again = await api.get(f"/api/operations/{job}")
        assert (again.json["outcome"], again.json["nodes"][0]["status"]) == ("cancelled", "cancelled")


async def test_a_plan_tells_each_node_and_stores_nothing(api: Api) -> None:
    barn = await api.fleet.corral("barn")
    await api.fleet.corral("stall", joins=False, status="offline", capability="nvidia")
    answer = await api.post("/api/operations?plan=true", {"backend": "vllm"})
    assert answer.status == 200
    assert (answer.json["kind"], answer.json["backend"]) == ("install", "vllm")
    first, second = answer.json["nodes"]
    assert {key: first[key] for key in ("node_name", "action", "variant", "digest")} == {
        "node_name": "barn",
        "action": "install",
        "variant": "cpu-vllm",
        "digest": "sha256:cpu-vllm-1",
    }
    assert (second["variant"], second["waits"]) == ("cuda-vllm", True)
    async with api.fleet.store.read() as tx:
        assert await operations.list_(tx, limit=9) == []
    assert not barn.orders()


async def test_scope_by_node_and_by_selector(api: Api) -> None:
    await api.fleet.corral("barn", labels={"tier": "fast"})
    await api.fleet.corral("stall")
    by_label = await api.install(selector="tier=fast")
    by_name = await api.install("llama-cpp", node="stall")
    assert [row.node_name for row in (await api.fleet.until(by_label, "done")).nodes] == ["barn"]
    view = (await api.get(f"/api/operations/{by_name}")).json
    assert [row["node_name"] for row in view["nodes"]] == ["stall"]
    assert (view["scope"], view["scope_value"], view["nodeID"]) == ("node", "stall", "id-of-stall")
    await api.fleet.until(by_name, "done")
    bare = (await api.get("/api/operations?all=true&rows=false")).json["operations"]
    assert {entry["scope_value"] for entry in bare} == {"stall", "tier=fast"}
