"""Replicas of a real fleet, from outside, while clients stream: edited, killed, moved, and unable to start."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support.fleet import Fleet
from tests.support.grown_fleet import grown_fleet
from tests.support.supervising import identities
from tests.support.waiting import wait_for

# Its streams are long enough for all of them to be under way at once, however slowly they begin.
SLOW: Any = [{"role": "user", "content": "[[piece_delay_s=0.6]] a b c d e f g h i j k l"}]
HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with grown_fleet(tmp_path_factory.mktemp("serving"), "byre", env={"CORRAL_LOAD_COOLDOWN": "1s"}) as fleet:
        yield fleet


@pytest.fixture
def client(fleet: Fleet) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=fleet.url + "/v1", api_key=fleet.key, max_retries=0, timeout=60) as client:
        yield client


def define(fleet: Fleet, name: str, **definition: Any) -> None:
    answer = fleet.api("POST", "/api/models", {"definition": {"name": name, "backend": "mock", **definition}})
    assert answer.status == 201, answer.body
    wait_for(lambda: name in [each["id"] for each in fleet.api("GET", "/v1/models").json()["data"]], "its being known")


def replicas(fleet: Fleet, model: str, state: str = "loaded") -> list[dict[str, Any]]:
    rows = fleet.api("GET", f"/api/models/{model}/replicas").json()
    return [row for row in rows if row["state"] == state and (state != "loaded" or row["process_state"] == "ready")]


def stream(client: openai.OpenAI, model: str, asked: Any = SLOW) -> str:
    pieces = client.chat.completions.create(model=model, messages=asked, stream=True)
    return "".join(piece.choices[0].delta.content or "" for piece in pieces)


def kill(fleet: Fleet, process_id: str) -> None:
    found = [each for data in fleet.root.glob("**/processes") for each in identities(data)]
    os.kill(next(each.pid for each in found if each.process_id == process_id), signal.SIGKILL)


def answers(client: openai.OpenAI, model: str) -> bool:
    """A refusal is a reason to look again: who has just come back may not have told where it is."""
    try:
        return "hello" in stream(client, model, HELLO)
    except openai.APIError as error:
        raise AssertionError(f"{model}: {error}") from error


def test_an_edit_under_load_fails_no_request(fleet: Fleet, client: openai.OpenAI) -> None:
    define(fleet, "edited", parallel=32)
    assert "hello" in stream(client, "edited", HELLO)  # installs the backend, starts, answers
    [before] = wait_for(lambda: replicas(fleet, "edited"), "its replica")
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        running = [pool.submit(stream, client, "edited") for _ in range(8)]
        wait_for(lambda: replicas(fleet, "edited")[0]["in_flight"] >= 8, "eight streams")
        changed = fleet.api("PATCH", "/api/models/edited", {"changes": {"context_size": 4096}})
        assert changed.status == 200, changed.body
        assert changed.json()["config_revision"] != before["config_revision"]
        for _ in range(20):
            assert "hello" in stream(client, "edited", HELLO)
        assert all(each.result().endswith("k l") for each in running), "what had begun came to its end"

    def only_the_new_one() -> bool:
        rows = fleet.api("GET", "/api/models/edited/replicas").json()
        return [row["config_revision"] for row in rows] == [changed.json()["config_revision"]]

    wait_for(only_the_new_one, "end of the old one")
    assert "hello" in stream(client, "edited", HELLO)


def test_drain_moves_a_replica_without_a_failed_request(fleet: Fleet, client: openai.OpenAI) -> None:
    define(fleet, "moved", parallel=32)
    assert "hello" in stream(client, "moved", HELLO)
    [before] = wait_for(lambda: replicas(fleet, "moved"), "its replica")
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        running = [pool.submit(stream, client, "moved") for _ in range(4)]
        wait_for(lambda: replicas(fleet, "moved")[0]["in_flight"] >= 4, "four streams")
        assert fleet.api("POST", f"/api/nodes/{before['node_id']}/drain").status == 200
        try:
            for _ in range(15):
                assert "hello" in stream(client, "moved", HELLO)
            assert all(each.result().endswith("k l") for each in running)
            wait_for(
                lambda: [row["node_id"] for row in replicas(fleet, "moved")] not in ([], [before["node_id"]]),
                "a replica elsewhere",
            )
            wait_for(lambda: len(fleet.api("GET", "/api/models/moved/replicas").json()) == 1, "end of the old one")
        finally:
            assert fleet.api("POST", f"/api/nodes/{before['node_id']}/resume").status == 200


def test_a_request_waits_for_the_reload_of_a_lone_replica_that_dies(fleet: Fleet, client: openai.OpenAI) -> None:
    define(fleet, "lone")
    assert "hello" in stream(client, "lone", HELLO)
    [before] = wait_for(lambda: replicas(fleet, "lone"), "its replica")
    release = fleet.root / "release"
    asked: Any = [{"role": "user", "content": f"[[until_file={release}]] hello"}]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(client.chat.completions.create, model="lone", messages=asked)
        try:
            wait_for(lambda: replicas(fleet, "lone")[0]["in_flight"] >= 1, "the request under way")
            kill(fleet, before["process_id"])
        finally:
            release.touch()
        assert "hello" in str(running.result().choices[0].message.content)
    [after] = wait_for(lambda: replicas(fleet, "lone"), "its replica")
    assert after["process_id"] != before["process_id"]


def test_a_stream_outlives_its_replica_where_the_model_asks_for_that(fleet: Fleet, client: openai.OpenAI) -> None:
    define(fleet, "enduring", parallel=8, resume_streams=True)
    schedule = {"model_name": "enduring", "min_replicas": 2}
    assert fleet.api("POST", "/api/nodes/scheduling", schedule).status == 200
    wait_for(lambda: len(replicas(fleet, "enduring")) == 2, "two replicas", 60)
    options: Any = {"include_usage": True}
    pieces = client.chat.completions.create(model="enduring", messages=SLOW, stream=True, stream_options=options)
    chunks = [next(pieces)]

    def serving() -> list[dict[str, Any]]:
        return [row for row in replicas(fleet, "enduring") if row["in_flight"]]

    [row] = wait_for(serving, "the replica that streams")
    kill(fleet, row["process_id"])
    chunks += pieces
    text = "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)
    assert text.endswith("a b c d e f g h i j k l")
    assert text.count("mock") == 1
    assert len({(each.id, each.created, each.model) for each in chunks}) == 1
    [usage] = [each.usage for each in chunks if each.usage]
    assert usage.completion_tokens == 13
    wait_for(lambda: "resumed once, 2 attempts" in fleet.cli("requests", "--model", "enduring").stdout, "its receipt")
    [receipt] = json.loads(fleet.cli("requests", "--model", "enduring", "--json").stdout)
    assert (receipt["status"], receipt["resumed"], receipt["ending"]) == (200, 1, "")
    assert receipt["process_id"] != row["process_id"]
    assert "continued on another replica" in fleet.cli("why", "model", "enduring").stdout


def test_a_backend_that_cannot_start_gives_its_last_words(fleet: Fleet, client: openai.OpenAI) -> None:
    define(fleet, "broken", env={"MOCK_START_LINES": "3", "MOCK_CRASH_AT_START": "3"})
    with pytest.raises(openai.APIError) as failed:
        client.chat.completions.create(model="broken", messages=HELLO)
    assert "mock start line 3" in str(failed.value)
    status = fleet.api("GET", "/api/models/broken/load-status")
    assert status.status in (200, 404)
    mended = fleet.api("PATCH", "/api/models/broken", {"changes": {"env": {"MOCK_CRASH_AT_START": None}}})
    assert mended.status == 200, mended.body
    assert "hello" in stream(client, "broken", HELLO), "what was mended is tried at once"


def test_a_worker_killed_and_back_keeps_its_replicas(fleet: Fleet, client: openai.OpenAI) -> None:
    define(fleet, "kept", parallel=4)
    asked = {"model_name": "kept", "min_replicas": 1, "node_selector": {"node.name": "byre"}}
    assert fleet.api("POST", "/api/nodes/scheduling", asked).status == 200
    [before] = wait_for(lambda: replicas(fleet, "kept"), "a replica on the byre")
    process = fleet.workers["byre-0"]
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    fleet.wait_status("byre", "offline")
    fleet.join("byre")
    fleet.wait_status("byre", "healthy")
    wait_for(lambda: answers(client, "kept"), "an answer")
    [after] = wait_for(lambda: replicas(fleet, "kept"), "the replica on the byre")
    assert json.dumps(after["process_id"]) == json.dumps(before["process_id"]), "it was adopted, not started again"


def test_requests_under_way_and_the_log_of_the_worker(fleet: Fleet, client: openai.OpenAI) -> None:
    """From the gateway through the bus to whoever looks; the worker says what it did for it."""
    define(fleet, "pausing")

    def rows() -> list[dict[str, Any]]:
        return list(fleet.api("GET", "/api/requests/running?model=pausing").json()["requests"])

    asked: Any = [{"role": "user", "content": "[[hang_after=3]] a b c d e"}]
    with client.chat.completions.create(model="pausing", messages=asked, stream=True) as pieces:
        next(iter(pieces))
        [row] = wait_for(lambda: [each for each in rows() if each["tokens"] >= 2], "its row, with tokens")
        assert (row["state"], row["path"]) == ("running", "/v1/chat/completions")
        assert row["running_ms"] > 0
        told = fleet.api("GET", f"/api/nodes/{row['node']}/log").json()
        assert [line for line in told if "process ready" in line["text"] and "pausing#0" in line["text"]]
    wait_for(lambda: not rows(), "nothing under way")
