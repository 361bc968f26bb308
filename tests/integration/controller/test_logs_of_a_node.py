"""What backends wrote, read through gateway and controller: from a real worker, and from a LocalAI one."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from corral.kit.files import make_folder
from corral.worker.supervisor.table import Running
from tests.integration.controller.test_node_self_service import HandMadeNode
from tests.support.cluster import Cluster
from tests.support.fleet import Answer
from tests.support.supervising import get, make_supervisor, swept, tiny
from tests.support.waiting import until


def ask(cluster: Cluster, path: str) -> Answer:
    return cluster.api(cluster.members[0], "GET", path)


async def test_a_workers_logs_are_listed_read_and_followed(cluster: Cluster, tmp_path: Path) -> None:
    member = cluster.members[0]
    data = cluster.root / "worker-scribe"
    make_folder(data)
    with swept(data / "processes"):
        async with make_supervisor(data / "processes") as supervisor:
            running = await supervisor.start(tiny(tmp_path / "tiny", "lines=3", model="org/llama"))
        cluster.join(member, "scribe", cluster.token(member, pre_approved=True))
        logs = "/api/nodes/scribe/backend-logs"
        await until(lambda: asyncio.to_thread(lambda: ask(cluster, logs).json() == ["org/llama"]))
        told = (await asyncio.to_thread(ask, cluster, f"{logs}/org%2Fllama")).json()
        assert [line["text"] for line in told] == ["tiny line 1", "tiny line 2", "tiny line 3"]
        assert told[0].keys() == {"timestamp", "stream", "text"}
        assert (await asyncio.to_thread(ask, cluster, f"{logs}/org/llama%230?tail=1")).json() == told[-1:]
        assert (await asyncio.to_thread(ask, cluster, f"{logs}/nobody")).json() == []
        headers = {"Authorization": f"Bearer {cluster.key}"}
        async with (
            asyncio.timeout(30),
            aiohttp.ClientSession(member.url, headers=headers) as session,
            session.get(f"{logs}/org%2Fllama?follow=true&tail=1") as follower,
        ):
            assert json.loads(await follower.content.readline())["text"] == "tiny line 3"
            await asyncio.to_thread(get, running.port, "/say/hello", token=running.token)
            assert json.loads(await follower.content.readline())["text"] == "hello"
        await follow_over_a_websocket(member.url, headers, running)
        await read_the_workers_own_log(cluster, member.url, headers)
        await see_no_password(member.url, headers, running)


async def read_the_workers_own_log(cluster: Cluster, url: str, headers: dict[str, str]) -> None:
    """Its names are no names of backends' logs, and a reader does not read about itself."""
    path = "/api/nodes/scribe/log"
    told = (await asyncio.to_thread(ask, cluster, path)).json()
    assert "worker starts" in told[0]["text"]
    assert told[0].keys() == {"timestamp", "stream", "text"}
    assert len((await asyncio.to_thread(ask, cluster, f"{path}?tail=1")).json()) == 1
    assert (await asyncio.to_thread(ask, cluster, "/api/nodes/scribe/backend-logs")).json() == ["org/llama"]
    async with (
        asyncio.timeout(30),
        aiohttp.ClientSession(url, headers=headers) as session,
        session.get(f"{path}?follow=true&tail=1") as follower,
    ):
        json.loads(await follower.content.readline())
        for _ in range(20):
            told = (await asyncio.to_thread(ask, cluster, path)).json()
    assert not [line for line in told if "/corral/log" in line["text"]]


async def see_no_password(url: str, headers: dict[str, str], running: Running) -> None:
    """By neither way of following, nor by reading."""
    logs, secret, shown = "/api/nodes/scribe/backend-logs/org%2Fllama", "https://me:s3cret@h/x", "https://***@h/x"
    async with asyncio.timeout(30), aiohttp.ClientSession(url, headers=headers) as session:
        path = "/ws/nodes/scribe/backend-logs/org%2Fllama"
        async with session.ws_connect(path, compress=15) as socket, session.get(f"{logs}?follow=true&tail=0") as lines:
            await socket.receive_json()
            await asyncio.to_thread(get, running.port, f"/say/{secret}", token=running.token)
            assert (await socket.receive_json())["line"]["text"] == shown
            assert json.loads(await lines.content.readline())["text"] == shown
        async with session.ws_connect(path) as socket:
            assert (await socket.receive_json())["lines"][-1]["text"] == shown
        async with session.get(f"{logs}?tail=1") as answer:
            assert [line["text"] for line in await answer.json()] == [shown]


