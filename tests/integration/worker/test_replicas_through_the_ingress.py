"""Requests to real backend processes through the worker's one port: exactly that process, or nobody."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from corral.bus.local import LocalHub
from corral.contract.messages.replicas import NODE_LOAD, NodeLoad
from corral.kit.clock import SystemClock
from corral.kit.tasks import background
from corral.worker.ingress import logs
from corral.worker.ingress.load_reports import LoadReports
from tests.support.ingress_with_backends import Worksite, open_site
from tests.support.supervising import mock_grpc, mock_openai, tiny
from tests.support.waiting import until


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Worksite]:
    async with open_site(tmp_path) as opened:
        yield opened


def chat(prompt: str, *, stream: bool = False) -> dict[str, object]:
    return {"model": "m", "stream": stream, "messages": [{"role": "user", "content": prompt}]}


async def test_the_mock_answers_through_the_ingress(site: Worksite) -> None:
    running = await site.supervisor.start(mock_openai())
    path = f"/replicas/{running.process_id}/v1/chat/completions"
    status, answer = await site.ask(path, method="POST", body=chat("hello"))
    assert status == 200
    assert "hello" in answer["choices"][0]["message"]["content"]
    async with (
        aiohttp.ClientSession() as session,
        session.post(site.url + path, headers=site.headers(), json=chat("hello", stream=True)) as streamed,
    ):
        assert streamed.content_type == "text/event-stream"
        assert (await streamed.text()).rstrip().endswith("data: [DONE]")


async def test_trace_is_not_relayed_to_a_replica(site: Worksite) -> None:
    running = await site.supervisor.start(mock_openai())
    status, answer = await site.ask(f"/replicas/{running.process_id}/v1/models", method="TRACE")
    assert (status, answer["error"]["code"]) == (501, 501)


async def test_the_process_sees_its_own_token_and_nobody_elses(site: Worksite, tmp_path: Path) -> None:
    running = await site.supervisor.start(tiny(tmp_path / "tiny"))
    status, answer = await site.ask(f"/replicas/{running.process_id}/anything?x=1")
    assert (status, answer) == (200, {"pid": running.pid, "authorization": f"Bearer {running.token}"})
    assert (await site.ask(f"/replicas/{running.process_id}"))[0] == 200  # its root


async def test_only_the_replicas_scope_opens_it(site: Worksite, tmp_path: Path) -> None:
    running = await site.supervisor.start(tiny(tmp_path / "tiny"))
    assert (await site.ask(f"/replicas/{running.process_id}/x", scope="logs"))[0] == 403
    async with aiohttp.ClientSession() as session, session.get(f"{site.url}/replicas/{running.process_id}/x") as answer:
        assert answer.status == 401
        assert answer.headers["x-corral-not-reached"] == "1"  # another replica may take the request


async def test_an_unknown_process_answers_410(site: Worksite) -> None:
    status, answer = await site.ask("/replicas/nobody/v1/chat/completions", method="POST", body=chat("x"))
    assert status == 410
    assert answer["error"] == {
        "code": 410,
        "message": "no process 'nobody' serves here any more; pick another",
        "type": "gone",
    }


async def test_a_grpc_process_answers_as_any_other(site: Worksite) -> None:
    running = await site.supervisor.start(mock_grpc(load='{"Model": "m"}'))
    path = f"/replicas/{running.process_id}/v1/chat/completions"
    status, answer = await site.ask(path, method="POST", body=chat("hello"))
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "mock 1: hello")


@pytest.mark.parametrize("protocol", ["openai", "grpc"])
async def test_killed_behind_the_workers_back_it_comes_back_as_another(site: Worksite, protocol: str) -> None:
    spec = mock_openai() if protocol == "openai" else mock_grpc(load='{"Model": "m"}')
    first = await site.supervisor.start(spec)
    os.kill(first.pid, signal.SIGKILL)
    await until(lambda: site.supervisor.find(first.process_id) is None)  # at once, nobody asked
    status, _ = await site.ask(f"/replicas/{first.process_id}/v1/models")
    assert status == 410
    await until(lambda: site.supervisor.find_key("m#0") is not None)
    second = site.supervisor.find_key("m#0")
    assert second is not None
    assert (second.process_id, second.token) != (first.process_id, first.token)
    assert (await site.ask(f"/replicas/{first.process_id}/v1/models"))[0] == 410  # never the other's answer
    assert (await site.ask(f"/replicas/{second.process_id}/v1/models"))[0] == 200
    assert [row.restarts for row in site.supervisor.list_processes()] == [1]


async def test_a_process_that_ends_before_it_answers_is_said_to_have_ended(site: Worksite, tmp_path: Path) -> None:
    running = await site.supervisor.start(tiny(tmp_path / "tiny"))
    async with aiohttp.ClientSession() as session:
        path = f"/replicas/{running.process_id}/when{tmp_path}/never"
        asking = asyncio.create_task(_ended(session, "GET", site.url + path, site.headers()))
        await until((tmp_path / "never.asked").exists, "the request has reached the process")
        os.kill(running.pid, signal.SIGKILL)
        assert await asking == (502, "1")


async def test_a_grpc_process_that_ends_before_it_answers_is_said_to_have_ended(site: Worksite) -> None:
    running = await site.supervisor.start(mock_grpc(load='{"Model": "m"}'))
    path = f"/replicas/{running.process_id}/v1/chat/completions"
    assert (await site.ask(path, method="POST", body=chat("hello")))[0] == 200  # there is a connection
    async with aiohttp.ClientSession() as session:
        body = chat("[[first_delay_s=60]] hello")
        asking = asyncio.create_task(_ended(session, "POST", site.url + path, site.headers(), body))
        await until(lambda: site.routes.in_flight.of(running.process_id), "the request is under way")
        os.kill(running.pid, signal.SIGKILL)
        assert await asking == (502, "1")


async def _ended(
    session: aiohttp.ClientSession, method: str, url: str, headers: dict[str, str], body: object = None
) -> tuple[int, str | None]:
    async with session.request(method, url, headers=headers, json=body) as answer:
        return answer.status, answer.headers.get("X-Corral-Process-Ended")


async def test_a_stranger_on_the_port_of_one_that_died_is_never_asked(site: Worksite) -> None:
    """It may well answer, for another model: what was asked of that process is refused, and its successor listens
    elsewhere."""
    first = await site.supervisor.start(mock_openai())
    os.kill(first.pid, signal.SIGKILL)
    await until(lambda: site.supervisor.find(first.process_id) is None)
    asked: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readline())
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", first.port):
        await until(lambda: site.supervisor.find_key("m#0") is not None)
        second = site.supervisor.find_key("m#0")
        assert second is not None
        assert second.port != first.port
        for _ in range(5):
            assert (await site.ask(f"/replicas/{first.process_id}/v1/models"))[0] == 410
            assert (await site.ask(f"/replicas/{second.process_id}/v1/models"))[0] == 200
    assert asked == []


async def test_requests_while_a_process_is_killed_again_and_again(site: Worksite, tmp_path: Path) -> None:
    """What is asked of one process is answered by that one, or not at all: 410, 502, 503, or an answer visibly broken
    off where the process died between its head and its body."""
    await site.supervisor.start(tiny(tmp_path / "tiny"))
    seen: set[int] = set()
    good: set[str] = set()
    wrong: set[str] = set()
    stopping = asyncio.Event()
    pids: dict[str, int] = {}

    async def ask(session: aiohttp.ClientSession) -> None:
        while not stopping.is_set():
            for process_id, pid in list(pids.items())[-2:]:
                url = f"{site.url}/replicas/{process_id}/x"
                async with session.get(url, headers=site.headers()) as answer:
                    seen.add(answer.status)
                    try:
                        content = json.loads(await answer.text())
                    except aiohttp.ClientPayloadError:
                        continue
                    if answer.status == 200:
                        (good if content["pid"] == pid else wrong).add(process_id)

    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as tasks:
        for _ in range(4):
            tasks.create_task(ask(session))
        for _ in range(3):
            await until(lambda: site.supervisor.find_key("m#0") is not None)
            running = site.supervisor.find_key("m#0")
            assert running is not None
            pids[running.process_id] = running.pid
            await until(lambda: running.process_id in good)  # noqa: B023 - awaited in the same round
            os.kill(running.pid, signal.SIGKILL)
            await until(lambda: site.supervisor.find_key("m#0") is None)
        stopping.set()
    assert wrong == set()
    assert good == set(pids)
    assert seen <= {200, 410, 502, 503}
    assert {200, 410} <= seen


async def test_a_process_that_is_replaced_takes_nothing_new_and_finishes_what_it_has(
    site: Worksite, tmp_path: Path
) -> None:
    running = await site.supervisor.start(tiny(tmp_path / "tiny"))
    path = f"/replicas/{running.process_id}"
    asking = asyncio.ensure_future(site.ask(f"{path}/when{tmp_path}/go"))
    await until((tmp_path / "go.asked").exists)
    assert site.routes.in_flight.of(running.process_id) == 1
    assert await site.routes.replicas.retire(running.process_id, 0.01) is False
    status, answer = await site.ask(path)
    assert (status, answer["error"]["type"]) == (410, "gone")
    retiring = asyncio.ensure_future(site.routes.replicas.retire(running.process_id, 20))
    (tmp_path / "go").touch()
    status, answer = await asking
    assert (status, answer["pid"]) == (200, running.pid)  # what was under way came to its end
    assert await retiring is True
    site.routes.replicas.take_back(running.process_id)
    assert (await site.ask(path))[0] == 200


async def test_load_is_told_while_it_changes_and_no_more_often_than_it_may(
    site: Worksite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await site.supervisor.start(tiny(tmp_path / "tiny"))
    told: list[NodeLoad] = []
    at: list[float] = []  # when it was said: it may be heard later

    async def hear(load: NodeLoad, _tokens: object) -> None:
        told.append(load)

    async with LocalHub(SystemClock()).join("worker") as bus:
        publish = bus.publish

        async def say(*words: Any, **tokens: str) -> None:
            at.append(time.monotonic())
            await publish(*words, **tokens)

        monkeypatch.setattr(bus, "publish", say)
        await bus.subscribe(NODE_LOAD, hear, node="node-1")
        reports = LoadReports(site.routes.in_flight, boot_id="boot-1", interval_s=0.2, repeat_s=0.4)
        path = f"/replicas/{running.process_id}/when{tmp_path}/go"
        async with background(reports.run(bus, "node-1")):
            async with asyncio.TaskGroup() as tasks:
                for _ in range(3):
                    tasks.create_task(site.ask(path))
                await until(lambda: told and told[-1].in_flight == {running.process_id: 3})
                (tmp_path / "go").touch()
            await until(lambda: told[-1].in_flight == {})
            last = told[-1]
            await until(lambda: told[-1].seq == last.seq + 1)  # once more, in case that one was lost
            assert told[-1].in_flight == {}
    assert [load.seq for load in told] == list(range(1, len(told) + 1))
    assert min(later - earlier for earlier, later in itertools.pairwise(at)) >= 0.19


async def test_a_client_that_leaves_takes_its_request_with_it(site: Worksite) -> None:
    running = await site.supervisor.start(mock_openai())
    url = f"{site.url}/replicas/{running.process_id}/v1/chat/completions"
    async with aiohttp.ClientSession() as session:
        answer = await session.post(url, headers=site.headers(), json=chat("[[hang_after=1]] one two", stream=True))
        await answer.content.readline()
        assert site.routes.in_flight.counts() == {running.process_id: 1}
        answer.close()
        await until(lambda: site.routes.in_flight.counts() == {})


async def test_logs_listed_read_and_shortened(site: Worksite, tmp_path: Path) -> None:
    running = await site.supervisor.start(tiny(tmp_path / "tiny", "lines=3", model="llama#1"))
    await until(lambda: len(site.supervisor.logs.read("llama#1")) == 3)  # it may serve before its shim has read them
    assert await site.ask("/v1/backend-logs", scope="logs") == (200, ["llama#1"])
    status, lines = await site.ask("/v1/backend-logs/llama%231", scope="logs")
    assert status == 200
    assert [line["text"] for line in lines] == ["tiny line 1", "tiny line 2", "tiny line 3"]
    assert {line["stream"] for line in lines} == {"stderr"}
    assert lines[0].keys() == {"timestamp", "stream", "text"}
    assert await site.ask("/v1/backend-logs/llama%231%230?tail=1", scope="logs") == (200, lines[-1:])
    assert await site.ask("/v1/backend-logs/nobody", scope="logs") == (200, [])
    assert (await site.ask("/v1/backend-logs/x?tail=many", scope="logs"))[0] == 400
    assert (await site.ask("/v1/backend-logs", scope="logs", method="POST"))[0] == 405
    assert (await site.ask("/v1/backend-logs"))[0] == 403  # the wrong scope
    async with aiohttp.ClientSession() as session, session.get(f"{site.url}/v1/backend-logs") as answer:
        assert (answer.status, await answer.text()) == (401, "unauthorized\n")
    await site.supervisor.stop(running.process_id)
    assert len((await site.ask("/v1/backend-logs/llama%231", scope="logs"))[1]) == 3  # people come for these


async def test_a_log_is_followed_over_a_websocket(site: Worksite, tmp_path: Path) -> None:
    running = await site.supervisor.start(tiny(tmp_path / "tiny", "lines=2"))
    await until(lambda: len(site.supervisor.logs.read("m")) == 2)
    url = f"{site.url}/v1/backend-logs/m/ws"
    async with (
        aiohttp.ClientSession(headers=site.headers("logs")) as session,
        session.ws_connect(url, headers={"Origin": site.url}) as socket,
        asyncio.timeout(20),
    ):
        first = await socket.receive_json()
        assert first["type"] == "initial"
        assert [line["text"] for line in first["lines"]] == ["tiny line 1", "tiny line 2"]
        await site.ask(f"/replicas/{running.process_id}/say/hello")
        told = await socket.receive_json()
        assert told["type"] == "line"
        assert (told["line"]["stream"], told["line"]["text"]) == ("stderr", "hello")
        await until(lambda: site.ingress.in_flight == 0)  # a follower does not keep the worker from leaving
    async with aiohttp.ClientSession(headers=site.headers("logs")) as session:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await session.ws_connect(url, headers={"Origin": "http://elsewhere.example"})
        assert refused.value.status == 403
        async with session.get(url) as answer:
            assert answer.status == 400


async def test_a_log_is_followed_line_by_line(site: Worksite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "KEEPALIVE_S", 0.2)
    running = await site.supervisor.start(tiny(tmp_path / "tiny", "lines=5"))
    await until(lambda: len(site.supervisor.logs.read("m")) == 5)
    url = f"{site.url}/v1/backend-logs/m?follow=true&tail=1"
    async with (
        aiohttp.ClientSession(headers=site.headers("logs")) as session,
        session.get(url) as answer,
        asyncio.timeout(20),
    ):
        assert json.loads(await answer.content.readline())["text"] == "tiny line 5"
        assert await answer.content.readline() == b"\n"  # nothing new, but still there
        await site.ask(f"/replicas/{running.process_id}/say/more")
        while (line := await answer.content.readline()) == b"\n":
            pass
        assert json.loads(line)["text"] == "more"
