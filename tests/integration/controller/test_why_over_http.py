"""`/api/why/…` and `corral why`, against a controller process."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from tests.support.cluster import Cluster
from tests.support.fleet import Answer, http
from tests.support.processes import CORRAL

NODE = {
    "name": "barn",
    "address": "barn.test:50051",
    "http_address": "barn.test:50050",
    "token": "shared-token-of-localai",
    "total_ram": 64 * 1024**3,
    "available_ram": 60 * 1024**3,
}
MODEL: dict[str, Any] = {
    "name": "org/tiny",
    "backend": "llama-cpp",
    "memory": "4GiB",
    "parameters": {"model": "w.gguf"},
}
NO_BUILD = "no build of llama-cpp: no gallery that a LocalAI worker can read has it"


@pytest.fixture(scope="module")
def told(cluster: Cluster) -> Cluster:
    url = cluster.members[0].url
    made = http("POST", f"{url}/api/node/register", key="shared-token-of-localai", body=NODE)
    assert made.status == 201, made
    http("POST", f"{url}/api/nodes/barn/approve", key=cluster.key)
    assert http("POST", f"{url}/api/models", key=cluster.key, body={"definition": MODEL}).status == 201
    other = {"definition": {"name": "other-name", "alias": "org/tiny"}}
    assert http("POST", f"{url}/api/models", key=cluster.key, body=other).status == 201
    return cluster


def ask(cluster: Cluster, path: str, *, key: str = "") -> Answer:
    return http("GET", f"{cluster.members[0].url}/api/why/{path}", key=key or cluster.key)


@pytest.mark.parametrize("name", ["org%2Ftiny", "other-name"])
def test_a_model_by_its_name_or_by_another(told: Cluster, name: str) -> None:
    answer = ask(told, f"models/{name}")
    assert answer.status == 200, answer
    why = answer.json()
    assert (why["model"], why["decision"]) == ("org/tiny", "no_room")
    [barn] = why["nodes"]
    assert (barn["node"], barn["eligible"]) == ("barn", False)
    backend = next(check for check in barn["checks"] if check["name"] == "backend")
    assert (backend["ok"], backend["text"]) == (False, NO_BUILD)
    assert barn["checks"][-1]["text"] == "needs 4.0 GiB of RAM; RAM: 59.0 GiB free of 63.0 GiB"


def test_a_node_by_its_name(told: Cluster) -> None:
    why = ask(told, "nodes/barn").json()
    assert why["node"] == "barn"
    assert [space["name"] for space in why["spaces"]] == ["RAM"]
    assert [each["model"] for each in why["models"]] == ["org/tiny"]


def test_what_is_not_there(told: Cluster) -> None:
    unknown = ask(told, "models/org%2Ftinny")
    assert unknown.status == 404
    assert "org/tiny" in unknown.json()["error"]["message"]
    assert ask(told, "nodes/nobody").status == 404
    assert ask(told, "models/org%2Ftiny", key="ck_wrong").status == 401


def test_people_read_it_on_the_command_line(told: Cluster) -> None:
    def run(*words: str) -> str:
        place = {"CORRAL_URL": told.members[0].url, "CORRAL_KEY": told.key}
        return subprocess.run(
            [*CORRAL, "why", *words], env=told.env | place, capture_output=True, text=True, timeout=30, check=True
        ).stdout

    lines = run("model", "org/tiny").splitlines()
    assert lines[0].split() == ["model", "org/tiny"]
    assert lines[1].startswith("next replica  no node can run org/tiny (needs ")
    assert lines[-1].split()[:2] == ["barn", "no"]
    assert f"  no  backend   {NO_BUILD}" in run("model", "org/tiny", "--numbers")
    assert json.loads(run("model", "org/tiny", "--json"))["memory_bytes"] == 4 * 1024**3
    assert "RAM" in run("node", "barn")
    assert json.loads(run("node", "barn", "--json"))["node"] == "barn"