async def follow_over_a_websocket(url: str, headers: dict[str, str], running: Running) -> None:
    path = "/ws/nodes/scribe/backend-logs/org%2Fllama"
    async with asyncio.timeout(30), aiohttp.ClientSession(url, headers=headers) as session:
        for model in ("org%2Fllama", "org/llama%230"):
            async with session.ws_connect(f"/ws/nodes/scribe/backend-logs/{model}", headers={"Origin": url}) as socket:
                first = await socket.receive_json()
                assert (first["type"], first["lines"][-1]["text"]) == ("initial", "hello")
                await asyncio.to_thread(get, running.port, "/say/hello", token=running.token)
                told = await socket.receive_json()
                assert (told["type"], told["line"]["text"]) == ("line", "hello")
        refusals = [
            (path, {"Origin": "http://elsewhere.example"}, 403),
            (path, {"Authorization": "Bearer nonsense"}, 401),
            ("/ws/nodes/nobody/backend-logs/m", {}, 404),
            ("/ws/elsewhere", {}, 404),
        ]
        for refused, shown, status in refusals:
            with pytest.raises(aiohttp.WSServerHandshakeError) as answer:
                await session.ws_connect(refused, headers=shown)
            assert answer.value.status == status, refused


async def test_a_node_that_is_not_there(cluster: Cluster) -> None:
    assert (await asyncio.to_thread(ask, cluster, "/api/nodes/nobody/backend-logs")).status == 404
    node = HandMadeNode(cluster, pre_approved=True, ingress={"port": 1, "advertise": "127.0.0.1:1"})
    await asyncio.to_thread(node.register)
    answer = await asyncio.to_thread(node.admin, "GET", "/backend-logs/m")
    assert answer.status == 502
    assert "cannot be reached" in answer.json()["error"]["message"]
    follow = await asyncio.to_thread(node.admin, "GET", "/backend-logs/m?follow=true")
    assert follow.status == 502
    headers = {"Authorization": f"Bearer {cluster.key}"}
    async with aiohttp.ClientSession(cluster.members[0].url, headers=headers) as session:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await session.ws_connect(f"/ws/nodes/{node.name}/backend-logs/m")
        assert refused.value.status == 502


async def test_a_localai_worker_is_shown_the_token_it_knows(cluster: Cluster) -> None:
    seen: list[Any] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append((request.headers["Authorization"], request.raw_path))
        return web.json_response(["m"])

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        node = HandMadeNode(cluster, pre_approved=True)
        registered = await asyncio.to_thread(
            node.register,
            token="shared-token-of-localai",
            protocol=0,
            enrolment="",
            ingress=None,
            address=f"127.0.0.1:{port + 1}",
            http_address=f"127.0.0.1:{port}",
        )
        assert registered.status == 201, registered.body
        assert (await asyncio.to_thread(node.admin, "GET", "/backend-logs/a%2Fb%23c")).json() == ["m"]
        assert ("Bearer shared-token-of-localai", "/v1/backend-logs/a%2Fb%23c") in seen
        own = await asyncio.to_thread(node.admin, "GET", "/log")
        assert (own.status, "is a LocalAI worker" in own.json()["error"]["message"]) == (404, True)
        seen.clear()
        other = HandMadeNode(cluster, pre_approved=True)
        registered = await asyncio.to_thread(
            other.register,
            protocol=0,
            ingress=None,
            address=f"127.0.0.1:{port + 1}",
            http_address=f"127.0.0.1:{port}",
        )
        assert registered.status == 201, registered.body
        await asyncio.to_thread(other.admin, "GET", "/backend-logs/m")
    finally:
        await runner.cleanup()
    shown = " ".join(authorization for authorization, _ in seen)
    assert "shared-token-of-localai" not in shown, "it joined with a token of its own, and says it is LocalAI's"
