"""The story of the first ten minutes: up, one healthy node, a second machine joins, is approved, dies, comes back."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import pytest

from tests.support.fleet import Fleet, http
from tests.support.processes import alive
from tests.support.waiting import wait_for


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One data folder for the whole story."""
    fleet = Fleet(tmp_path_factory.mktemp("first-minutes"))
    try:
        yield fleet
    finally:
        fleet.close()


@pytest.fixture
def fleet(machine: Fleet) -> Fleet:
    """Running, with the node that `up` itself brings and no other: each test leaves it so, or stopped."""
    return machine if machine.up is not None and machine.up.running else machine.start()


def test_up_gives_one_healthy_node_and_says_how_to_go_on(fleet: Fleet) -> None:
    assert fleet.up is not None
    wait_for(lambda: "corral join http" in fleet.up.output(), "join line")  # type: ignore[union-attr]
    assert fleet.url in fleet.up.output()
    assert fleet.key not in fleet.up.output(), "the admin key is for people at a terminal, not for logs"

    listed = wait_for(lambda: [n for n in json.loads(fleet.cli("nodes", "list", "--json").stdout)], "node")
    assert len(listed) == 1
    wait_for(lambda: fleet.status(listed[0]["name"]) == "healthy", "healthy node")
    table = fleet.cli("nodes", "list")
    assert table.returncode == 0
    assert "healthy" in table.stdout

    own = listed[0]["name"]
    for path, mark in (
        ("/metrics", "corral_gateway"),
        ("/controller/metrics", "corral_nodes"),
        (f"/api/nodes/{own}/metrics", "corral_worker"),
    ):
        assert mark in fleet.api("GET", path).body.decode(), path


def test_a_second_machine_joins_waits_is_approved_dies_and_comes_back(fleet: Fleet) -> None:
    own = fleet.own_node()
    worker = fleet.join("barn", token=fleet.token())
    node = fleet.wait_status("barn", "pending")
    wait_for(lambda: "corral nodes approve barn" in worker.output(), "hint how to approve")

    approved = fleet.cli("nodes", "approve", "barn")
    assert approved.returncode == 0, approved.stderr
    fleet.wait_status("barn", "healthy")

    worker.kill()
    fleet.wait_status("barn", "offline")
    again = fleet.join("barn")
    back = fleet.wait_status("barn", "healthy")
    assert back["id"] == node["id"], "a restarted worker is the same node"
    assert len(fleet.nodes()) == 2

    assert again.stop() == 0
    left = fleet.wait_status("barn", "offline")
    assert "goodbye" in left["status_reason"]
    assert fleet.cli("nodes", "delete", "barn", "--yes").returncode == 0
    assert set(fleet.nodes()) == {own}


def test_nothing_is_anonymous(fleet: Fleet) -> None:
    for path in ("/api/nodes", "/api/keys", "/api/tokens", "/api/events", "/api/cluster", "/metrics", "/v1/models"):
        assert http("GET", fleet.url + path).status == 401, path
        assert http("GET", fleet.url + path, key="ck_wrong").status == 401, path
    assert http("GET", fleet.url + "/internal/view").status == 401
    assert http("GET", fleet.url + "/internal/view", key=fleet.key).status == 403
    assert http("POST", fleet.url + "/api/node/register", body={"name": "x", "address": "x:1"}).status == 401


def test_a_killed_child_is_restarted_and_nothing_else_is_touched(fleet: Fleet) -> None:
    name = fleet.own_node()
    fleet.wait_status(name, "healthy")
    before = {role: fleet.child_pid(role) for role in ("nats-server", "controller", "gateway", "worker")}
    for role in before:
        victim = fleet.child_pid(role)
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda role=role, victim=victim: fleet.child_pid(role) != victim, f"new {role}")  # type: ignore[misc]
        fleet.wait_ready()
        fleet.wait_status(name, "healthy")
        assert len(fleet.nodes()) == 1
    assert all(fleet.child_pid(role) != pid for role, pid in before.items())
    (controller,) = fleet.api("GET", "/api/cluster").json()["controllers"]  # the killed one is not a second one
    assert controller["live"]
    assert ">1 controller</li>" in fleet.api("GET", "/page/overview").body.decode()


def test_kill_9_of_up_leaves_nothing_behind_and_the_next_up_is_the_same_fleet(fleet: Fleet) -> None:
    name = fleet.own_node()
    node = fleet.wait_status(name, "healthy")
    assert fleet.up is not None
    children = [fleet.child_pid(role) for role in ("nats-server", "controller", "gateway", "worker")]
    fleet.up.kill()
    wait_for(lambda: not any(alive(pid) for pid in children), "end of all children")
    fleet.start()
    assert fleet.wait_status(name, "healthy")["id"] == node["id"]
    assert len(fleet.nodes()) == 1


def test_a_second_up_on_the_same_folder_says_who_is_there(fleet: Fleet) -> None:
    assert fleet.up is not None
    second = fleet.cli("up", "--data", str(fleet.data), "--port", "0")
    assert second.returncode == 1
    assert f"already runs with {fleet.data} (pid {fleet.up.pid})" in second.stderr
    assert len(second.stderr.strip().splitlines()) == 1


def test_stopping_up_stops_everything_in_order(fleet: Fleet) -> None:
    assert fleet.up is not None
    children = [fleet.child_pid(role) for role in ("nats-server", "controller", "gateway", "worker")]
    assert fleet.up.stop() == 0
    assert not any(alive(pid) for pid in children)
