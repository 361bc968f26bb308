"""PostgreSQL and two controllers: an install accepted at one is watched at the other, and one of them is killed."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.support.backend_images import SteadyLine, gallery_of, line_to, mock_image, openai_entry
from tests.support.cluster import Cluster, Member
from tests.support.fleet import PATIENT
from tests.support.image_registry import ImageRegistry, push_image, registry
from tests.support.postgres import Postgres, postgres
from tests.support.processes import CORRAL, Process
from tests.support.waiting import wait_for

__all__ = ["postgres", "registry"]

NODES = ("barn", "byre")
NOISE_BYTES = 2_000_000
CRAWL = 50_000.0  # bytes per second: nobody finishes before the line is let go


@pytest.fixture
def line(registry: ImageRegistry) -> Iterator[SteadyLine]:
    push_image(registry.url, "farm/mock", "1", mock_image("1", noise_bytes=NOISE_BYTES))
    with line_to(registry.port) as line:
        line.at(CRAWL)
        yield line


@pytest.fixture
def cluster(tmp_path: Path, postgres: Postgres, line: SteadyLine) -> Iterator[Cluster]:
    env = gallery_of(tmp_path / "galleries", openai_entry("farm-mock", f"oci://{line.host}/farm/mock:1"))
    cluster = Cluster(tmp_path, postgres.new_database(), members=2, **env, **PATIENT)
    try:
        cluster.start()
        for name, member in zip(NODES, cluster.members, strict=True):
            cluster.join(member, name, cluster.token(member, pre_approved=True))
        for name in NODES:
            cluster.wait_status(cluster.members[0], name, "healthy", 60)
        yield cluster
    finally:
        cluster.close()


def command(cluster: Cluster, member: Member, *words: str) -> tuple[list[str], dict[str, str]]:
    return [*CORRAL, *words], cluster.env | {"CORRAL_URL": member.url, "CORRAL_KEY": cluster.key}


@contextlib.contextmanager
def watching(cluster: Cluster, member: Member, operation: str) -> Iterator[Process]:
    process = Process(*command(cluster, member, "ops", "watch", operation), cluster.root / f"watch-{member.number}.log")
    try:
        wait_for(lambda: "barn" in process.output(), "first look")
        yield process
    finally:
        process.close()


def rows(cluster: Cluster, member: Member, operation: str) -> dict[str, dict[str, Any]]:
    answer = cluster.api(member, "GET", f"/api/operations/{operation}")
    assert answer.status == 200, answer.body
    return {row["node_name"]: row for row in answer.json()["nodes"]}


def test_an_install_outlives_the_controller_that_sends_the_orders(
    cluster: Cluster, postgres: Postgres, line: SteadyLine
) -> None:
    database = urlsplit(cluster.store_url).path.removeprefix("/")
    leader = postgres.sql("SELECT holder FROM leases WHERE name = 'reconcile'", database)
    here, there = sorted(cluster.members, key=lambda member: f"controller-{member.number}" != leader)
    words, env = command(cluster, here, "backends", "install", "farm-mock", "--detach", "--json")
    ran = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    operation = json.loads(ran.stdout)[0]["job_id"]

    def bytes_everywhere() -> bool:
        found = rows(cluster, there, operation)
        assert all(row.get("current_bytes") for row in found.values()), found
        return set(found) == set(NODES)

    wait_for(bytes_everywhere, "progress as the other controller sees it")
    with watching(cluster, there, operation) as watch:
        assert here.controller is not None
        here.controller.kill()
        line.at(0)
        assert watch.wait(60) == 0, watch.output()
    assert {row["status"] for row in rows(cluster, there, operation).values()} == {"success"}

    cluster.start_controller(here)
    cluster.wait_ready(here)
    wait_for(lambda: rows(cluster, here, operation) == rows(cluster, there, operation), "the same from both")
