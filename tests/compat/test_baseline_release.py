"""Version skew against the baseline release (docs/reference/version-skew.md): the present controller opens a database
of the baseline, a worker of the baseline serves at the present controller, and the present worker at a controller of
the baseline.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.compat.baseline import BASELINE, ROOT, Release, baseline
from tests.support.cluster import Cluster
from tests.support.fleet import PATIENT
from tests.support.postgres import Postgres, postgres
from tests.support.processes import CORRAL
from tests.support.waiting import wait_for

__all__ = ["baseline", "postgres"]

NODE = "barn"
MODEL = "parrot"
# What a person decided or a machine is; heartbeats and free memory go on changing.
LASTING = ("id", "name", "labels", "vram_budget", "max_replicas_per_model", "created_at", "platform")


def test_the_page_on_version_skew_names_the_baseline() -> None:
    assert f"`{BASELINE}`" in (ROOT / "docs" / "reference" / "version-skew.md").read_text()


@pytest.fixture(params=["sqlite", "postgresql"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Of an empty database."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/corral.db"
        return
    server: Postgres = request.getfixturevalue("postgres")
    url = server.new_database("template0")
    yield url
    server.drop(url)


def test_the_present_controller_serves_the_database_and_the_worker_of_the_baseline(
    tmp_path: Path, baseline: Release, store_url: str
) -> None:
    with open_cluster(tmp_path, store_url) as cluster:
        cluster.corral = baseline.corral
        cluster.start()
        join(cluster)
        configure(cluster)
        install(cluster)
        add_model(cluster)
        assert chat(cluster, "hello") == "mock 1: hello"
        wait_for(lambda: read(cluster, "/api/requests")["requests"], "receipt")
        before = contents(cluster)

        replace_controller(cluster)
        after = contents(cluster)
        for kind, rows in before.items():
            assert after[kind] == rows, kind
        cluster.wait_status(cluster.members[0], NODE, "healthy")
        assert chat(cluster, "again") == "mock 1: again"
        assert replica_ids(cluster) == before["replicas"], "the replica from before serves on"


@pytest.mark.parametrize("older", ["worker", "controller"])
def test_a_worker_and_a_controller_of_both_releases_join_install_load_and_answer(
    tmp_path: Path, baseline: Release, older: str
) -> None:
    with open_cluster(tmp_path, f"sqlite:///{tmp_path}/corral.db") as cluster:
        cluster.corral = baseline.corral if older == "controller" else CORRAL
        cluster.start()
        cluster.corral = baseline.corral if older == "worker" else CORRAL
        join(cluster)
        install(cluster)
        add_model(cluster)
        assert chat(cluster, "hello") == "mock 1: hello"
        wait_for(lambda: [row["name"] for row in read(cluster, f"/api/nodes/{NODE}/backends")] == ["mock"], "inventory")


@contextmanager
def open_cluster(folder: Path, store_url: str) -> Iterator[Cluster]:
    """Not started yet."""
    cluster = Cluster(folder, store_url, members=1, **PATIENT)
    try:
        yield cluster
    finally:
        cluster.close()


def read(cluster: Cluster, path: str) -> Any:
    answer = cluster.api(cluster.members[0], "GET", path)
    assert answer.status == 200, answer.body
    return answer.json()


def join(cluster: Cluster) -> None:
    member = cluster.members[0]
    cluster.join(member, NODE, cluster.token(member, pre_approved=True))
    cluster.wait_status(member, NODE, "healthy")


def configure(cluster: Cluster) -> None:
    member = cluster.members[0]
    for path, body in (("labels", {"tier": "fast"}), ("vram-budget", {"value": "80%"})):
        answer = cluster.api(member, "PUT", f"/api/nodes/{NODE}/{path}", body)
        assert answer.status == 200, answer.body
    answer = cluster.api(member, "POST", "/api/keys", {"name": "app", "role": "inference"})
    assert answer.status == 201, answer.body


def install(cluster: Cluster) -> None:
    """The mock backend, by a rule for every node; returns when the operation has ended."""
    accepted = cluster.api(cluster.members[0], "POST", "/api/operations", {"kind": "install", "backend": "mock"})
    assert accepted.status == 202, accepted.body
    job = accepted.json()["jobID"]

    def has_succeeded() -> bool:
        rows = read(cluster, f"/api/operations/{job}")["nodes"]
        assert [row["status"] for row in rows] == ["success"], rows
        return True

    wait_for(has_succeeded, "installed backend")


def add_model(cluster: Cluster) -> None:
    definition = {"name": MODEL, "backend": "mock", "parallel": 2}
    added = cluster.api(cluster.members[0], "POST", "/api/models", {"definition": definition})
    assert added.status == 201, added.body


def chat(cluster: Cluster, text: str) -> str:
    """The answer; the first one waits until the model is loaded."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}]}
    answer = cluster.api(cluster.members[0], "POST", "/v1/chat/completions", body)
    assert answer.status == 200, answer.body
    return str(answer.json()["choices"][0]["message"]["content"])


def replica_ids(cluster: Cluster) -> list[str]:
    return [replica["id"] for replica in read(cluster, f"/api/models/{MODEL}/replicas")]


def contents(cluster: Cluster) -> dict[str, Any]:
    """What has to outlive a controller, as the API shows it."""
    (node,) = read(cluster, "/api/nodes")
    return {
        "node": {field: node.get(field) for field in LASTING},
        "rules and models": read(cluster, "/api/export"),
        "model": read(cluster, f"/api/models/{MODEL}") | {"ready": None},  # grows as gateways and workers reconnect
        "operations": read(cluster, "/api/operations?all=true"),
        "history": read(cluster, "/api/operations/history"),
        "receipts": read(cluster, "/api/requests"),
        "keys": [(key["id"], key["name"], key["role"]) for key in read(cluster, "/api/keys")],
        "tokens": read(cluster, "/api/tokens"),
        "replicas": replica_ids(cluster),
    }


def replace_controller(cluster: Cluster) -> None:
    """By today's, and so the gateway; the worker runs on."""
    member = cluster.members[0]
    assert member.gateway is not None
    assert member.controller is not None
    assert member.gateway.stop() == 0
    assert member.controller.stop() == 0
    cluster.corral = CORRAL
    cluster.start_controller(member)
    cluster.wait_ready(member)
    cluster.start_gateway(member)
    wait_for(lambda: cluster.nodes(member), "ready gateway")
