"""Version skew against the baseline release (docs/reference/version-skew.md): the present controller opens a database
of the baseline, a worker of the baseline serves at the present controller, and the present worker at a controller of
the baseline.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs, to_builtins

from corral.contract.receipts import Receipt, Receipts
from tests.compat.baseline import BASELINE, ROOT, Release, baseline
from tests.compat.one_node import MODEL, NODE, add_model, chat, install, join, open_cluster, read
from tests.support.cluster import Cluster
from tests.support.fleet import Answer, http
from tests.support.postgres import Postgres, postgres
from tests.support.processes import CORRAL
from tests.support.waiting import wait_for

__all__ = ["baseline", "postgres"]

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
            assert as_before(rows, after[kind]) == rows, kind
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
        assert report_receipt(cluster).status == 202, "a controller takes receipts of a later gateway"
        cluster.corral = CORRAL if older == "controller" else baseline.corral
        replace_gateway(cluster)
        assert chat(cluster, "again") == "mock 1: again"

        def receipts() -> list[Any]:
            return [row for row in read(cluster, "/api/requests")["requests"] if row["status"] == 200]

        wait_for(lambda: len(receipts()) == 2, "receipts of both gateways")
        [failed] = read(cluster, "/api/requests?failed=true")["requests"]
        assert failed.get("error") == (None if older == "controller" else "model_busy")
        assert [row.get("error", "") for row in receipts()] == ["", ""]


def report_receipt(cluster: Cluster) -> Answer:
    """As a gateway of the present release reports a request that failed."""
    receipt = Receipt(id="r1", at=4_102_444_800.0, key_id="k", model="m", path="/v1/x", status=503)
    receipt = structs.replace(receipt, error="model_busy", error_text="All replicas were busy.")
    url = f"http://127.0.0.1:{cluster.members[0].controller_port}/internal/receipts"
    gateway_key = (cluster.secrets / "gateway.key").read_text().strip()
    return http("POST", url, key=gateway_key, body=to_builtins(Receipts("g", (receipt,))))


def configure(cluster: Cluster) -> None:
    member = cluster.members[0]
    for path, body in (("labels", {"tier": "fast"}), ("vram-budget", {"value": "80%"})):
        answer = cluster.api(member, "PUT", f"/api/nodes/{NODE}/{path}", body)
        assert answer.status == 200, answer.body
    answer = cluster.api(member, "POST", "/api/keys", {"name": "app", "role": "inference"})
    assert answer.status == 201, answer.body


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


def as_before(before: Any, after: Any) -> Any:
    """`after` without the fields that the present release adds: answers may only grow."""
    if isinstance(before, dict) and isinstance(after, dict):
        return {key: as_before(before[key], value) for key, value in after.items() if key in before}
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return [as_before(old, new) for old, new in zip(before, after, strict=True)]
    return after


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
    cluster.wait_gateway(member)


def replace_gateway(cluster: Cluster) -> None:
    """By that of the release that the cluster starts from now on."""
    member = cluster.members[0]
    assert member.gateway is not None
    assert member.gateway.stop() == 0
    cluster.start_gateway(member)
    cluster.wait_gateway(member)
