"""Nodes that are drained, deleted and killed while they serve: what people are told, and what is left of them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.fleet import PATIENT, Fleet, http
from tests.support.grown_fleet import grown_fleet
from tests.support.processes import alive
from tests.support.supervising import identities, swept
from tests.support.waiting import wait_for

HELLO: Any = [{"role": "user", "content": "hello"}]
# Half a minute of answer: long enough for commands to run meanwhile.


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """`up`'s own machine and two more, each with a replica of a model of its own."""
    folder = tmp_path_factory.mktemp("leaving")
    with contextlib.ExitStack() as stack:
        for name in ("barn", "byre"):
            stack.enter_context(swept(folder / f"worker-{name}" / "processes"))
        fleet = stack.enter_context(grown_fleet(folder, "barn", "byre"))
        for name in ("barn", "byre"):
            definition = {"name": f"of-{name}", "backend": "mock", "parallel": 8}
            assert fleet.api("POST", "/api/models", {"definition": definition}).status == 201
            schedule = {"model_name": f"of-{name}", "min_replicas": 1, "node_selector": {"node.name": name}}
            assert fleet.api("POST", "/api/nodes/scheduling", schedule).status == 200
        yield fleet


@pytest.fixture
def client(fleet: Fleet) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=fleet.url + "/v1", api_key=fleet.key, max_retries=0, timeout=60) as client:
        yield client


def held_until(file: Path) -> Any:
    """A request whose answer ends when the file is there."""
    return [{"role": "user", "content": f"[[until_file={file}]] a b c d e f g h i j k l"}]


def stream(client: openai.OpenAI, model: str, asked: Any) -> str:
    pieces = client.chat.completions.create(model=model, messages=asked, stream=True)
    return "".join(piece.choices[0].delta.content or "" for piece in pieces)


@contextlib.contextmanager
def released_at_the_end(file: Path) -> Iterator[None]:
    """Or a test that fails would wait for its own streams."""
    try:
        yield
    finally:
        file.touch()


def shown(fleet: Fleet, node: str) -> dict[str, Any]:
    answer: dict[str, Any] = fleet.api("GET", f"/api/nodes/{node}").json()
    return answer


def wait_served(fleet: Fleet, client: openai.OpenAI, node: str) -> None:
    assert "hello" in stream(client, f"of-{node}", HELLO)
    wait_for(lambda: shown(fleet, node)["model_count"] == 1, f"the replica of {node}", 60)


def test_draining_waits_for_the_stream_that_runs(fleet: Fleet, client: openai.OpenAI) -> None:
    wait_served(fleet, client, "barn")
    release = fleet.root / "release"
    with concurrent.futures.ThreadPoolExecutor(3) as pool, released_at_the_end(release):
        running = [pool.submit(stream, client, "of-barn", held_until(release)) for _ in range(2)]
        wait_for(lambda: shown(fleet, "barn")["in_flight_count"] == 2, "two requests under way")
        details = fleet.cli("nodes", "show", "barn").stdout
        assert "replicas         1," in details
        assert "in flight" in details
        listed = json.loads(fleet.cli("nodes", "list", "--json").stdout)
        assert {node["name"]: node["in_flight_count"] for node in listed}["barn"] == 2

        assert own_count(fleet, "barn") == 2, "what a worker that leaves asks for"

        early = fleet.cli("nodes", "drain", "barn", "--wait", "1s")
        assert early.returncode == 3, early.stdout + early.stderr
        assert "barn still has 2 requests in flight" in early.stderr
        assert "barn is idle" not in early.stdout

        waiting = pool.submit(fleet.cli, "nodes", "drain", "barn", "--wait", "60s", timeout_s=90)
        with pytest.raises(TimeoutError):
            waiting.result(timeout=2)
        release.touch()
        waited = waiting.result()
        assert all(each.done() for each in running), "it came back while a stream ran"
        assert waited.returncode == 0, waited.stderr
        assert "barn is idle" in waited.stdout
        assert all(each.result().endswith("k l") for each in running)
    assert shown(fleet, "barn")["in_flight_count"] == 0
    assert fleet.cli("nodes", "resume", "barn").returncode == 0


def test_a_deleted_node_leaves_no_backend_running(fleet: Fleet, client: openai.OpenAI) -> None:
    wait_served(fleet, client, "byre")
    data = fleet.root / "worker-byre"
    [backend] = [each for each in identities(data / "processes") if alive(each.pid)]
    token = blob_token(fleet, json.loads((data / "identity.json").read_bytes()))
    assert ask_blobs(fleet, token) in (404, 503), "there is no such blob, but one may ask"
    deleted = fleet.cli("nodes", "delete", "byre", "--yes")
    assert deleted.returncode == 0, deleted.stderr
    wait_for(lambda: ask_blobs(fleet, token) == 401, "the end of its blob token")
    worker = fleet.workers["byre-0"]
    assert worker.wait(60) == 1
    assert "this node was deleted from the cluster" in worker.output()
    assert not alive(backend.pid)
    wait_for(lambda: not alive(backend.shim_pid), "end of the backend's shim, which outlives it by a moment")


def test_a_killed_worker_is_said_not_to_run(tmp_path: Path) -> None:
    """Long before its silence counts as an absence: nothing is green, and nobody is sent to open a port."""
    with grown_fleet(tmp_path, "shed", env=PATIENT) as fleet:
        wait_for(lambda: fleet.proven_ingresses()["shed"], "an ingress that was reached", 60)
        fleet.workers["shed-0"].kill()

        def is_told() -> bool:
            node = fleet.nodes()["shed"]
            return (node["status"], node["status_reason"]) == ("unhealthy", "its worker seems not to be running")

        wait_for(is_told, "the reason", 60)
        listed = fleet.cli("nodes", "list").stdout
        [line] = [line for line in listed.splitlines() if line.startswith("shed")]
        assert "healthy" not in line.replace("unhealthy", "")
        assert "its worker seems not to be running" in line
        found = fleet.cli("doctor").stdout
        assert "shed is unhealthy: its worker seems not to be running" in found
        assert "open its port" not in listed + found
        assert "open the port" not in found


def blob_token(fleet: Fleet, identity: dict[str, Any]) -> str:
    renewed = http(
        "POST", f"{fleet.url}/api/node/{identity['node_id']}/credentials", key=identity["node_token"], body={}
    )
    assert renewed.status == 200, renewed.body
    return str(renewed.json()["blob_token"])


def own_count(fleet: Fleet, node: str) -> int:
    identity = json.loads((fleet.root / f"worker-{node}" / "identity.json").read_bytes())
    rows = http("GET", f"{fleet.url}/api/node/{identity['node_id']}/models", key=identity["node_token"]).json()
    return sum(row["in_flight"] for row in rows)


def ask_blobs(fleet: Fleet, token: str) -> int:
    return http("GET", f"http://127.0.0.1:{fleet.blob_port}/blobs/sha256:{'0' * 64}", key=token).status
