"""A node whose cable is pulled while it streams. Nothing closes the connections: only time tells."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from corral.gateway.main import open_gateway
from corral.kit.clock import SystemClock
from tests.integration.gateway.conftest import KEYS, USER, bearer
from tests.integration.gateway.fleet import CHAT, SHORT
from tests.integration.gateway.scripted_controller import GATEWAY_KEY, running_controller, settings_with
from tests.integration.gateway.scripted_ingress import running_ingress
from tests.support.network import Lan, two_machines
from tests.support.waiting import promised, until

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]

FIRST = b'data: {"choices":[]}\n\n'


@pytest.fixture
def lan() -> Iterator[Lan]:
    with two_machines() as lan:
        yield lan


def test_a_node_unplugged_in_mid_stream_breaks_its_streams_and_no_new_request(lan: Lan, tmp_path: Path) -> None:
    def listen() -> socket.socket:
        """A socket stays on the network where it was made, whoever uses it."""
        return socket.create_server((lan.there.address, 0))

    far = lan.there.run(listen)
    lan.here.run(lambda: asyncio.run(_unplugged(lan, far, tmp_path / "c.sock")))


async def _unplugged(lan: Lan, far: socket.socket, path: Path) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        await stream.write(FIRST)
        await asyncio.Event().wait()
        return stream

    app = web.Application()
    app.router.add_route("*", "/replicas/p1/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.SockSite(runner, far).start()
    host, port = far.getsockname()[:2]
    node = {"id": "n1", "name": "far", "status": "healthy", "ingress_url": f"http://{host}:{port}"}
    p1 = {"process_id": "p1", "node_id": "n1", "model": "small", "slots": 64}
    short: dict[str, Any] = {**SHORT, "eject_s": 60.0, "connect_timeout_s": 2.0, "upstream_dead_s": 2.0}
    base = {"controller": f"unix:{path}", "gateway_key": GATEWAY_KEY, "port": 0, "hints": False}
    settings = settings_with(base | short)
    async with (
        running_controller(path, keys=list(KEYS), models=[{"id": "small"}]) as controller,
        running_ingress("n2") as near,
        open_gateway(settings, SystemClock()) as gateway,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as http,
    ):
        controller.change(nodes=[node, near.view], replicas=[p1])
        await gateway.views.run_once()
        url, body = f"{gateway.url}{CHAT}", {"model": "small", "stream": True}
        streams = [await http.post(url, headers=bearer(USER), json=body) for _ in range(3)]
        for stream in streams:
            assert await stream.content.readexactly(len(FIRST)) == FIRST
        lan.cut()
        cut_at = time.monotonic()
        second = near.replica("p2", slots=64, revision="")
        controller.change(replicas=[p1, second])
        await gateway.views.run_once()
        # Whoever comes now, also where the far one is tried first, is answered by the other.
        asked = [http.post(url, headers=bearer(USER), json={"model": "small"}) for _ in range(20)]
        for answered in await asyncio.gather(*asked):
            assert (await answered.json())["choices"][0]["text"] == "p2"
        for stream in streams:
            with pytest.raises(aiohttp.ClientPayloadError):
                await stream.read()
        took_s = time.monotonic() - cut_at
        assert took_s < promised(15), "the kernel noticed, not the pause that a replica may make"
        await until(lambda: len(controller.receipts) >= 23, "receipts")
        assert [row.get("ending") for row in controller.receipts].count("upstream_broke") == 3
        await runner.cleanup()
