"""A fleet of one controller and one node: join, install the mock backend, add a model, get an answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.cluster import Cluster
from tests.support.fleet import PATIENT
from tests.support.waiting import wait_for

NODE = "barn"
MODEL = "parrot"


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
