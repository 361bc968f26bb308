"""The mock over OpenAI's HTTP."""

from __future__ import annotations

import http.client
import json
import socket
import time
from typing import Any

import pytest

from tests.integration.sdk.conftest import TOKEN, Run
from tests.support.waiting import promised, wait_for


def ask(port: int, path: str, body: Any = None, token: str = TOKEN) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        sent = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, sent, {"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def say(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}]} | more


@pytest.fixture
def port(run: Run) -> int:
    _, port = run("--http", "--model", "m")
    wait_for(lambda: ask(port, "/health")[0] == 200, "health")
    return port


def test_chat_completions_text_and_embeddings(port: int) -> None:
    status, answer = ask(port, "/v1/chat/completions", say("hello there"))
    assert status == 200
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "m"
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "mock 1: hello there"}
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    parts = [{"type": "text", "text": "hello "}, {"type": "image_url"}, {"type": "text", "text": "parts"}]
    assert ask(port, "/v1/chat/completions", {"messages": [{"role": "user", "content": parts}]})[1]["choices"][0][
        "message"
    ]["content"] == ("mock 1: hello parts")
    assert ask(port, "/v1/completions", {"prompt": "x"})[1]["choices"][0]["text"] == "mock 1: x"
    vectors = ask(port, "/v1/embeddings", {"input": ["a", "b"]})[1]["data"]
    assert [len(row["embedding"]) for row in vectors] == [8, 8]
    assert ask(port, "/tokenize", {"content": "a bc"})[1] == {"tokens": [1, 2]}
    assert ask(port, "/v1/models")[1]["data"][0]["id"] == "m"


def events(port: int, body: dict[str, Any]) -> list[str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Authorization": f"Bearer {TOKEN}"})
        answer = connection.getresponse()
        assert answer.getheader("Content-Type") == "text/event-stream"
        return [event.removeprefix("data: ") for event in answer.read().decode().split("\n\n") if event]
    finally:
        connection.close()


def test_a_stream_ends_with_done_and_tells_usage_when_asked(port: int) -> None:
    *told, usage, done = events(port, say("hello", stream=True, stream_options={"include_usage": True}))
    assert done == "[DONE]"
    assert json.loads(usage)["usage"]["completion_tokens"] == 2
    choices = [json.loads(event)["choices"][0] for event in told]
    assert [choice["delta"].get("content") for choice in choices] == ["mock 1:", " hello", None]
    assert [choice["finish_reason"] for choice in choices] == [None, None, "stop"]
    assert len(events(port, say("hello", stream=True))) == 4


@pytest.mark.parametrize("token", ["", "wrong"])
def test_without_the_token_nothing_is_answered(port: int, token: str) -> None:
    assert ask(port, "/health", token=token)[0] == 401
    assert ask(port, "/v1/chat/completions", say("x"), token=token)[0] == 401


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", say("[[busy]] x"), 503),
        ("/v1/chat/completions", say("[[busy]] x", stream=True), 503),
        ("/v1/chat/completions", {"messages": "hello"}, 400),
        ("/v1/chat/completions", {}, 400),
        ("/v1/chat/completions", [], 400),
    ],
)
def test_what_cannot_be_answered_has_its_status(port: int, path: str, body: Any, status: int) -> None:
    got, answer = ask(port, path, body)
    assert got == status
    assert answer["error"]["code"] == status


def test_health_waits_for_the_model(run: Run) -> None:
    _, port = run("--http", "--model", "m", MOCK_LOAD_DELAY_S="3600")
    assert ask(port, "/health") == (503, {"status": "loading model"})
    assert ask(port, "/v1/chat/completions", say("x"))[0] == 503
    _, port = run("--http", "--model", "m", MOCK_LOAD_DELAY_S="0.2")
    wait_for(lambda: ask(port, "/health")[0] == 200, "health")


def test_a_load_that_fails_ends_the_process_with_the_reason(run: Run) -> None:
    process, _ = run("--http", "--model", "m", MOCK_LOAD_FAILS="the weights are broken", wait=False)
    assert process.wait() == 1
    assert process.output().endswith("cannot load m: the weights are broken\n")


def test_a_lie_about_its_identity(run: Run) -> None:
    _, port = run("--http", "--model", "m", MOCK_IDENTITY="impostor")
    wait_for(lambda: ask(port, "/health")[0] == 200, "health")
    assert ask(port, "/v1/models")[1]["data"][0]["id"] == "impostor"


def test_a_crash_in_mid_stream_cuts_the_answer(run: Run) -> None:
    process, port = run("--http", "--model", "m")
    wait_for(lambda: ask(port, "/health")[0] == 200, "health")
    with pytest.raises(http.client.IncompleteRead):
        events(port, say("[[crash_after=2]] a b c", stream=True))
    assert process.wait() == 3


def test_it_exits_when_told(run: Run) -> None:
    process, port = run("--http", "--model", "m")
    wait_for(lambda: ask(port, "/health")[0] == 200, "health")
    with pytest.raises(ConnectionError):
        ask(port, "/v1/chat/completions", say("[[exit=5]]"))
    assert process.wait() == 5


def test_a_client_that_leaves_stops_the_generation(run: Run) -> None:
    """SIGTERM waits for running answers: it is quick only if the abandoned one has ended."""
    process, port = run("--http", "--model", "m")
    wait_for(lambda: ask(port, "/health")[0] == 200, "health")
    body = json.dumps(say("[[hang_after=1]] x", stream=True))
    with socket.create_connection(("127.0.0.1", port)) as client:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        assert b"200 OK" in client.recv(1000)
    began = time.monotonic()
    process.signal(15)
    assert process.wait() == 0
    assert time.monotonic() - began < promised(4)


def test_sigterm_while_it_loads_is_heard(run: Run) -> None:
    process, _ = run("--http", "--model", "m", MOCK_LOAD_DELAY_S="3600")
    process.signal(15)
    assert process.wait() == 0
