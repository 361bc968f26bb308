"""`/backends` from outside: codes and bodies of docs/reference/wire/http-backends.md."""

from __future__ import annotations

import pytest

from corral.contract.messages.backends import NodeDrift, UpgradeInfo
from tests.integration.api.backend_requests import NEWER, checked, has, installed_vllm, nothing_stored, sentence
from tests.support.backend_api import Api
from tests.support.waiting import until


async def test_apply_answers_200_with_id_and_an_absolute_status_url(api: Api) -> None:
    barn = await api.fleet.corral("barn")
    answer = await api.post("/backends/apply", {"id": "vllm"})
    assert answer.status == 200
    job = answer.json["id"]
    assert answer.json == {"id": job, "status_url": f"{api.urls[0]}/backends/jobs/{job}"}
    await api.fleet.until(job, "done")
    status = await api.get(f"/backends/jobs/{job}")
    assert status.status == 200
    told = status.json
    assert told.pop("nodes")[0]["status"] == "success"
    assert told == {
        "deletion": False,
        "file_name": "",
        "processed": True,
        "message": "completed",
        "progress": 100,
        "file_size": "",
        "downloaded_size": "",
        "gallery_element_name": "vllm",
        "cancelled": False,
        "cancellable": False,
    }
    assert len(barn.orders("install")) == 1
    forced = await api.post("/backends/apply", {"id": "vllm", "force": True})
    await api.fleet.until(forced.json["id"], "done")
    assert barn.orders("install")[1]["force"] is True


async def test_an_unknown_job_under_backends_is_an_error(api: Api) -> None:
    answer = await api.get("/backends/jobs/nobody-knows")
    assert answer.status == 404
    assert answer.json == {"error": {"code": 404, "message": "there is no operation nobody-knows", "type": "not_found"}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/backends/apply", {"id": "cuda-vllm"}),
        ("/api/backends/install/cuda-vllm", None),
        ("/api/operations", {"backend": "cuda-vllm"}),
        ("/api/operations?plan=true", {"backend": "cuda-vllm", "selector": "tier=fast"}),
    ],
)
async def test_a_build_for_one_kind_of_machine_needs_a_target(api: Api, path: str, body: object) -> None:
    await api.fleet.corral("barn")
    answer = await api.post(path, body)
    assert answer.status == 409
    assert answer.json == {
        "error": "cuda-vllm is a build for one kind of machine: choose a node for it; install vllm instead",
        "code": "concrete_backend_requires_target",
        "meta_alternative": "vllm",
    }
    assert await nothing_stored(api)
    targeted = await api.post("/api/nodes/barn/backends/install", {"backend": "cuda-vllm"})
    assert targeted.status == 202


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/backends/apply", {"id": "vlm"}),
        ("/api/backends/install/vlm", None),
        ("/api/operations", {"backend": "vlm"}),
        ("/api/nodes/barn/backends/install", {"backend": "vlm"}),
    ],
)
async def test_an_unknown_backend_is_404_with_what_is_near(api: Api, path: str, body: object) -> None:
    await api.fleet.corral("barn")
    answer = await api.post(path, body)
    assert answer.status == 404
    assert "did you mean vllm?" in sentence(answer)
    assert await nothing_stored(api)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/backends/upgrade/vllm", None),
        ("/api/backends/upgrade/vllm", None),
        ("/api/operations", {"kind": "upgrade", "backend": "vllm"}),
        ("/api/nodes/barn/backends/upgrade", {"backend": "vllm"}),
        ("/backends/delete/vllm", None),
        ("/api/backends/delete/vllm", None),
        ("/api/backends/rollback/vllm", None),
    ],
)
async def test_to_upgrade_or_delete_what_nobody_has_is_404_and_stores_nothing(
    api: Api, path: str, body: object
) -> None:
    barn = await api.fleet.corral("barn")
    barn.put("vllm-omni")
    await barn.beat()
    await until(lambda: has(api, "barn", "vllm-omni"))
    answer = await api.post(path, body)
    assert answer.status == 404
    assert "backend 'vllm' is not installed" in sentence(answer)
    assert "did you mean vllm-omni?" in sentence(answer)
    assert await nothing_stored(api)


