"""PostgreSQL and two controllers: any of them serves any call, one is killed, nothing is lost."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator

import pytest

from tests.support.cluster import Cluster
from tests.support.fleet import http
from tests.support.postgres import Postgres, postgres
from tests.support.waiting import promised, wait_for

__all__ = ["postgres"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, postgres: Postgres) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("two"), postgres.new_database())
    try:
        yield cluster.start()
    finally:
        cluster.close()


def test_the_whole_story_with_one_controller_killed(cluster: Cluster) -> None:
    one, two = cluster.members
    worker = cluster.join(one, "barn", cluster.token(two))
    node = cluster.wait_status(two, "barn", "pending")
    assert cluster.api(two, "POST", "/api/nodes/barn/approve").status == 200
    cluster.wait_status(one, "barn", "healthy")

    assert one.controller is not None
    one.controller.kill()
    worker.kill()
    cluster.wait_status(two, "barn", "offline")

    # The worker's own gateway has lost its controller; the fleet has not.
    answer = cluster.api(one, "GET", "/api/nodes")
    assert answer.status == 503
    assert answer.headers["retry-after"]
    assert cluster.api(one, "GET", "/v1/models").status == 200, "a warm gateway serves its last view"

    cluster.join(two, "barn")
    back = cluster.wait_status(two, "barn", "healthy")
    assert back["id"] == node["id"]

    cluster.start_controller(one)
    cluster.wait_ready(one)
    wait_for(lambda: cluster.nodes(one)["barn"]["status"] == "healthy", "same answer from the restarted controller")

    def live() -> dict[str, bool]:
        return {row["id"]: row["live"] for row in cluster.api(one, "GET", "/api/cluster").json()["controllers"]}

    wait_for(lambda: live() == {"controller-0": True, "controller-1": True}, "both controllers seen alive")


def test_a_key_made_at_one_and_revoked_at_the_other(cluster: Cluster) -> None:
    one, two = cluster.members
    made = cluster.api(one, "POST", "/api/keys", {"name": "app", "role": "inference"}).json()
    wait_for(lambda: http("GET", two.url + "/v1/models", key=made["secret"]).status == 200, "key known everywhere")
    assert cluster.api(two, "DELETE", f"/api/keys/{made['key']['id']}").status == 204
    wait_for(
        lambda: http("GET", one.url + "/v1/models", key=made["secret"]).status == 401,
        "key refused everywhere",
        promised(2),
    )


def test_events_of_one_controller_tell_what_happened_at_the_other(cluster: Cluster) -> None:
    one, two = cluster.members
    cluster.join(one, "byre", cluster.token(one, pre_approved=True))
    cluster.wait_status(one, "byre", "healthy")
    request = urllib.request.Request(two.url + "/api/events", headers={"Authorization": f"Bearer {cluster.key}"})
    with urllib.request.urlopen(request, timeout=60) as stream:
        seen = b""
        while b"event: ready" not in seen:
            seen += stream.readline()
        assert cluster.api(one, "POST", "/api/nodes/byre/drain").status == 200
        seen = b""
        while b'"status":"draining"' not in seen:
            seen += stream.readline()
