"""What gateways tell of requests, and how people read it: over HTTP and by `corral requests`."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from tests.support.cluster import Cluster
from tests.support.fleet import Answer, http
from tests.support.processes import CORRAL

BATCH = {
    "gateway": "g1",
    "dropped": 2,
    "receipts": [
        {
            "id": f"r{number}",
            "at": 4_102_444_800.0 + number,
            "key_id": "gone",
            "model": "smol" if number % 2 else "other",
            "path": "/v1/chat/completions",
            "status": 200 if number else 503,
            "queue_ms": 1.5,
            "total_ms": 250.25,
            "prompt_tokens": 7,
            "completion_tokens": 5,
            "streamed": True,
            "ending": "client_left" if number == 3 else "",
        }
        | ({} if number else {"error": "model_busy", "error_text": "All replicas of `other` were busy."})
        for number in range(4)
    ],
}


def tell(cluster: Cluster, batch: dict[str, Any], *, key: str = "") -> Answer:
    gateway_key = (cluster.secrets / "gateway.key").read_text().strip()
    url = f"http://127.0.0.1:{cluster.members[0].controller_port}/internal/receipts"
    return http("POST", url, key=key or gateway_key, body=batch)


def read(cluster: Cluster, query: str = "") -> dict[str, Any]:
    answer = http("GET", f"{cluster.members[0].url}/api/requests{query}", key=cluster.key)
    assert answer.status == 200, answer
    return dict(answer.json())


@pytest.fixture(scope="module")
def told(cluster: Cluster) -> Cluster:
    assert tell(cluster, BATCH).status == 202
    assert tell(cluster, BATCH).status == 202  # its answer was lost
    return cluster


def test_they_are_listed_page_by_page(told: Cluster) -> None:
    first = read(told, "?limit=3")
    assert [row["id"] for row in first["requests"]] == ["r3", "r2", "r1"]
    rest = read(told, f"?limit=3&before={first['next'].replace('+', '%2B')}")
    assert [row["id"] for row in rest["requests"]] == ["r0"]
    assert rest["next"] == ""
    said = [(row["error"], row["error_text"]) for row in (*first["requests"][2:], *rest["requests"])]
    assert said == [("", ""), ("model_busy", "All replicas of `other` were busy.")]
    row = first["requests"][0]
    assert (row["at"], row["model"], row["total_ms"], row["queue_ms"]) == (
        "2100-01-01T00:00:03.000Z",
        "smol",
        250.25,
        1.5,
    )
    assert [row["id"] for row in read(told, "?model=smol")["requests"]] == ["r3", "r1"]
    for status in ("?failed=true", "?status=5xx", "?status=503", "?status=5XX&failed=true"):
        assert [row["id"] for row in read(told, status)["requests"]] == ["r0"]
    assert read(told, "?status=4xx")["requests"] == []
    assert [row["id"] for row in read(told, "?since=2100-01-01T00:00:02Z")["requests"]] == ["r3", "r2"]


def test_only_gateways_tell_and_only_viewers_read(told: Cluster) -> None:
    assert tell(told, BATCH, key=told.key).status == 403
    assert http("GET", f"{told.members[0].url}/api/requests", key="ck_wrong").status == 401
    assert http("GET", f"{told.members[0].url}/api/requests?before=x", key=told.key).status == 400
    refused = http("GET", f"{told.members[0].url}/api/requests?status=9xx", key=told.key)
    assert (refused.status, "4xx or 5xx" in refused.body.decode()) == (400, True)
    assert http("GET", f"{told.members[0].url}/api/requests?since=2100-01-01T00:00:02", key=told.key).status == 400


def test_they_are_counted_in_the_metrics_of_the_controller(told: Cluster) -> None:
    """The sender's key and model are unknown to the fleet, so they are no labels."""
    lines = http("GET", f"{told.members[0].url}/controller/metrics", key=told.key).body.decode().splitlines()
    assert 'corral_requests_total{key="other",model="other",node="none",status="200"} 6.0' in lines
    assert 'corral_completion_tokens_total{key="other",model="other",node="none"} 40.0' in lines
    assert 'corral_queue_seconds_count{model="other",node="none"} 8.0' in lines


def test_people_read_them_on_the_command_line(told: Cluster) -> None:
    def run(*words: str) -> str:
        place = {"CORRAL_URL": told.members[0].url, "CORRAL_KEY": told.key}
        return subprocess.run(
            [*CORRAL, "requests", *words], env=told.env | place, capture_output=True, text=True, timeout=30, check=True
        ).stdout

    assert [row["id"] for row in json.loads(run("--json", "--model", "smol"))] == ["r3", "r1"]
    lines = run("-n", "2").splitlines()
    assert lines[0].split() == ["WHEN", "MODEL", "KEY", "STATUS", "QUEUED", "TOTAL", "IN", "OUT", "NOTE"]
    assert "the client disconnected" in lines[1]
    assert "250 ms" in lines[1]
    assert run("--status", "503") == run("--failed")
    assert run("--failed").splitlines()[1].endswith("All replicas of `other` were busy.")


def test_requests_under_way_are_listed_by_role(told: Cluster) -> None:
    url = told.members[0].url
    made = http("POST", f"{url}/api/keys", key=told.key, body={"name": "notebook", "role": "inference"}).json()
    own = {"id": "u1", "at": 1.0, "key_id": made["key"]["id"], "model": "smol", "path": "/v1/chat/completions"}
    other = {**own, "id": "u2", "at": 2.0, "key_id": "gone", "node_id": "n1", "tokens": 12}
    report = {"gateway": "g1", "requests": [own, other], "total": 2}
    gateway_key = (told.secrets / "gateway.key").read_text().strip()
    where = f"http://127.0.0.1:{told.members[0].controller_port}/internal/running"

    def look(key: str = told.key, query: str = "") -> dict[str, Any]:
        assert http("POST", where, key=gateway_key, body=report).status == 202  # a report is forgotten after 5 s
        return dict(http("GET", f"{url}/api/requests/running{query}", key=key).json())

    assert http("POST", where, key=told.key, body=report).status == 403
    assert http("POST", where, key=gateway_key, body={"requests": 3}).status == 400
    seen = look()
    assert [(each["id"], each["key"], each["state"], each["tokens"]) for each in seen["requests"]] == [
        ("u1", "notebook", "waiting", 0),
        ("u2", "", "running", 12),
    ]
    assert seen["total"] == 2
    assert [each["id"] for each in look(query="?key=notebook")["requests"]] == ["u1"]
    mine = look(made["secret"])
    assert ([each["id"] for each in mine["requests"]], mine["total"]) == (["u1"], 1)
    assert http("GET", f"{url}/api/requests/running", key="ck_wrong").status == 401
