"""The admin API from outside: rights, keys, tokens, labels, pages, events, its own description."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest

from tests.integration.controller.test_node_self_service import HandMadeNode
from tests.support.cluster import Cluster
from tests.support.fleet import Answer, http
from tests.support.waiting import wait_for


def api(cluster: Cluster, method: str, path: str, body: object = None, *, key: str = "") -> Answer:
    return http(method, cluster.members[0].url + path, key=key or cluster.key, body=body)


def make_key(cluster: Cluster, **asked: Any) -> dict[str, Any]:
    answer = api(cluster, "POST", "/api/keys", asked)
    assert answer.status == 201, answer.body
    return dict(answer.json())


def test_a_viewer_sees_everything_and_changes_nothing(cluster: Cluster) -> None:
    node = HandMadeNode(cluster)
    node.register()
    viewer = make_key(cluster, name="eyes", role="viewer")["secret"]
    for path in ("/api/nodes", f"/api/nodes/{node.name}", f"/api/nodes/{node.name}/labels", "/api/cluster", "/api/me"):
        assert api(cluster, "GET", path, key=viewer).status == 200, path
    refused = [
        ("POST", f"/api/nodes/{node.name}/approve"),
        ("POST", f"/api/nodes/{node.name}/drain"),
        ("POST", f"/api/nodes/{node.name}/replace"),
        ("DELETE", f"/api/nodes/{node.name}"),
        ("PATCH", f"/api/nodes/{node.name}/labels"),
        ("GET", "/api/keys"),
        ("POST", "/api/keys"),
        ("GET", "/api/tokens"),
        ("POST", "/api/tokens"),
        ("GET", "/internal/view"),
    ]
    for method, path in refused:
        answer = api(cluster, method, path, {} if method != "GET" else None, key=viewer)
        assert answer.status == 403, (method, path, answer.body)
    assert api(cluster, "GET", "/api/me", key=viewer).json()["role"] == "viewer"


def test_an_inference_key_opens_no_admin_door(cluster: Cluster) -> None:
    key = make_key(cluster, name="app", role="inference")["secret"]
    for path in ("/api/nodes", "/api/cluster", "/api/events", "/api/keys", "/controller/metrics"):
        assert api(cluster, "GET", path, key=key).status == 403, path


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"role": "root"}, "unknown role"),
        ({"ttl_s": 0}, "ttl_s"),
        ({"ttl_s": -5}, "ttl_s"),
        ({"name": "x" * 300}, "255"),
        ({"limits": {"concurrent": 0}}, "at least 1"),
        ({"limits": {"concurrent": "many"}}, "concurrent"),
        ("words", "Expected"),
    ],
)
def test_a_bad_key_request_says_what_is_wrong(cluster: Cluster, asked: object, sentence: str) -> None:
    answer = api(cluster, "POST", "/api/keys", asked)
    assert answer.status == 400
    assert sentence in answer.json()["error"]["message"]


@pytest.mark.parametrize("asked", [{"uses": 0}, {"uses": -1}, {"ttl_s": 0}, {"ttl_s": 1e99}, {"name": "x" * 300}])
def test_a_bad_token_request_says_what_is_wrong(cluster: Cluster, asked: dict[str, Any]) -> None:
    answer = api(cluster, "POST", "/api/tokens", asked)
    assert answer.status == 400
    assert next(iter(asked)) in answer.json()["error"]["message"]


def test_secrets_are_shown_once(cluster: Cluster) -> None:
    key = make_key(cluster, name="once", role="viewer")
    token = api(cluster, "POST", "/api/tokens", {"name": "once"}).json()
    assert f"corral join {cluster.members[0].url} --token {token['secret']}" in token["join_command"]
    for path in ("/api/keys", "/api/tokens"):
        listed = api(cluster, "GET", path).body.decode()
        assert "once" in listed
        assert key["secret"] not in listed
        assert token["secret"] not in listed
        assert "hash" not in listed


def test_a_revoked_or_expired_key_is_refused(cluster: Cluster) -> None:
    key = make_key(cluster, name="brief", role="viewer")
    assert api(cluster, "DELETE", f"/api/keys/{key['key']['id']}").status == 204
    answer = api(cluster, "GET", "/api/nodes", key=key["secret"])
    assert answer.status == 401
    assert "revoked" in answer.json()["error"]["message"]
    short = make_key(cluster, name="short", role="viewer", ttl_s=0.05)["secret"]
    wait_for(lambda: api(cluster, "GET", "/api/nodes", key=short).status == 401, "expired key")


def test_nobody_locks_themselves_out(cluster: Cluster) -> None:
    answer = api(cluster, "DELETE", "/api/keys/admin")
    assert answer.status == 400
    assert "another one" in answer.json()["error"]["message"]
    second = make_key(cluster, name="second admin", role="admin")
    assert api(cluster, "DELETE", "/api/keys/nobody").status == 404
    assert api(cluster, "DELETE", "/api/keys/second admin".replace(" ", "%20")).status == 204
    assert api(cluster, "GET", "/api/nodes", key=second["secret"]).status == 401


def test_nodes_are_found_by_name_and_id_and_misspellings_are_helped(cluster: Cluster) -> None:
    node = HandMadeNode(cluster, name="strawberry-field")
    node.register()
    assert api(cluster, "GET", f"/api/nodes/{node.id}").json()["name"] == "strawberry-field"
    answer = api(cluster, "GET", "/api/nodes/strawbery-feild")
    assert answer.status == 404
    assert "did you mean strawberry-field" in answer.json()["error"]["message"]


def test_pages_of_nodes(cluster: Cluster) -> None:
    for letter in "abc":
        HandMadeNode(cluster, name=f"page-{letter}").register()
    first = api(cluster, "GET", "/api/nodes?limit=2&after=page-").json()
    assert [node["name"] for node in first] == ["page-a", "page-b"]
    second = api(cluster, "GET", "/api/nodes?limit=1&after=page-b").json()
    assert [node["name"] for node in second] == ["page-c"]
    assert api(cluster, "GET", "/api/nodes?limit=0").status == 400
    assert api(cluster, "GET", "/api/nodes?limit=many").status == 400


def test_labels(cluster: Cluster) -> None:
    node = HandMadeNode(cluster)
    node.register()
    path = f"/api/nodes/{node.name}/labels"
    assert api(cluster, "PATCH", path, {"tier": "fast", "a/b": "c"}).json()["tier"] == "fast"
    assert api(cluster, "GET", path).json()["node.name"] == node.name
    assert api(cluster, "DELETE", path + "/tier").status == 204
    assert api(cluster, "DELETE", path + "/a/b").status == 204
    assert api(cluster, "PUT", path, {"only": "this"}).json() == {"only": "this"}
    assert api(cluster, "PATCH", path, {"k" * 129: "v"}).status == 400
    assert api(cluster, "PATCH", path, {"k": 3}).status == 400
    assert api(cluster, "GET", "/api/nodes/nobody/labels").json() == {}
    assert api(cluster, "PATCH", "/api/nodes/nobody/labels", {"k": "v"}).status == 404


@pytest.mark.parametrize("value", ["150%", "-1", "lots", "12QB"])
def test_a_bad_budget_is_refused(cluster: Cluster, value: str) -> None:
    node = HandMadeNode(cluster)
    node.register()
    assert api(cluster, "PUT", f"/api/nodes/{node.name}/vram-budget", {"value": value}).status == 400
    assert api(cluster, "PUT", f"/api/nodes/{node.name}/max-replicas-per-model", {"value": 0}).status == 400


def test_events_tell_the_present_and_then_every_change(cluster: Cluster) -> None:
    node = HandMadeNode(cluster)
    node.register()
    request = urllib.request.Request(
        cluster.members[0].url + "/api/events", headers={"Authorization": f"Bearer {cluster.key}"}
    )
    with urllib.request.urlopen(request, timeout=60) as stream:
        assert stream.headers["Content-Type"].startswith("text/event-stream")
        events = _events(stream)
        present = []
        for name, data in events:
            if name == "ready":
                break
            present.append(data["name"])
        assert node.name in present
        node.admin("POST", "/approve")
        assert _next(events, "node", node.id)["status"] == "healthy"
        api(cluster, "POST", "/api/tokens", {})
        assert next(data for name, data in events if name == "changed") == {"kind": "tokens"}
        node.admin("DELETE")
        assert next(data for name, data in events if name == "node-removed") == {"id": node.id}


def _events(stream: Any) -> Any:
    name = ""
    for raw in stream:
        line = raw.decode().rstrip("\n")
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


def _next(events: Any, wanted: str, node_id: str) -> dict[str, Any]:
    return next(data for name, data in events if name == wanted and data["id"] == node_id)


def test_the_api_describes_itself(cluster: Cluster) -> None:
    schema = api(cluster, "GET", "/openapi.json").json()
    assert schema["info"]["title"] == "Corral"
    paths = schema["paths"]
    for path in ("/api/nodes", "/api/nodes/{node}", "/api/keys", "/api/tokens", "/api/node/register", "/api/events"):
        assert path in paths, path
    assert not any(path.startswith("/internal") for path in paths)
    for path, methods in paths.items():
        for method, described in methods.items():
            assert described.get("summary"), f"{method} {path} has no summary"


def test_unknown_routes_and_methods_answer_in_json(cluster: Cluster) -> None:
    answer = api(cluster, "GET", "/api/nothing")
    assert answer.status == 404
    assert "/docs" in answer.json()["error"]["message"]
    assert api(cluster, "POST", "/api/cluster", {}).status == 405


def test_request_ids_go_through_and_come_back(cluster: Cluster) -> None:
    member = cluster.members[0]
    answer = http("GET", member.url + "/api/me", key=cluster.key, headers={"X-Request-Id": "follow-me-1"})
    assert answer.headers["x-request-id"] == "follow-me-1"


def test_metrics_of_the_controller(cluster: Cluster) -> None:
    text = api(cluster, "GET", "/controller/metrics").body.decode()
    assert "corral_bus_connected 1.0" in text
    assert 'corral_nodes{status="pending"}' in text
    assert http("GET", cluster.members[0].url + "/controller/healthz").status == 200
    assert http("GET", cluster.members[0].url + "/controller/metrics").status == 401


def test_the_log_tells_who_did_it(cluster: Cluster) -> None:
    node = HandMadeNode(cluster)
    node.register()
    helper = make_key(cluster, name="helper", role="admin")
    assert api(cluster, "POST", f"/api/nodes/{node.name}/approve", key=helper["secret"]).status == 200
    assert api(cluster, "DELETE", f"/api/keys/{helper['key']['id']}").status == 204
    controller = cluster.members[0].controller
    assert controller is not None
    lines = controller.output().splitlines()
    assert any("node status" in line and node.name in line and "by=helper" in line for line in lines)
    assert any("API key revoked" in line and "key=helper" in line and "by=admin" in line for line in lines)


@pytest.mark.parametrize("body", [{"name": "x", "models": 1.5}, {"name": "x", "models": [1]}, {"models": "tiny"}])
def test_a_key_of_the_body_that_is_called_like_a_service_is_the_callers_fault(
    cluster: Cluster, body: dict[str, Any]
) -> None:
    answer = api(cluster, "POST", "/api/keys", body)
    assert answer.status == 400, answer.body
    assert "models" in answer.json()["error"]["message"]
