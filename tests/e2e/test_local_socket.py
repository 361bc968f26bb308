"""`corral up`: its gateway reaches its own worker through a unix socket, other workers over TCP, and nobody notices."""

from __future__ import annotations

import concurrent.futures
import os
import re
import signal
import threading
from collections.abc import Iterator

import openai
import pytest

from corral.cli.common.data_folder import run_folder
from corral.worker.agent.join.identity import holder_of
from tests.support.fleet import Fleet
from tests.support.grown_fleet import grown_fleet
from tests.support.supervising import swept
from tests.support.waiting import wait_for


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("local")
    with swept(folder / "data" / "worker" / "processes"), grown_fleet(folder, "barn") as fleet:
        define(fleet, "near", fleet.newcomer("barn"))
        define(fleet, "far", "barn")
        yield fleet


def define(fleet: Fleet, model: str, node: str) -> None:
    """A model that runs on one node only."""
    definition = {"name": model, "backend": "mock", "parallel": 64}
    assert fleet.api("POST", "/api/models", {"definition": definition}).status == 201
    schedule = {"model_name": model, "min_replicas": 1, "node_selector": {"node.name": node}}
    assert fleet.api("POST", "/api/nodes/scheduling", schedule).status == 200


@pytest.fixture
def client(fleet: Fleet) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=fleet.url + "/v1", api_key=fleet.key, max_retries=0, timeout=60) as client:
        yield client


def ask(client: openai.OpenAI, model: str) -> str:
    made = client.chat.completions.create(model=model, messages=[{"role": "user", "content": "hello"}])
    return made.choices[0].message.content or ""


def local_connects(fleet: Fleet) -> float:
    text = fleet.api("GET", "/metrics").body.decode()
    (found,) = re.findall(r"(?m)^corral_gateway_upstream_local_connects_total (\S+)$", text)
    return float(found)


def sockets(fleet: Fleet) -> list[str]:
    folder = run_folder(fleet.data, fleet.env)
    return sorted(path.name for path in folder.iterdir() if path.name != "controller.sock")


def test_only_the_worker_of_this_fleet_has_a_socket_and_it_is_used(fleet: Fleet, client: openai.OpenAI) -> None:
    assert "hello" in ask(client, "far")
    assert local_connects(fleet) == 0
    assert "hello" in ask(client, "near")
    assert local_connects(fleet) > 0
    own = fleet.nodes()[fleet.newcomer("barn")]
    port = own["ingress_url"].rpartition(":")[2]
    assert sockets(fleet) == [f"{own['id']}-{port}.sock"]


def test_a_reload_of_the_worker_loses_no_request(fleet: Fleet, client: openai.OpenAI) -> None:
    ask(client, "near")
    before, connects = sockets(fleet), local_connects(fleet)
    stopping, answered = threading.Event(), threading.Semaphore(0)

    def go_on() -> int:
        count = 0
        while not stopping.is_set():
            assert "hello" in ask(client, "near")
            answered.release()
            count += 1
        return count

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(go_on) for _ in range(4)]
        try:
            assert all(answered.acquire(timeout=60) for _ in range(20))
            for _ in range(2):
                reloaded = fleet.cli("worker", "reload", "--data", str(fleet.data / "worker"))
                assert reloaded.returncode == 0, reloaded.stderr
                assert all(answered.acquire(timeout=60) for _ in range(40))
        finally:
            stopping.set()
        assert all(each.result() for each in asking)
    assert sockets(fleet) == before
    assert local_connects(fleet) > connects, "to the new worker, by the same socket"


def test_a_worker_killed_with_9_serves_again_through_the_socket(fleet: Fleet, client: openai.OpenAI) -> None:
    ask(client, "near")
    before, connects = sockets(fleet), local_connects(fleet)
    worker = holder_of(fleet.data / "worker")
    assert worker is not None
    os.kill(worker, signal.SIGKILL)

    def answers() -> bool:
        try:
            return "hello" in ask(client, "near")
        except openai.APIError as error:
            raise AssertionError(str(error)) from error

    wait_for(lambda: holder_of(fleet.data / "worker") not in (None, worker), "the next worker", 60)
    wait_for(answers, "an answer", 60)
    assert local_connects(fleet) > connects
    assert sockets(fleet) == before
