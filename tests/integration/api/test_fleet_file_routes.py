"""`/api/apply` and `/api/export`: a fleet out of one file, and back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from corral.controller.backends.plan import NoBuild
from tests.support.backend_api import Api
from tests.support.scripted_catalogue import build
from tests.support.waiting import until

FILE = """
labels: {barn: {tier: fast}, nowhere: {a: b}}
backends: [vllm]
models:
  - {model: smollm2-135m, overrides: {context_size: 2048}}
  - {name: mine, backend: vllm}
schedules:
  - {model_name: mine, min_replicas: 2, node_selector: {tier: fast}}
"""


async def apply(api: Api, text: str, **more: Any) -> dict[str, str]:
    answer = await api.post("/api/apply", {"text": text, **more})
    assert answer.status == 200, answer.raw
    return {f"{each['kind']} {each['name']}": each["action"] for each in answer.json["changes"]}


async def test_a_file_is_shown_brought_about_and_then_means_nothing_new(api: Api) -> None:
    await api.fleet.corral("barn")
    expected = {
        "label barn": "change",
        "label nowhere": "skip",
        "backend vllm": "create",
        "model smollm2-135m": "create",
        "model mine": "create",
        "schedule mine": "create",
    }
    assert await apply(api, FILE, dry_run=True) == expected
    assert (await api.get("/api/models")).json == []
    assert await apply(api, FILE) == expected
    shown = (await api.get("/api/models/smollm2-135m")).json
    assert (shown["definition"]["context_size"], shown["created_by"]) == (2048, "boss")
    assert (await api.get("/api/nodes/scheduling/mine")).json["min_replicas"] == 2
    again = await apply(api, FILE)
    assert {action for name, action in again.items() if name != "label nowhere"} == {"nothing"}


async def test_what_differs_is_told_key_by_key(api: Api) -> None:
    await apply(api, FILE)
    changed = FILE.replace("{name: mine, backend: vllm}", "{name: mine, backend: mlx-lm, f16: true}")
    changed = changed.replace("min_replicas: 2", "min_replicas: 3")
    answer = (await api.post("/api/apply", {"text": changed})).json
    told = {each["kind"]: each for each in answer["changes"] if each["action"] == "change"}
    assert told["schedule"]["details"] == ["min_replicas: 2 → 3"]
    assert told["model"]["details"] == ["backend: vllm → mlx-lm", "+ f16: true"]
    assert (await api.get("/api/models/mine")).json["backend"] == "mlx-lm"


async def test_what_was_exported_brings_the_same_about(api: Api) -> None:
    await api.fleet.corral("barn")
    await apply(api, FILE)
    exported = (await api.get("/api/export", key=api.viewer)).json
    assert [each["name"] for each in exported["models"]] == ["mine", "smollm2-135m"]
    assert exported["backends"] == [{"backend": "vllm"}]
    assert exported["labels"] == {"barn": {"tier": "fast"}}
    assert exported["schedules"] == [{"model_name": "mine", "node_selector": {"tier": "fast"}, "min_replicas": 2}]
    assert set((await apply(api, json.dumps(exported))).values()) == {"nothing"}


async def test_only_with_prune_what_the_file_does_not_name_goes(api: Api) -> None:
    await apply(api, FILE)
    less = "models: [{name: mine, backend: vllm}]"
    assert await apply(api, less) == {"model mine": "nothing"}
    pruned = {"model mine": "nothing", "model smollm2-135m": "delete", "schedule mine": "delete"}
    assert await apply(api, less, prune=True, dry_run=True) == pruned
    assert await apply(api, less, prune=True) == pruned
    assert [each["id"] for each in (await api.get("/api/models")).json] == ["mine"]
    assert (await api.get("/api/nodes/scheduling")).json == []


async def test_one_that_fails_does_not_stop_the_rest(api: Api) -> None:
    text = "backends: [no-such-backend]\nmodels: [no-such-model, {name: mine, backend: vllm}]\n"
    answer = (await api.post("/api/apply", {"text": text})).json["changes"]
    failed = [(each["name"], each.get("failed", False)) for each in answer]
    assert failed == [("no-such-backend", True), ("no-such-model", True), ("mine", False)]
    assert "no-such-model" in answer[1]["reason"]
    assert [each["id"] for each in (await api.get("/api/models")).json] == ["mine"]


NEEDS_A_MAC = "backends: [mlx-lm]\nmodels: [{name: mine, backend: vllm}]\n"


def only_for_macs(api: Api) -> None:
    api.fleet.catalogue.builds["mlx-lm"] = {"*": NoBuild("needs a Mac"), "metal": build("mlx-lm")}


async def changes(api: Api, text: str, **more: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await api.post("/api/apply", {"text": text, **more})).json["changes"]
    return found


@pytest.mark.parametrize("dry_run", [True, False])
async def test_a_backend_that_fits_no_node_is_told_at_once_and_kept_for_those_who_join(api: Api, dry_run: bool) -> None:
    only_for_macs(api)
    await api.fleet.corral("barn")
    await api.fleet.corral("shed")
    backend, model = await changes(api, NEEDS_A_MAC, dry_run=dry_run)
    assert (backend["action"], backend.get("failed", False)) == ("create", False)
    assert backend["reason"] == "fits no node now (barn, shed: needs a Mac); one that joins and fits gets it"
    assert (model["action"], "reason" in model) == ("create", False)
    if not dry_run:
        mac = await api.fleet.corral("mac", capability="metal", os="darwin", arch="arm64")
        await until(lambda: "mlx-lm" in mac.installed)


async def test_a_backend_that_fits_some_nodes_tells_why_not_the_others(api: Api) -> None:
    only_for_macs(api)
    await api.fleet.corral("barn")
    await api.fleet.corral("mac", capability="metal", os="darwin", arch="arm64")
    (backend,) = await changes(api, "backends: [mlx-lm]", dry_run=True)
    assert "reason" not in backend
    assert backend["details"] == ["on every node", "not on barn: needs a Mac"]
    (backend,) = await changes(api, "backends: [{backend: mlx-lm, node: barn}]", dry_run=True)
    assert backend["reason"] == "fits no node now (barn: needs a Mac)"


async def test_a_selector_means_nodes_with_the_labels_the_file_gives(api: Api) -> None:
    await api.fleet.corral("barn")
    text = "backends: [{backend: vllm, selector: tier=fast}]\n"
    (backend,) = await changes(api, text, dry_run=True)
    assert backend["reason"] == "there is no node with tier=fast yet"
    _, backend = await changes(api, text + "labels: {barn: {tier: fast}}", dry_run=True)
    assert "reason" not in backend


@pytest.mark.parametrize("dry_run", [True, False])
async def test_what_an_install_would_be_refused_with_fails_also_without_doing_it(api: Api, dry_run: bool) -> None:
    await api.fleet.corral("barn")
    text = "backends: [vlm, cuda-vllm]\nmodels: [{name: mine, backend: vlm}]\n"
    unknown, concrete, model = await changes(api, text, dry_run=dry_run)
    assert (unknown["failed"], unknown["action"], "did you mean vllm?" in unknown["reason"]) == (True, "skip", True)
    assert (concrete["failed"], "choose a node for it" in concrete["reason"]) == (True, True)
    assert (model["action"], "reason" in model) == ("create", False)  # the file asks for its backend: told there
    (model,) = await changes(api, "models: [{name: other, backend: vlm}]", dry_run=dry_run)
    assert (model["action"], "vllm" in model["reason"], model.get("failed", False)) == ("create", True, False)


async def test_a_file_that_cannot_be_meant_does_nothing_at_all(api: Api) -> None:
    answer = await api.post("/api/apply", {"text": "models: [{name: mine, backend: vllm}]\nmodel: x"})
    assert answer.status == 400
    assert (await api.get("/api/models")).json == []
    assert (await api.post("/api/apply", {"text": FILE}, key=api.viewer)).status == 403
