"""`/api/backends` and `/api/nodes/:id/backends` from outside: codes and bodies of docs/reference/wire/http-backends.md
and docs/reference/wire/http-nodes.md."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from corral.contract.messages.backends import UpgradeInfo
from corral.store.tables import backend_rules
from tests.integration.api.backend_requests import checked, has, installed_vllm, nothing_stored, sentence
from tests.support.backend_api import Api, open_api
from tests.support.waiting import until

# ---- /api/backends


async def test_install_from_the_page_is_forced_and_answers_200(api: Api) -> None:
    barn = await installed_vllm(api)
    answer = await api.post("/api/backends/install/vllm")
    assert answer.status == 200
    assert answer.json["message"] == "installation of vllm started"
    job = answer.json["jobID"]
    await api.fleet.until(job, "done")
    assert barn.orders("install")[-1]["force"] is True
    assert (await api.get(f"/api/backends/job/{job}")).json == {
        "progress": 100,
        "message": "completed",
        "galleryElementName": "vllm",
        "processed": True,
        "deletion": False,
        "queued": False,
        "completed": True,
    }


async def test_an_unknown_job_of_the_page_is_a_queued_placeholder(api: Api) -> None:
    answer = await api.get("/api/backends/job/not-yet-seen")
    assert answer.status == 200
    assert answer.json == {
        "progress": 0,
        "message": "queued",
        "galleryElementName": "",
        "processed": False,
        "deletion": False,
        "queued": True,
    }


async def test_an_install_from_a_uri_is_stored_whole(api: Api) -> None:
    barn = await api.fleet.corral("barn")
    body = {"uri": "oci://registry.test/own:1", "name": "own", "alias": "mine"}
    answer = await api.post("/api/backends/install-external", body)
    assert answer.status == 200
    await api.fleet.until(answer.json["jobID"], "done")
    (order,) = barn.orders("install")
    assert order["backend"] == "own"
    assert order["sources"] == [{"kind": "oci", "uri": "oci://registry.test/own:1"}]
    async with api.fleet.store.read() as tx:
        (rule,) = await backend_rules.list_live(tx, "own")
    assert (rule.request.uri, rule.request.backend, rule.request.alias) == ("oci://registry.test/own:1", "own", "mine")
    empty = await api.post("/api/backends/install-external", {"name": "own"})
    assert (empty.status, empty.json) == (400, {"error": "uri is required", "code": "invalid"})


async def test_the_page_of_backends(api: Api) -> None:
    await installed_vllm(api)
    api.fleet.workers["barn"].script.hold = asyncio.Event()
    job = await api.install("llama-cpp")
    first = (await api.get("/api/backends?items=1&sort=name", key=api.viewer)).json
    assert (first["currentPage"], first["totalPages"], first["nextPage"], first["prevPage"]) == (1, 2, 2, 1)
    assert (first["availableBackends"], first["installedBackends"], first["allTags"]) == (2, 1, ["llm"])
    assert first["processingBackends"] == {"llama-cpp": job}
    (row,) = first["backends"]
    told = {key: row[key] for key in ("id", "name", "installed", "nodes", "processing", "jobID", "isDeletion")}
    assert told == {
        "id": "llama-cpp",
        "name": "llama-cpp",
        "installed": False,
        "nodes": [],
        "processing": True,
        "jobID": job,
        "isDeletion": False,
    }
    (found,) = (await api.get("/api/backends?term=VLL")).json["backends"]
    assert (found["name"], found["nodes"][0]["node_name"]) == ("vllm", "barn")
    assert (await api.get("/api/backends?tag=speech")).json["backends"] == []
    beyond = (await api.get("/api/backends?page=99&items=1&order=desc")).json
    assert (beyond["currentPage"], beyond["backends"][0]["name"]) == (2, "llama-cpp")
    for wrong in ("page=0", "items=0", "items=x", "sort=colour", "order=up"):
        answer = await api.get(f"/api/backends?{wrong}")
        assert answer.status == 400, wrong
        assert wrong.partition("=")[2] in answer.json["error"] or wrong.partition("=")[0] in answer.json["error"]
    api.fleet.workers["barn"].script.hold.set()
    await api.fleet.until(job, "done")


async def test_the_matrix_of_backends_and_nodes(api: Api) -> None:
    barn, stall = await api.fleet.corral("barn"), await api.fleet.corral("stall")
    await api.fleet.corral("away", joins=False, status="offline")
    barn.put("vllm", is_meta=True, meta_backend_for="cpu-vllm")
    barn.put("cpu-vllm", digest="sha256:new", version="2.0", alias="vllm", previous=["sha256:old"])
    stall.put("vllm", digest="sha256:old", version="1.0")
    for worker in (barn, stall):
        await worker.beat()
    await until(lambda: has(api, "barn", "vllm"))
    await until(lambda: has(api, "stall", "vllm"))
    await checked(api, vllm=UpgradeInfo("vllm", "1.0", "2.0", "sha256:old", "sha256:new"))
    job = await api.install("llama-cpp", node="away")
    answer = (await api.get("/api/backends/matrix", key=api.viewer)).json
    assert [(node["name"], node["status"], node.get("told", True)) for node in answer["nodes"]] == [
        ("away", "offline", False),
        ("barn", "healthy", True),
        ("stall", "healthy", True),
    ]
    llama, vllm = answer["backends"]
    assert (llama["backend"], vllm["backend"]) == ("llama-cpp", "vllm")
    assert llama["nodes"]["id-of-away"] == {
        "installed": False,
        "intent": {
            "kind": "install",
            "stage": "waiting",
            "operation": job,
            "reason": "node offline, will retry when healthy",
            "percentage": 0.0,
        },
    }
    assert vllm["nodes"]["id-of-barn"] == {
        "installed": True,
        "version": "2.0",
        "digest": "sha256:new",
        "variant": "cpu-vllm",
        "installed_at": barn.installed["cpu-vllm"]["installed_at"],
        "can_roll_back": True,
    }
    assert vllm["nodes"]["id-of-stall"]["outdated"] is True
    assert (vllm["upgrade_available"], vllm["available_version"]) == (True, "2.0")


def per_node(body: Any) -> list[tuple[str, str, str]]:
    """The answer tells the result on each node."""
    return [(row["node_name"], row["status"], row.get("error", "")) for row in body["nodes"]]


async def test_the_synchronous_delete_of_the_page(api: Api) -> None:
    barn = await installed_vllm(api)
    answer = await api.post("/api/backends/system/delete/vllm")
    assert (answer.status, answer.json["success"]) == (200, True)
    assert [(row["node_name"], row["status"]) for row in answer.json["nodes"]] == [("barn", "success")]
    assert barn.installed == {}
    barn.put("vllm")
    await barn.beat()
    await until(lambda: has(api, "barn", "vllm"))
    barn.script.failures = [{"error": "a process would not stop"}]
    failed = await api.post("/api/backends/system/delete/vllm")
    assert failed.status == 500
    assert failed.json["error"].startswith("barn: a process would not stop; will be tried again, see operation ")
    assert per_node(failed.json) == [("barn", "error", "a process would not stop")]


# ---- /api/nodes/:id/backends


async def test_a_nodes_own_list_and_what_is_to_be_done_there(api: Api) -> None:
    barn = await installed_vllm(api)
    barn.script.failures = [{"error": "disk full"}]
    job = await api.install("llama-cpp")
    await api.fleet.until(job, "failing")
    for name in ("barn", "id-of-barn"):
        vllm, llama = (await api.get(f"/api/nodes/{name}/backends", key=api.viewer)).json
        assert (vllm["name"], vllm["is_system"], vllm["is_meta"]) == ("vllm", False, False)
        assert vllm["digest"] == "sha256:cpu-vllm-1"
        assert llama["name"] == "llama-cpp"
        assert llama["installed"] is False
        assert llama["intent"]["reason"] == "disk full"
    await api.fleet.node("clerk", node_type="agent")
    assert (await api.get("/api/nodes/clerk/backends")).json == []
    missing = await api.get("/api/nodes/bran/backends")
    assert missing.status == 404
    assert missing.json["error"]["type"] == "node_error"
    assert "did you mean barn?" in missing.json["error"]["message"]


async def test_installing_on_a_node_answers_202_with_a_status_url(api: Api) -> None:
    await api.fleet.corral("barn")
    stall = await api.fleet.corral("stall")
    answer = await api.post("/api/nodes/barn/backends/install", {"backend": "vllm", "backend_galleries": "{not json"})
    assert answer.status == 202
    job = answer.json["jobID"]
    assert answer.json["statusUrl"] == f"/api/backends/job/{job}"
    assert answer.json["message"]
    view = await api.fleet.until(job, "done")
    assert [row.node_name for row in view.nodes] == ["barn"]
    assert (await api.get(answer.json["statusUrl"])).json["completed"] is True
    upgraded = await api.post("/api/nodes/barn/backends/upgrade", {"backend": "vllm"})
    assert upgraded.status == 202
    await api.fleet.until(upgraded.json["jobID"], "done")
    own = await api.post("/api/nodes/barn/backends/install", {"uri": "oci://registry.test/own:1", "name": "own"})
    assert own.status == 202
    await api.fleet.until(own.json["jobID"], "done")
    assert stall.orders() == []


async def test_neither_backend_nor_uri_is_400(api: Api) -> None:
    await api.fleet.corral("barn")
    for body in ({}, {"backend": "", "uri": ""}, {"name": "x"}):
        answer = await api.post("/api/nodes/barn/backends/install", body)
        assert answer.status == 400, body
        assert answer.json["error"]["type"] == "node_error"
        assert "name a backend" in answer.json["error"]["message"]


async def test_deleting_on_a_node_answers_when_it_is_done(api: Api) -> None:
    barn = await installed_vllm(api)
    answer = await api.post("/api/nodes/barn/backends/delete", {"backend": "vllm"})
    assert (answer.status, answer.json) == (200, {"message": "backend deleted"})
    assert barn.installed == {}
    gone = await api.post("/api/nodes/barn/backends/delete", {"backend": "vllm"})
    assert gone.status == 404


async def test_a_delete_that_fails_is_500(api: Api) -> None:
    barn = await installed_vllm(api)
    barn.script.failures = [{"error": "a process would not stop"}]
    failed = await api.post("/api/nodes/barn/backends/delete", {"backend": "vllm"})
    assert failed.status == 500
    assert failed.json["error"]["type"] == "node_error"
    assert "a process would not stop" in failed.json["error"]["message"]
    assert per_node(failed.json) == [("barn", "error", "a process would not stop")]


async def test_a_delete_that_must_wait_is_202(tmp_path: Path) -> None:
    async with open_api(tmp_path, settle_s=0.3) as api:
        barn = await installed_vllm(api)
        barn.script.hold = asyncio.Event()
        slow = await api.post("/api/nodes/barn/backends/delete", {"backend": "vllm", "force": True})
        assert slow.status == 202
        assert slow.json["message"].startswith("accepted, not done yet")
        assert per_node(slow.json) == [("barn", "downloading", "")]
        barn.script.hold.set()
        await api.fleet.until(slow.json["jobID"], "done")
        await api.fleet.until(await api.install("vllm"), "done")
        await api.fleet.set_node("barn", status="draining")
        away = await api.post("/api/nodes/barn/backends/delete", {"backend": "vllm"})
        assert away.status == 202
        assert away.json["message"] == "accepted, not done yet: node draining, will retry when healthy"
        assert per_node(away.json) == [("barn", "queued", "node draining, will retry when healthy")]
        everywhere = await api.post("/api/backends/system/delete/vllm")
        assert everywhere.status == 202
        assert per_node(everywhere.json) == [("barn", "queued", "node draining, will retry when healthy")]


async def test_a_plan_at_every_door_stores_nothing(api: Api) -> None:
    barn = await api.fleet.corral("barn")
    barn.put("vllm", digest="sha256:old", previous=["sha256:older"])
    await barn.beat()
    await until(lambda: has(api, "barn", "vllm"))
    doors: list[tuple[str, object, str]] = [
        ("/backends/apply", {"id": "vllm"}, "upgrade"),
        ("/backends/upgrade/vllm", None, "upgrade"),
        ("/backends/delete/vllm", None, "delete"),
        ("/api/backends/install/vllm", None, "reinstall"),
        ("/api/backends/upgrade/vllm", None, "upgrade"),
        ("/api/backends/delete/vllm", None, "delete"),
        ("/api/backends/rollback/vllm", None, "upgrade"),
        ("/api/nodes/barn/backends/install", {"backend": "vllm"}, "upgrade"),
        ("/api/nodes/barn/backends/upgrade", {"backend": "vllm"}, "upgrade"),
        ("/api/nodes/barn/backends/rollback", {"backend": "vllm"}, "upgrade"),
        ("/api/nodes/barn/backends/delete", {"backend": "vllm"}, "delete"),
    ]
    for path, body, action in doors:
        answer = await api.post(f"{path}?plan=true", body)
        assert answer.status == 200, (path, answer.raw)
        assert answer.json["nodes"][0]["action"] == action, path
    assert await nothing_stored(api)
    assert barn.orders() == []


async def test_rollback_goes_back_to_the_version_before(api: Api) -> None:
    barn = await installed_vllm(api)
    api.fleet.catalogue.publish("vllm", "sha256:new")
    upgraded = await api.post("/api/backends/upgrade/vllm")
    await api.fleet.until(upgraded.json["jobID"], "done")
    assert barn.installed["vllm"]["digest"] == "sha256:new"
    back = await api.post("/api/backends/rollback/vllm")
    assert (back.status, back.json["message"]) == (200, "rollback of vllm started")
    await api.fleet.until(back.json["jobID"], "done")
    assert barn.installed["vllm"]["digest"] == "sha256:cpu-vllm-1"


async def test_names_with_a_gallery_or_a_slash_reach_the_catalogue_whole(api: Api) -> None:
    await api.fleet.corral("barn")
    with_gallery = await api.post("/api/backends/install/test%40vllm")
    assert with_gallery.status == 200
    await api.fleet.until(with_gallery.json["jobID"], "done")
    with_slash = await api.post("/backends/delete/a%2Fb")
    assert with_slash.status == 404
    assert "'a/b'" in sentence(with_slash)


@pytest.mark.parametrize("path", ["/backends/apply", "/api/backends/install/vllm", "/api/nodes/barn/backends/delete"])
async def test_a_viewer_changes_nothing(api: Api, path: str) -> None:
    await api.fleet.corral("barn")
    assert (await api.post(path, {"id": "vllm"}, key=api.viewer)).status == 403
    assert await nothing_stored(api)


async def test_a_node_reads_what_it_has_again_when_asked(api: Api) -> None:
    barn = await api.fleet.corral("barn")
    await api.fleet.until(await api.fleet.install(), "done")
    whole = await api.post("/api/nodes/barn/backends/verify", {"backend": "vllm"})
    assert whole.status == 200
    assert whole.json == {"node": "barn", "backend": "vllm", "whole": True, "version": "1.0"}
    barn.damaged = tuple(f"lib/{number}.so" for number in range(30))
    damaged = (await api.post("/api/nodes/barn/backends/verify", {"backend": "vllm"})).json
    assert (damaged["whole"], damaged["damaged"], len(damaged["changed"])) == (False, 30, 20)


async def test_what_cannot_be_read_again_is_told_why(api: Api) -> None:
    await api.fleet.corral("barn")
    old = await api.fleet.localai("old-hand")
    old.put("vllm")
    await api.fleet.until(await api.fleet.install(), "done")

    async def asked(node: str, backend: str) -> tuple[int, str]:
        answer = await api.post(f"/api/nodes/{node}/backends/verify", {"backend": backend})
        return answer.status, answer.json["error"]["message"]

    assert await asked("bran", "vllm") == (404, "there is no node 'bran'; did you mean barn?")
    assert await asked("barn", "vlm") == (404, "'vlm' is not installed on barn; did you mean vllm?")
    status, why = await asked("old-hand", "vllm")
    assert (status, "LocalAI worker" in why) == (409, True)
    await api.fleet.set_node("barn", status="draining")
    assert await asked("barn", "vllm") == (409, "barn is draining; try again when it is healthy")
