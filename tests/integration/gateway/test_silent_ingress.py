"""An ingress that stops responding while requests wait there. A slow answer is no sign of that."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from corral.contract.manifest import Manifest, Ready
from corral.gateway.main import Gateway, open_gateway
from corral.kit.clock import SystemClock
from corral.worker.supervisor.spec import ProcessSpec
from tests.integration.gateway.conftest import KEYS, USER, OpenGateway, bearer
from tests.integration.gateway.fleet import CHAT, SHORT, GatewayFleet, open_fleet
from tests.integration.gateway.scripted_controller import (
    GATEWAY_KEY,
    ScriptedController,
    running_controller,
    settings_with,
)
from tests.integration.gateway.scripted_ingress import running_ingress
from tests.support.ingress_with_backends import NODE, Worksite, open_site
from tests.support.network import Lan, two_machines
from tests.support.processes import free_port
from tests.support.waiting import promised, until

PROCESS = Path(__file__).with_name("ingress_process.py")
QUICK = {"ingress_silent_s": 0.3}
STOPPED = {"id": "n9", "name": "stopped", "status": "healthy"}
P1 = {"process_id": "p1", "node_id": "n1", "model": "small", "slots": 64}
SILENT_S = 60.0
# Tells that it was asked, and then sends nothing for a minute: no head, no byte.
SILENT = """
import http.server, json, pathlib, sys, time
host, port, asked, silent_s = sys.argv[1], int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *words): pass
    def do_GET(self): self.answer(b"{}")
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with open(asked, "a") as file: file.write(body["user"] + chr(10))
        time.sleep(silent_s)
        said = json.dumps({"choices": [{"delta": {"content": "at last"}}]}).encode()
        self.answer(b"data: " + said + b"\\n\\ndata: [DONE]\\n\\n" if body.get("stream") else said)
    def answer(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
http.server.ThreadingHTTPServer((host, port), Handler).serve_forever()
"""
Answering = Callable[[web.Request], Awaitable[web.StreamResponse]]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")


@pytest.fixture
async def fleet(
    controller: ScriptedController, open_one: OpenGateway, http: aiohttp.ClientSession
) -> AsyncIterator[GatewayFleet]:
    async with open_fleet(controller, open_one, http) as fleet:
        yield fleet


@pytest.fixture
def lan() -> Iterator[Lan]:
    with two_machines() as lan:
        yield lan


class StoppableIngress:
    def __init__(self, process: asyncio.subprocess.Process, port: int, settings: dict[str, Any]) -> None:
        self.process = process
        self.settings = settings  # of a gateway that reaches it
        self.view = {**STOPPED, "ingress_url": f"http://127.0.0.1:{port}"}
        self.replica = {"process_id": "p9", "node_id": "n9", "model": "small", "revision": "r1", "slots": 64}

    async def came(self) -> str:
        assert self.process.stdout is not None
        async with asyncio.timeout(30):
            return (await self.process.stdout.readline()).decode().strip()


@contextlib.asynccontextmanager
async def stoppable_ingress(sockets: Path | None = None) -> AsyncIterator[StoppableIngress]:
    """On a port, or on a unix socket in `sockets`; then nothing listens on its port."""
    port = free_port()
    words = [] if sockets is None else [str(sockets / f"{STOPPED['id']}-{port}.sock")]
    process = await asyncio.create_subprocess_exec(sys.executable, str(PROCESS), *words, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    settings: dict[str, Any] = {} if sockets is None else {"local_sockets": sockets}
    try:
        yield StoppableIngress(process, int(await process.stdout.readline()) or port, settings)
    finally:
        process.kill()
        await process.wait()


async def test_a_slow_answer_behind_a_live_ingress_is_waited_for_and_made_once(fleet: GatewayFleet) -> None:
    fleet.both(slots=64)
    fleet.one.held = fleet.two.held = asyncio.Event()
    gateway = await fleet.gateway(**QUICK)
    asking = [asyncio.create_task(fleet.who(gateway)) for _ in range(8)]
    await until(lambda: len(fleet.one.came) + len(fleet.two.came) == 8, "eight requests under way")
    # Twenty times as long as an ingress may be silent: with the usual 3 s, a minute.
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(20 * QUICK["ingress_silent_s"]):
            await asyncio.gather(*(asyncio.shield(each) for each in asking))
    fleet.one.held.set()
    assert sorted(await asyncio.gather(*asking)) == ["p1"] * 4 + ["p2"] * 4
    assert len(fleet.one.came) + len(fleet.two.came) == 8
    assert [row.get("tries", 1) for row in await fleet.receipts(8)] == [1] * 8


@pytest.mark.long
@pytest.mark.timeout(5 * SILENT_S)
async def test_a_replica_that_is_silent_for_a_minute_behind_a_real_ingress_runs_each_request_once(
    controller: ScriptedController, open_one: OpenGateway, tmp_path: Path
) -> None:
    """All settings that judge silence are the usual ones, and another replica is there to be asked instead."""
    asked = tmp_path / "asked"
    async with (
        open_site(tmp_path) as site,
        open_one(receipts_interval_s=0.02) as gateway,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=4 * SILENT_S)) as http,
    ):
        assert gateway.settings.ingress_silent_s == 3.0
        controller.change(nodes=[node_of(site)], replicas=[await silent_replica(site, tmp_path, n) for n in range(2)])
        await gateway.views.run_once()
        started = time.monotonic()

        async def wait_for_answer(user: str, **more: Any) -> str:
            body = {"model": "small", "messages": [], "user": user, **more}
            async with http.post(f"{gateway.url}{CHAT}", headers=bearer(USER), json=body) as answer:
                assert answer.status == 200
                text = await answer.text()
            assert time.monotonic() - started >= SILENT_S
            return text

        users = [f"{kind}-{number}" for kind in ("whole", "streamed") for number in range(4)]
        asking = [asyncio.create_task(wait_for_answer(user, stream=user.startswith("streamed"))) for user in users]
        assert all("at last" in text for text in await asyncio.gather(*asking))
        assert sorted(asked.read_text().split()) == sorted(users), "each ran once"
        await until(lambda: len(controller.receipts) == 8, "receipts")
        assert [row.get("tries", 1) for row in controller.receipts] == [1] * 8


def node_of(site: Worksite) -> dict[str, Any]:
    return {"id": NODE, "name": "w1", "status": "healthy", "ingress_url": site.url, "ingress_token": site.token()}


async def silent_replica(site: Worksite, folder: Path, index: int) -> dict[str, Any]:
    """A process behind the ingress, and how the view names it."""
    (folder / "silent.py").write_text(SILENT)
    manifest = Manifest(
        protocol="openai",
        command=(sys.executable, "-I", "silent.py", "{host}", "{port}", str(folder / "asked"), str(SILENT_S)),
        ready=Ready(path="/health", timeout_s=20.0),
    )
    spec = ProcessSpec(directory=str(folder), manifest=manifest, backend="silent", model="small", replica=index)
    running = await site.supervisor.start(spec)
    return {"process_id": running.process_id, "node_id": NODE, "model": "small", "slots": 64}


@pytest.mark.parametrize("way", ["tcp", "unix"])
async def test_another_replica_answers_for_a_stopped_ingress(fleet: GatewayFleet, short_folder: Path, way: str) -> None:
    async with stoppable_ingress(short_folder if way == "unix" else None) as stopped:
        fleet.controller.change(nodes=[stopped.view, fleet.one.view], replicas=[stopped.replica])
        gateway = await fleet.gateway(**QUICK, **stopped.settings, eject_s=0.01)
        asking = asyncio.create_task(fleet.who(gateway))
        assert await stopped.came() == f"came /replicas/p9{CHAT}"
        stopped.process.send_signal(signal.SIGSTOP)
        fleet.controller.change(replicas=[stopped.replica, fleet.one.replica("p1", slots=64)])
        await gateway.views.run_once()
        assert await asking == "p1"
        # The stopped one gets no request until it responds again, however short other ejections are.
        assert {await fleet.who(gateway) for _ in range(20)} == {"p1"}
        receipts = await fleet.receipts(21)
        assert [row.get("tries", 1) for row in receipts].count(2) == 1
        stopped.process.send_signal(signal.SIGCONT)
        going_on = asyncio.create_task(_ask_until_stuck(fleet, gateway))
        assert await stopped.came() == f"came /replicas/p9{CHAT}"
        going_on.cancel()


@pytest.mark.parametrize("way", ["tcp", "unix"])
async def test_a_lone_replica_is_waited_for_until_its_ingress_responds(
    fleet: GatewayFleet, short_folder: Path, way: str
) -> None:
    async with stoppable_ingress(short_folder if way == "unix" else None) as stopped:
        fleet.controller.change(nodes=[stopped.view], replicas=[stopped.replica])
        gateway = await fleet.gateway(**QUICK, **stopped.settings, eject_s=0.01)
        asking = asyncio.create_task(fleet.who(gateway))
        await stopped.came()
        stopped.process.send_signal(signal.SIGSTOP)
        await until(lambda: gateway.metrics.gauges["waiting"][1]() == 1, "the request waits for a replica")
        stopped.process.send_signal(signal.SIGCONT)
        assert await stopped.came() == f"came /replicas/p9{CHAT}", "sent again, once, when it responds"
        asking.cancel()


async def test_a_lone_replica_that_stays_silent_is_told_apart_from_a_busy_one(fleet: GatewayFleet) -> None:
    async with stoppable_ingress() as stopped:
        fleet.controller.change(nodes=[stopped.view], replicas=[stopped.replica])
        gateway = await fleet.gateway(**QUICK, queue_wait_s=0.5)
        stopped.process.send_signal(signal.SIGSTOP)
        status, answer, headers = await fleet.ask(gateway)
        assert status == 503
        assert "could be reached" in answer["error"]["message"]
        assert headers["Retry-After"]
        stopped.process.send_signal(signal.SIGCONT)


async def _ask_until_stuck(fleet: GatewayFleet, gateway: Gateway) -> None:
    while True:
        await fleet.who(gateway)


@contextlib.asynccontextmanager
async def far_replica(far: socket.socket, answer: Answering) -> AsyncIterator[dict[str, Any]]:
    """The view's node of an ingress that listens on `far`, where process p1 is."""
    app = web.Application()
    app.router.add_route("POST", "/replicas/p1/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.SockSite(runner, far).start()
    host, port = far.getsockname()[:2]
    try:
        yield {"id": "n1", "name": "far", "status": "healthy", "ingress_url": f"http://{host}:{port}"}
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def gateway_before(path: Path, node: dict[str, Any]) -> AsyncIterator[tuple[ScriptedController, Gateway]]:
    """With the usual time for an ingress to be silent."""
    settings: dict[str, Any] = {**SHORT, "controller": f"unix:{path}", "gateway_key": GATEWAY_KEY, "port": 0}
    async with (
        running_controller(path, keys=list(KEYS), models=[{"id": "small"}]) as controller,
        open_gateway(settings_with({**settings, "hints": False}), SystemClock()) as gateway,
    ):
        controller.change(nodes=[node], replicas=[P1])
        await gateway.views.run_once()
        yield controller, gateway


async def ask(http: aiohttp.ClientSession, gateway: Gateway) -> tuple[str, float]:
    """Who answered, and how long it took."""
    started = time.monotonic()
    body = {"model": "small", "messages": []}
    async with http.post(f"{gateway.url}{CHAT}", headers=bearer(USER), json=body) as answer:
        return (await answer.json())["choices"][0]["text"], time.monotonic() - started


def far_listener(lan: Lan) -> socket.socket:
    """A socket stays on the network where it was made, whoever uses it."""
    return lan.there.run(lambda: socket.create_server((lan.there.address, 0)))


@pytest.mark.root
@needs_root
@pytest.mark.parametrize("trouble", ["cable", "answers are lost"])
def test_a_partition_costs_less_than_five_seconds_where_another_replica_is(
    lan: Lan, tmp_path: Path, trouble: str
) -> None:
    far = far_listener(lan)
    lan.here.run(lambda: asyncio.run(_partitioned(lan, far, tmp_path / "c.sock", trouble)))


async def _partitioned(lan: Lan, far: socket.socket, path: Path, trouble: str) -> None:
    came = 0

    async def never_answer(_: web.Request) -> web.StreamResponse:
        nonlocal came
        came += 1
        await asyncio.Event().wait()
        raise AssertionError

    async with (
        far_replica(far, never_answer) as node,
        gateway_before(path, node) as (controller, gateway),
        running_ingress("n2") as near,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=40)) as http,
    ):
        waiting = [asyncio.create_task(ask(http, gateway)) for _ in range(10)]
        await until(lambda: came == 10, "ten requests under way at the far node")
        if trouble == "cable":
            lan.cut()
        else:
            lan.there.ip("route", "add", "blackhole", f"{lan.here.address}/32")
        cut_at = time.monotonic()
        controller.change(nodes=[node, near.view], replicas=[P1, near.replica("p2", slots=64, revision="")])
        await gateway.views.run_once()
        after = [asyncio.create_task(ask(http, gateway)) for _ in range(20)]  # some connect to the far node, in vain
        assert {text for text, _ in await asyncio.gather(*waiting, *after)} == {"p2"}
        assert time.monotonic() - cut_at < promised(5)
        # From now on the far node is left alone.
        assert max(took_s for _, took_s in [await ask(http, gateway) for _ in range(20)]) < promised(1)


@pytest.mark.root
@needs_root
def test_a_connection_that_is_lost_alone_is_replaced(lan: Lan, tmp_path: Path) -> None:
    far = far_listener(lan)
    lan.here.run(lambda: asyncio.run(_lost_connection(lan, far, tmp_path / "c.sock")))


async def _lost_connection(lan: Lan, far: socket.socket, path: Path) -> None:
    ports: list[int] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        ports.append(request.transport.get_extra_info("peername")[1])
        return web.json_response({"choices": [{"text": "p1"}]})

    async with (
        far_replica(far, answer) as node,
        gateway_before(path, node) as (_, gateway),
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=40)) as http,
    ):
        await ask(http, gateway)
        # Nothing comes back on this connection any more, while new ones are let through.
        lan.there.ip("rule", "add", "ipproto", "tcp", "dport", str(ports[0]), "blackhole")
        text, took_s = await ask(http, gateway)
        assert text == "p1"
        assert took_s < promised(5)
        assert ports[0] == ports[1] != ports[2]
        assert len(ports) == 3
