"""The night something was away: bus, database, controller. Nothing is lost, nobody is blamed for our own outage."""

from __future__ import annotations

import signal
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import Cluster, Member
from tests.support.fleet import STALE_S
from tests.support.postgres import Postgres, postgres
from tests.support.waiting import DEADLINE_S, wait_for

__all__ = ["postgres"]

LONG_S = 1.5 * STALE_S  # longer than a node may be silent, with a look of the monitor's on top
NODES = ("barn", "byre", "shed", "yard")  # so many that the guard of the fleet holds when three fall silent
ALL_HEALTHY = {name: {"healthy"} for name in NODES}


class Diary:
    """Every status the nodes were ever seen in, sampled while we wait."""

    def __init__(self, cluster: Cluster, member: Member) -> None:
        self._cluster = cluster
        self._member = member
        self.seen: dict[str, set[str]] = {}

    def note(self) -> dict[str, dict[str, Any]]:
        nodes = self._cluster.nodes(self._member)
        for name, node in nodes.items():
            self.seen.setdefault(name, set()).add(node["status"])
        return nodes

    def for_seconds(self, seconds: float) -> None:
        """Keep looking for that long: what must not happen needs time in which it could."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            wait_for(self.note, "nodes", seconds + DEADLINE_S)
            time.sleep(0.15)  # statuses change once per CORRAL_HEALTH_INTERVAL


@pytest.fixture(scope="module")
def sqlite_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """With NODES, all healthy; each test leaves it so."""
    root = tmp_path_factory.mktemp("outages")
    cluster = Cluster(root, f"sqlite:///{root}/corral.db", members=1)
    try:
        cluster.start()
        join_healthy(cluster, *NODES)
        yield cluster
    finally:
        cluster.close()


@pytest.fixture
def postgres_cluster(tmp_path: Path, postgres: Postgres) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, postgres.new_database(), members=1)
    try:
        yield cluster.start()
    finally:
        cluster.close()


def join_healthy(cluster: Cluster, *names: str) -> None:
    member = cluster.members[0]
    for name in names:
        cluster.join(member, name, cluster.token(member, pre_approved=True))
    for name in names:
        cluster.wait_status(member, name, "healthy")


def attention(cluster: Cluster) -> str:
    return "\n".join(cluster.api(cluster.members[0], "GET", "/api/cluster").json()["attention"])


def test_without_the_bus_nodes_are_heard_over_http_and_nothing_needs_a_restart(sqlite_cluster: Cluster) -> None:
    cluster, member = sqlite_cluster, sqlite_cluster.members[0]
    assert cluster.bus is not None
    cluster.bus.kill()
    diary = Diary(cluster, member)
    wait_for(lambda: all(node.get("bus_down") for node in diary.note().values()), "word that the bus is down")
    diary.for_seconds(LONG_S)
    assert diary.seen == ALL_HEALTHY
    wait_for(lambda: "bus cannot be reached" in attention(cluster), "word about the bus")

    cluster.start_bus()
    wait_for(lambda: not any(node.get("bus_down") for node in diary.note().values()), "nodes back on the bus")
    diary.for_seconds(LONG_S)
    assert diary.seen == ALL_HEALTHY


def test_a_bus_that_is_absent_at_the_start_is_waited_for(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, f"sqlite:///{tmp_path}/corral.db", members=1)
    member = cluster.members[0]
    try:
        assert cluster.keys  # made now, so that the late server knows the same ones
        cluster.start_controller(member)
        cluster.wait_ready(member)
        cluster.start_gateway(member)
        wait_for(lambda: cluster.api(member, "GET", "/api/nodes").status == 200, "gateway without a bus")
        cluster.join(member, "barn", cluster.token(member, pre_approved=True))
        cluster.wait_status(member, "barn", "healthy")
        cluster.start_bus()
        wait_for(lambda: cluster.api(member, "GET", "/api/cluster").json()["bus"]["connected"], "bus")
        wait_for(lambda: not cluster.nodes(member)["barn"].get("bus_down"), "node on the bus")
    finally:
        cluster.close()


def test_an_outage_of_the_database_is_not_held_against_the_nodes(postgres_cluster: Cluster, postgres: Postgres) -> None:
    cluster, member = postgres_cluster, postgres_cluster.members[0]
    join_healthy(cluster, "barn", "byre")
    postgres.stop(signal.SIGQUIT)
    try:
        wait_for(lambda: cluster.api(member, "GET", "/api/nodes").status == 503, "honest 503")
        answer = cluster.api(member, "GET", "/api/nodes")
        assert answer.json()["error"]["message"]
        assert answer.headers["retry-after"]
        assert cluster.api(member, "GET", "/v1/models").status == 200, "what is warm goes on"
        gone_until = time.monotonic() + LONG_S
        wait_for(lambda: time.monotonic() > gone_until, "an outage longer than the limit")
    finally:
        postgres.start()
    wait_for(lambda: cluster.api(member, "GET", "/api/nodes").status == 200, "database back")
    diary = Diary(cluster, member)
    diary.for_seconds(LONG_S)
    assert diary.seen == {"barn": {"healthy"}, "byre": {"healthy"}}


def test_a_locked_database_is_waited_for(sqlite_cluster: Cluster) -> None:
    cluster, member = sqlite_cluster, sqlite_cluster.members[0]
    lock = sqlite3.connect(cluster.root / "corral.db", isolation_level=None)
    try:
        lock.execute("BEGIN IMMEDIATE")
        diary = Diary(cluster, member)
        diary.for_seconds(6.5)  # longer than a writer waits, and than the limit of silence
        assert cluster.api(member, "POST", "/api/tokens", {}).status == 503
        lock.execute("ROLLBACK")
    finally:
        lock.close()
    wait_for(lambda: cluster.api(member, "POST", "/api/tokens", {}).status == 201, "writes again")
    diary.for_seconds(LONG_S)
    assert diary.seen == ALL_HEALTHY


def test_a_controller_killed_and_away_for_long_blames_nobody(sqlite_cluster: Cluster) -> None:
    cluster, member = sqlite_cluster, sqlite_cluster.members[0]
    assert member.controller is not None
    member.controller.kill()
    away_until = time.monotonic() + LONG_S
    wait_for(lambda: time.monotonic() > away_until, "an absence longer than the limit")
    cluster.start_controller(member)
    cluster.wait_ready(member)
    diary = Diary(cluster, member)
    wait_for(diary.note, "nodes through the gateway")
    diary.for_seconds(LONG_S)
    assert diary.seen == ALL_HEALTHY


def test_when_most_of_the_fleet_falls_silent_nobody_is_taken_offline(sqlite_cluster: Cluster) -> None:
    cluster, member = sqlite_cluster, sqlite_cluster.members[0]
    for worker in cluster.workers[:3]:
        worker.signal(signal.SIGSTOP)
    try:
        diary = Diary(cluster, member)
        wait_for(lambda: [diary.note()[name]["status"] for name in NODES[:3]] == ["unhealthy"] * 3, "held nodes")
        diary.for_seconds(LONG_S)
        assert all("offline" not in seen for seen in diary.seen.values())
        wait_for(lambda: "fell silent at once" in attention(cluster), "word about the silence")
    finally:
        for worker in cluster.workers[:3]:
            worker.signal(signal.SIGCONT)
    for name in NODES:
        cluster.wait_status(member, name, "healthy")


def test_credentials_of_three_seconds_over_fifteen(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, f"sqlite:///{tmp_path}/corral.db", members=1, CORRAL_BUS_CREDENTIAL_TTL="3s")
    member = cluster.members[0]
    try:
        cluster.start()
        join_healthy(cluster, "barn")
        diary = Diary(cluster, member)
        diary.for_seconds(15)
        assert diary.seen["barn"] == {"healthy"}
        assert not cluster.nodes(member)["barn"].get("bus_down")
    finally:
        cluster.close()
