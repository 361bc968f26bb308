"""A controller that is stopped and goes on (SIGSTOP, a closed laptop, a stalled disk) blames nobody for its sleep."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.test_outages import LONG_S, join_healthy
from tests.support.cluster import Cluster
from tests.support.fleet import STALE_S
from tests.support.postgres import Postgres, postgres
from tests.support.waiting import DEADLINE_S, wait_for

__all__ = ["postgres"]

NAMES = ("barn", "byre")  # two: fewer than the guard holds, so nothing else protects them


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, f"sqlite:///{tmp_path}/corral.db", members=1)
    try:
        yield cluster.start()
    finally:
        cluster.close()


def rest(seconds: float) -> None:
    end = time.monotonic() + seconds
    wait_for(lambda: time.monotonic() > end, "end of the pause", seconds + DEADLINE_S)


def never_left(cluster: Cluster) -> None:
    """Also a status that was overturned a moment later would stand in the log."""
    for member in cluster.members:
        assert member.controller is not None
        assert "status=offline" not in member.controller.output()


def test_the_only_controller_is_stopped_for_longer_than_a_node_may_be_silent(cluster: Cluster) -> None:
    member = cluster.members[0]
    join_healthy(cluster, *NAMES)
    assert member.controller is not None
    for _ in range(2):  # whatever line it was stopped at
        member.controller.signal(signal.SIGSTOP)
        try:
            rest(LONG_S)
        finally:
            member.controller.signal(signal.SIGCONT)
        wait_for(lambda: cluster.api(member, "GET", "/api/nodes").status == 200, "awake controller")
        rest(STALE_S)
    assert {name: node["status"] for name, node in cluster.nodes(member).items()} == dict.fromkeys(NAMES, "healthy")
    never_left(cluster)
    cluster.workers[0].kill()  # and one that is really gone is still noticed
    cluster.wait_status(member, "barn", "offline")


@pytest.mark.long
def test_one_of_two_is_stopped_and_comes_back_with_yesterdays_news(tmp_path: Path, postgres: Postgres) -> None:
    cluster = Cluster(tmp_path, postgres.new_database())
    try:
        cluster.start()
        one, two = cluster.members
        join_healthy(cluster, *NAMES)
        assert one.controller is not None
        one.controller.signal(signal.SIGSTOP)  # it started first, so it leads
        try:
            # The bus keeps handing the sleeper its share of heartbeats until it gives up on it, so what the other hears
            # has gaps; the limit here is short, so only what happens after the sleep is asserted.
            rest(LONG_S)
        finally:
            one.controller.signal(signal.SIGCONT)
        wait_for(lambda: cluster.api(one, "GET", "/api/nodes").status == 200, "awake controller")
        for name in NAMES:
            cluster.wait_status(two, name, "healthy")
        rest(LONG_S)
        assert {node["status"] for node in cluster.nodes(two).values()} == {"healthy"}
    finally:
        cluster.close()
