"""`/replicas/…` of a controller: who may come in, and what is said where nothing serves."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, MutableMapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from corral.bus.local import LocalHub
from corral.contract.access import Scope
from corral.controller.access.signing import IngressTokens
from corral.controller.localai.bridges import Bridges
from corral.controller.localai.calls import PeerCalls, PeerTimes
from corral.controller.localai.file_server import FileServers
from corral.controller.localai.load import PeerLoads
from corral.controller.localai.replica_routes import ReplicaRoutes
from corral.controller.localai.request_files import RequestFiles
from corral.controller.localai.table import PeerTable
from corral.controller.runtime.change_feed import ChangeFeed
from corral.controller.runtime.leadership import Leadership
from corral.kit.clock import SystemClock
from corral.kit.errors import Unavailable
from corral.kit.signing import Signer
from corral.store import Store, open_store
from corral.store.tables import nodes, peer_processes
from corral.store.tables.nodes import Node
from tests.integration.store.rows import a_node, a_peer_process
from tests.support.processes import free_port
from tests.support.scripted_catalogue import no_galleries
from tests.support.sqlite import sqlite_url

CLOCK = SystemClock()
TOKENS = IngressTokens(Signer(Signer.new_private_key()), CLOCK)


async def inner(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 299, "headers": []})
    await send({"type": "http.response.body", "body": b"another route"})


class PeerRoutesSite:
    def __init__(self, app: Any, node: Node, doubts: list[str]) -> None:
        self.app = app
        self.node = node
        self.doubts = doubts

    async def ask(self, path: str, token: str = "") -> tuple[int, dict[bytes, bytes], bytes]:
        got: list[MutableMapping[str, Any]] = []
        sent = [{"type": "http.request", "body": b"{}", "more_body": False}]

        async def receive() -> Any:
            return sent.pop(0) if sent else {"type": "http.disconnect"}

        async def send(event: Any) -> None:
            got.append(event)

        headers = [(b"authorization", f"Bearer {token}".encode())] if token else []
        scope = {"type": "http", "method": "GET", "headers": headers, "raw_path": path.encode(), "path": path}
        await self.app(scope, receive, send)
        return got[0]["status"], dict(got[0]["headers"]), b"".join(event.get("body", b"") for event in got[1:])


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with open_store(sqlite_url(tmp_path)) as opened:
        yield opened


@pytest.fixture
async def routes(store: Store, tmp_path: Path) -> AsyncIterator[PeerRoutesSite]:
    node = a_node(protocol=0, auth="shared")
    nowhere = f"127.0.0.1:{free_port()}"
    async with store.write() as tx:
        await nodes.insert(tx, node)
        await peer_processes.put(tx, [a_peer_process(node.id, "p1", address=nowhere)])
        await peer_processes.put(tx, [a_peer_process(node.id, "p2", state="stopping", replica=1)])
    doubts: list[str] = []
    async with contextlib.AsyncExitStack() as stack:
        bus = await stack.enter_async_context(LocalHub(CLOCK).join("c"))
        feed = ChangeFeed(store, bus, CLOCK, interval_s=1)
        table = PeerTable(store, Leadership(store, "c", ttl_s=10), feed, CLOCK, lease="replicas")
        calls = PeerCalls(bus, CLOCK, PeerTimes(), galleries_with=no_galleries)
        servers = await stack.enter_async_context(FileServers("shared", CLOCK))
        files = await stack.enter_async_context(RequestFiles(servers, calls, CLOCK, tmp_path / "requests"))
        bridges = Bridges(store, files, "shared", table.known)
        stack.push_async_callback(bridges.close)
        loads = PeerLoads(bus, CLOCK, "c", leads=lambda: True, node_of=lambda _: None)
        door = ReplicaRoutes(table, bridges, loads, CLOCK, TOKENS.public_key, doubt=doubts.append)
        yield PeerRoutesSite(door.around(inner), node, doubts)


async def test_only_a_token_of_the_cluster_for_that_node_comes_in(routes: PeerRoutesSite) -> None:
    path = "/replicas/p1/v1/models"
    stranger = IngressTokens(Signer(Signer.new_private_key()), CLOCK)
    for token in ("", "nonsense", "a.b", stranger.sign("gateway", [Scope.REPLICAS], aud=routes.node.id)):
        assert (await routes.ask(path, token))[0] == 401
    for token in (
        TOKENS.sign("gateway", [Scope.REPLICAS], aud="another-node"),
        TOKENS.sign("gateway", [Scope.LOGS], aud=routes.node.id),
        TOKENS.sign("gateway", [Scope.REPLICAS], aud=routes.node.id, life_s=-1),
    ):
        assert (await routes.ask(path, token))[0] == 403
    status, _, body = await routes.ask(path, TOKENS.sign("gateway", [Scope.REPLICAS], aud=routes.node.id))
    assert status == 200
    assert msgspec.json.decode(body)["data"][0]["id"] == "org/smöl"


async def test_what_does_not_serve_is_gone_and_the_gateway_may_ask_another(routes: PeerRoutesSite) -> None:
    token = TOKENS.sign("gateway", [Scope.REPLICAS], aud=routes.node.id)
    for process_id in ("nobody", "p2"):
        status, headers, _ = await routes.ask(f"/replicas/{process_id}/v1/models", token)
        assert status == 410
        assert headers[b"x-corral-not-reached"] == b"1"
    assert routes.doubts == []
    status, headers, _ = await routes.ask("/replicas/p1/health", token)
    assert status == 503
    assert headers[b"x-corral-not-reached"] == b"1"
    assert routes.doubts == ["p1"], "somebody is to look at it"


async def test_with_the_database_away_the_gateway_may_ask_another(
    routes: PeerRoutesSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is known, and nobody here has asked for it yet: where its node is cannot be looked up."""

    async def away(*_: object) -> None:
        raise Unavailable("the database cannot be reached")

    monkeypatch.setattr(nodes, "get", away)
    token = TOKENS.sign("gateway", [Scope.REPLICAS], aud=routes.node.id)
    status, headers, body = await routes.ask("/replicas/p1/v1/models", token)
    assert (status, headers[b"x-corral-not-reached"]) == (503, b"1")
    assert b"the database cannot be reached" in body
    assert routes.doubts == [], "that says nothing of the process"


async def test_everything_else_goes_on_to_the_other_routes(routes: PeerRoutesSite) -> None:
    for path in ("/api/nodes", "/replicas", "/"):
        assert (await routes.ask(path))[0] == 299