async def test_upgrade_and_delete_by_name_and_their_scope(api: Api) -> None:
    barn, stall = await api.fleet.corral("barn"), await api.fleet.corral("stall")
    for worker in (barn, stall):
        worker.put("vllm", digest="sha256:old")
        await worker.beat()
    await until(lambda: has(api, "barn", "vllm"))
    await until(lambda: has(api, "stall", "vllm"))
    upgraded = await api.post("/backends/upgrade/vllm?node=barn&max_parallel=1")
    assert upgraded.status == 200
    await api.fleet.until(upgraded.json["id"], "done")
    assert barn.installed["vllm"]["digest"] == "sha256:cpu-vllm-1"
    assert stall.installed["vllm"]["digest"] == "sha256:old"
    deleted = await api.post("/api/backends/delete/vllm?force=true")
    assert deleted.status == 200
    assert deleted.json["message"] == "deletion of vllm started"
    view = await api.fleet.until(deleted.json["jobID"], "done")
    assert view.task_type == "deletion"
    assert barn.installed == stall.installed == {}


async def test_what_is_installed_is_listed_with_its_nodes(api: Api) -> None:
    barn, stall = await api.fleet.corral("barn"), await api.fleet.corral("stall", joins=False, status="offline")
    barn.put("vllm", version="1.0", digest="sha256:a", uri="registry.test/vllm:1", gallery_url="https://gallery.test")
    barn.put("espeak", is_system=True)
    await barn.beat()
    await until(lambda: has(api, "barn", "vllm"))
    await checked(api, vllm=NEWER)
    answer = await api.get("/backends", key=api.viewer)
    assert answer.status == 200
    espeak, vllm = answer.json
    assert (espeak["Name"], espeak["IsSystem"], espeak["IsMeta"]) == ("espeak", True, False)
    assert vllm.pop("nodes")[0] == {
        "node_id": "id-of-barn",
        "node_name": "barn",
        "node_status": "healthy",
        "version": "1.0",
        "digest": "sha256:a",
        "uri": "registry.test/vllm:1",
        "installed_at": barn.installed["vllm"]["installed_at"],
    }
    assert vllm.pop("Metadata")["gallery_url"] == "https://gallery.test"
    assert vllm == {
        "Name": "vllm",
        "RunFile": "",
        "IsMeta": False,
        "IsSystem": False,
        "upgrade_available": True,
        "available_version": "2.0",
    }
    assert stall.orders() == []


async def test_the_catalogue_says_what_is_installed_anywhere(api: Api) -> None:
    await installed_vllm(api)
    available = (await api.get("/backends/available")).json
    assert {row["name"]: row["installed"] for row in available} == {"llama-cpp": False, "vllm": True}
    known = (await api.get("/backends/known")).json
    assert known[1] == {"name": "vllm", "description": "the vllm", "installed": True}
    assert (await api.get("/backends/galleries")).json == [{"name": "test", "url": "https://gallery.test/index.yaml"}]


async def test_upgrades_are_told_as_last_found_and_checked_when_asked(api: Api) -> None:
    assert (await api.get("/backends/upgrades")).json == {}
    await installed_vllm(api)
    drift = (NodeDrift("id-of-stall", "stall", "0.9", "sha256:older"),)
    api.fleet.catalogue.newer = {"vllm": UpgradeInfo("vllm", "1.0", "2.0", "sha256:old", "sha256:new", drift)}
    before = api.fleet.catalogue.refreshed
    answer = await api.post("/backends/upgrades/check")
    assert answer.status == 200

    async def found() -> bool:
        return bool((await api.get("/backends/upgrades")).json)

    await until(found)
    assert api.fleet.catalogue.refreshed > before, "a person who asks does not want yesterday's copy"
    wanted = {
        "vllm": {
            "backend_name": "vllm",
            "installed_version": "1.0",
            "available_version": "2.0",
            "installed_digest": "sha256:old",
            "available_digest": "sha256:new",
            "node_drift": [
                {"node_id": "id-of-stall", "node_name": "stall", "version": "0.9", "digest": "sha256:older"}
            ],
        }
    }
    for path in ("/backends/upgrades", "/api/backends/upgrades"):
        assert (await api.get(path, key=api.viewer)).json == wanted
    told = (await api.get("/api/backends/upgrades/checked")).json
    assert told["upgrades"] == wanted
    assert told["checked_at"].endswith("Z")
    assert (await api.post("/api/backends/upgrades/check", key=api.viewer)).status == 403


async def test_one_button_upgrades_all_that_is_newer(api: Api) -> None:
    barn = await installed_vllm(api)
    api.fleet.catalogue.publish("vllm", "sha256:new")
    await checked(api, vllm=NEWER, gone=UpgradeInfo("gone", "1", "2"))
    answer = await api.post("/api/backends/upgrades/apply", {"max_parallel": "2"})
    assert answer.status == 202
    (job,) = answer.json["operations"]
    assert answer.json["refused"] == {"gone": "backend 'gone' is not installed on any node"}
    await api.fleet.until(job["jobID"], "done")
    assert barn.installed["vllm"]["digest"] == "sha256:new"
