"""`/api/rollouts` and `/api/why/operations` from outside: what they show, who may steer, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.backend_api import Api
from tests.support.waiting import until

UNKNOWN = "00000000-0000-0000-0000-000000000000"


async def on_trial(api: Api) -> str:
    """An upgrade whose canary soaks for an hour."""
    workers = [await api.fleet.corral(name) for name in ("barn", "byre")]
    await api.fleet.until(await api.install(), "done")
    assert all(worker.installed for worker in workers)
    api.fleet.catalogue.publish("vllm", "sha256:2")
    body = {"kind": "upgrade", "backend": "vllm", "soak": "1h", "max_errors": "1%", "min_requests": 50}
    job = (await api.post("/api/operations", body)).json["jobID"]

    async def soaks() -> bool:
        return bool((await api.get(f"/api/rollouts/{job}")).json["phase"] == "soak")

    await until(soaks)
    return str(job)


async def test_a_rollout_shows_its_limits_classes_and_nodes_and_ends_when_it_is_promoted(api: Api) -> None:
    job = await on_trial(api)
    shown = (await api.get(f"/api/rollouts/{job}")).json
    assert (shown["backend"], shown["soak"], shown["max_errors"], shown["min_requests"]) == ("vllm", "1h", 0.01, 50)
    (state,) = shown["classes"]
    assert (state["name"], state["nodes"], state["state"]) == ("cpu, linux/amd64", ["barn", "byre"], "soaking")
    assert [each["operation_id"] for each in (await api.get("/api/rollouts")).json["rollouts"]] == [job]
    why = (await api.get(f"/api/why/operations/{job}")).json
    assert why["operation"]["operation_id"] == why["rollout"]["operation_id"] == job
    assert any("50 of each are needed" in line for line in why["lines"])
    second = await api.post("/api/operations", {"kind": "upgrade", "backend": "vllm"})
    assert second.status == 409
    assert f"corral rollouts promote {job[:8]}" in second.json["error"]
    assert (await api.post(f"/api/rollouts/{job}/pause", {})).json["message"].startswith("paused")
    assert (await api.get(f"/api/rollouts/{job}")).json["paused_by"] == "boss"
    assert (await api.post(f"/api/rollouts/{job}/promote", {})).status == 200
    await api.fleet.until(job, "done")
    over = await api.post(f"/api/rollouts/{job}/abort", {})
    assert over.status == 400
    assert over.json["error"]["message"] == "the rollout is over: done"


async def test_an_abort_names_the_operation_that_takes_the_build_back(api: Api) -> None:
    job = await on_trial(api)
    assert (await api.post(f"/api/rollouts/{job}/abort", {})).status == 200

    async def reverted() -> Any:
        return (await api.get(f"/api/rollouts/{job}")).json.get("reverted_by")

    await until(reverted)
    (revert,) = await reverted()
    view = await api.fleet.until(revert, "done")
    assert (view.kind, view.created_by) == ("rollback", "")
    entry = (await api.get(f"/api/operations/{job}")).json
    assert (entry["outcome"], entry["error"]) == ("reverted", "aborted by boss")
    assert {worker.installed["vllm"]["digest"] for worker in api.fleet.workers.values()} == {"sha256:cpu-vllm-1"}


async def test_a_viewer_may_look_and_not_steer(api: Api) -> None:
    job = await on_trial(api)
    assert (await api.get(f"/api/rollouts/{job}", key=api.viewer)).status == 200
    for verb in ("pause", "resume", "promote", "abort"):
        assert (await api.post(f"/api/rollouts/{job}/{verb}", {}, key=api.viewer)).status == 403


async def test_an_install_is_no_rollout_and_an_unknown_one_is_not_found(api: Api) -> None:
    await api.fleet.corral("barn")
    job = await api.install()
    for id in (job, UNKNOWN):
        assert (await api.get(f"/api/rollouts/{id}")).status == 404
        assert (await api.post(f"/api/rollouts/{id}/abort", {})).status == 404
    assert "rollout" not in (await api.get(f"/api/why/operations/{job}")).json
    assert (await api.get(f"/api/why/operations/{UNKNOWN}")).status == 404


@pytest.mark.parametrize(
    "wrong", [{"soak": "soon"}, {"soak": "5m", "max_errors": "many"}, {"max_errors": "1%"}, {"max_slowdown": 0.1}]
)
async def test_a_soak_that_makes_no_sense_is_refused(api: Api, wrong: dict[str, Any]) -> None:
    answer = await api.post("/api/operations", {"kind": "upgrade", "backend": "vllm"} | wrong)
    assert answer.status == 400
    install = await api.post("/api/operations", {"kind": "install", "backend": "vllm", "soak": "5m"})
    assert "only an upgrade has a soak" in install.json["error"]
