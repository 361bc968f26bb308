"""Issue 4's promise: three workers, two replicas, fifty streams, and a machine's backend host killed with -9. Only its
streams break, no new request ever fails, and the replica is back elsewhere."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support.fleet import Fleet
from tests.support.grown_fleet import grown_fleet
from tests.support.processes import alive
from tests.support.supervising import identities, swept
from tests.support.waiting import wait_for

STREAMS = 50
HELLO: Any = [{"role": "user", "content": "hello"}]
# Its streams are long enough for all that happens meanwhile.
SLOW: Any = [{"role": "user", "content": "[[piece_delay_s=0.6]] a b c d e f g h i j k l"}]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """`up`'s own machine, and two that can be unplugged."""
    folder = tmp_path_factory.mktemp("killed")
    with contextlib.ExitStack() as stack:
        for data in (folder / "data" / "worker", folder / "worker-barn", folder / "worker-byre"):
            stack.enter_context(swept(data / "processes"))  # those of a worker that was killed have no other end
        fleet = stack.enter_context(grown_fleet(folder, "barn", "byre"))
        definition = {"name": "herd", "backend": "mock", "parallel": 64}
        assert fleet.api("POST", "/api/models", {"definition": definition}).status == 201
        schedule = {"model_name": "herd", "min_replicas": 2}
        assert fleet.api("POST", "/api/nodes/scheduling", schedule).status == 200
        yield fleet


@pytest.fixture
def client(fleet: Fleet) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=fleet.url + "/v1", api_key=fleet.key, max_retries=0, timeout=60) as client:
        yield client


def answering(fleet: Fleet) -> dict[str, dict[str, Any]]:
    """By node."""
    rows = fleet.api("GET", "/api/models/herd/replicas").json()
    return {row["node_name"]: row for row in rows if row["state"] == "loaded" and row["process_state"] == "ready"}


def under_way(fleet: Fleet) -> dict[str, int]:
    """How many streams each node has, once it is all of them."""
    found = {node: int(row["in_flight"]) for node, row in answering(fleet).items()}
    assert sum(found.values()) >= STREAMS, found
    return found


def stream(client: openai.OpenAI, asked: Any = SLOW) -> str:
    pieces = client.chat.completions.create(model="herd", messages=asked, stream=True)
    return "".join(piece.choices[0].delta.content or "" for piece in pieces)


def kill_host(fleet: Fleet, node: str, process_id: str) -> None:
    """The replica with everything below it: shim, backend, children."""
    data = fleet.root / f"worker-{node}" / "processes"
    (identity,) = [each for each in identities(data) if each.process_id == process_id]
    os.killpg(os.getpgid(identity.pid), signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(os.getpgid(identity.shim_pid), signal.SIGKILL)
    wait_for(lambda: not alive(identity.pid), "end of the backend")


@pytest.mark.parametrize("victim", ["the replica's processes", "the whole machine"])
def test_only_its_streams_break_and_the_replica_is_back(fleet: Fleet, client: openai.OpenAI, victim: str) -> None:
    wait_for(lambda: len(answering(fleet)) == 2, "two replicas", 60)
    assert "hello" in stream(client, HELLO)
    before = answering(fleet)
    node = next(name for name in sorted(before) if name in ("barn", "byre"))
    with concurrent.futures.ThreadPoolExecutor(STREAMS) as pool:
        running = [pool.submit(stream, client) for _ in range(STREAMS)]
        on_it = wait_for(lambda: under_way(fleet), "fifty streams")[node]
        if victim == "the whole machine":
            worker = next(process for name, process in fleet.workers.items() if name.startswith(f"{node}-"))
            worker.signal(signal.SIGSTOP)  # so that it cannot start it again before it is gone itself
            kill_host(fleet, node, before[node]["process_id"])
            worker.kill()
        else:
            kill_host(fleet, node, before[node]["process_id"])
        for _ in range(20):
            assert "hello" in stream(client, HELLO), "new requests never fail"
        broken = sum(each.exception() is not None for each in running)
        whole = [each.result() for each in running if each.exception() is None]
    assert 0 < on_it < STREAMS
    assert broken <= on_it, "those of the other replica are untouched"
    assert all(text.endswith("k l") for text in whole)

    def is_back() -> bool:
        now = answering(fleet)
        gone = node in now if victim == "the whole machine" else now[node]["process_id"] == before[node]["process_id"]
        return len(now) == 2 and not gone

    wait_for(is_back, "the replica, back elsewhere", 60)
    for _ in range(5):
        assert "hello" in stream(client, HELLO)
