"""The controller looks where a node says it is. What is there may be anybody, and mean ill."""

from __future__ import annotations

import contextlib
import gzip
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from corral.contract.messages.nodes import IngressOffer
from corral.controller.health import ingress_check
from corral.controller.health.ingress_check import IngressCheck
from corral.controller.registry.ingress_client import IngressClient
from corral.controller.runtime.leadership import Leadership
from corral.kit.certificates import Ca, make_ca
from corral.kit.errors import Conflict
from corral.store.tables import nodes
from tests.integration.store.rows import a_node
from tests.support.registry import Registry, open_registry
from tests.support.sqlite import sqlite_url
from tests.support.waiting import until

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.fixture(autouse=True)
def _sure_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingress_check, "_SURE_AFTER", 1)


@contextlib.asynccontextmanager
async def answering(handler: Handler, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    app = web.Application()
    app.router.add_get("/{path:.*}", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
        await site.start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def check_of(registry: Registry, *, ca_pem: str = "", timeout_s: float = 5.0) -> IngressCheck:
    ingresses = IngressClient(registry.ingress_tokens, timeout_s=timeout_s, ca_pem=ca_pem)
    return IngressCheck(
        registry.store,
        ingresses,
        registry.leadership,
        registry.clock,
        registry.changes,
        interval_s=30,
        silent_after_s=30,
    )


async def checked(registry: Registry, port: int, *, timeout_s: float = 5.0) -> str:
    told = await registry.join(
        "barn", pre_approved=True, ingress=IngressOffer(port=port, advertise=f"127.0.0.1:{port}")
    )
    await check_of(registry, timeout_s=timeout_s).run_once()
    return await error_of(registry, told.id)


async def error_of(registry: Registry, node_id: str) -> str:
    async with registry.store.read() as tx:
        return (await nodes.get(tx, node_id)).ingress_error


async def test_a_redirect_is_not_followed(tmp_path: Path) -> None:
    """Or a node could make the controller ask anything of anybody it can reach."""
    asked: list[str] = []

    async def victim(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        return web.json_response({})

    async with answering(victim) as inside:

        async def lure(_: web.Request) -> web.StreamResponse:
            return web.Response(status=302, headers={"Location": f"http://127.0.0.1:{inside}/admin?do=it"})

        async with answering(lure) as port, open_registry(sqlite_url(tmp_path)) as registry:
            assert "answered 302" in await checked(registry, port)
    assert asked == []


async def test_an_answer_without_end_is_not_swallowed(tmp_path: Path) -> None:
    sent = 0

    async def flood(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        answer = web.StreamResponse()
        await answer.prepare(request)
        with contextlib.suppress(ConnectionError):
            while sent < 200 * 2**20:
                await answer.write(b" " * 65536)
                sent += 65536
        return answer

    async with answering(flood) as port, open_registry(sqlite_url(tmp_path)) as registry:
        assert "something else than a worker" in await checked(registry, port)
    assert sent < 50 * 2**20, "what the sockets' buffers hold, and no more"


@pytest.mark.parametrize(
    "body", [b"[" * 8000, b"{", b"\xff", b"[]", b'{"node_id": 7}', gzip.compress(b'{"node_id": "x"}', mtime=0)]
)
async def test_nonsense_is_told_and_keeps_nobody_else_from_being_checked(tmp_path: Path, body: bytes) -> None:
    good_id = ""

    async def nonsense(_: web.Request) -> web.StreamResponse:
        return web.Response(body=body, headers={"Content-Encoding": "gzip"} if body.startswith(b"\x1f\x8b") else {})

    async def good(_: web.Request) -> web.StreamResponse:
        return web.json_response({"node_id": good_id, "more": 1})

    async with (
        answering(nonsense) as bad_port,
        answering(good) as good_port,
        open_registry(sqlite_url(tmp_path)) as registry,
    ):
        where = IngressOffer(port=good_port, advertise=f"127.0.0.1:{good_port}")
        good_id = (await registry.join("well", pre_approved=True, ingress=where)).id
        assert "something else than a worker" in await checked(registry, bad_port)
        async with registry.store.read() as tx:
            assert (await nodes.get(tx, good_id)).ingress_ok is True


async def test_the_token_shown_is_for_that_node_alone_and_for_this_one_question(tmp_path: Path) -> None:
    shown: list[dict[str, Any]] = []

    async def take(request: web.Request) -> web.StreamResponse:
        import base64

        token = request.headers["Authorization"].removeprefix("Bearer ").partition(".")[0]
        shown.append(json.loads(base64.urlsafe_b64decode(token + "==")))
        return web.Response(status=403)

    async with answering(take) as port, open_registry(sqlite_url(tmp_path)) as registry:
        await checked(registry, port)
        async with registry.store.read() as tx:
            (node,) = await nodes.list_(tx)
    (claims,) = shown
    assert claims["aud"] == node.id
    assert claims["scope"] == ["probe"]
    assert claims["exp"] <= datetime.now(UTC).timestamp() + 901


async def test_another_nodes_certificate_does_not_pass_for_this_one(tmp_path: Path) -> None:
    made = make_ca("test", datetime.now(UTC))
    ca = Ca(made.certificate_pem, made.key_pem)
    node_id = ""

    async def hello(_: web.Request) -> web.StreamResponse:
        return web.json_response({"node_id": node_id})

    def context(name: str) -> ssl.SSLContext:
        issued = ca.issue_server([name], datetime.now(UTC), life=timedelta(days=1))
        (tmp_path / "pair").write_text(issued.key_pem + issued.certificate_pem)
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        made.load_cert_chain(tmp_path / "pair")
        return made

    async with open_registry(sqlite_url(tmp_path), ca=ca) as registry:
        told = await registry.join("barn", pre_approved=True)
        node_id = told.id
        check = check_of(registry, ca_pem=ca.certificate_pem)

        async def look_at(name: str) -> str:
            async with answering(hello, context(name)) as port:
                await registry.register(
                    "barn",
                    told.node_token,
                    ingress=IngressOffer(port=port, advertise=f"127.0.0.1:{port}", tls=True),
                )
                await check.run_once()
                return await error_of(registry, told.id)

        assert "certificate is not this node's" in await look_at("127.0.0.1")
        assert await look_at(told.id) == ""


LONG_AGO = timedelta(minutes=5)


async def test_a_worker_that_was_killed_is_said_not_to_run(tmp_path: Path) -> None:
    """Its port answered before; now the machine refuses, and no heartbeat has come since."""
    async with open_registry(sqlite_url(tmp_path)) as registry:
        node_id = ""

        async def hello(_: web.Request) -> web.StreamResponse:
            return web.json_response({"node_id": node_id})

        check = check_of(registry)
        async with answering(hello) as port:
            where = IngressOffer(port=port, advertise=f"127.0.0.1:{port}")
            node_id = (await registry.join("barn", pre_approved=True, ingress=where)).id
            await check.run_once()
            assert (await registry.admin.view("barn")).status == "healthy"
        for each_check in (check, check, check_of(registry)):
            await each_check.run_once()
            view = await registry.admin.view("barn")
            assert view.ingress_error.startswith("its worker seems not to be running")
            assert "open its port" not in view.ingress_error
            assert (view.status, view.status_reason) == ("unhealthy", "its worker seems not to be running")


@pytest.mark.parametrize(
    ("kind", "was_ok", "heard_s_ago", "verdict"),
    [
        ("refused", True, 10.0, "not running"),
        ("silent", True, 10.0, "undecided"),  # a firewall, or a machine that is off: the next heartbeat tells
        ("refused", True, 0.0, "refused"),  # heartbeats go on: it runs, and its port is closed
        ("silent", True, 0.0, "silent"),
        ("refused", None, 10.0, "refused"),  # it has just joined, and was never reached
        ("refused", False, 10.0, "refused"),
        ("refused", None, 40.0, "not running"),
        ("silent", False, 40.0, "not running"),
    ],
)
def test_a_closed_port_and_a_worker_that_does_not_run_are_told_apart(
    kind: str, was_ok: bool | None, heard_s_ago: float, verdict: str
) -> None:
    now = datetime(2026, 1, 1, 12, tzinfo=UTC)
    node = a_node(ingress_ok=was_ok, last_heartbeat=now - timedelta(seconds=heard_s_ago), created_at=now - LONG_AGO)
    fault = ingress_check.Fault(ingress_check.Kind(kind), "open its port")
    since = now - timedelta(seconds=8)
    judged = ingress_check.classify_fault(node, fault, since=since, now=now, silent_after=timedelta(seconds=30))
    assert judged.kind.value == verdict


async def test_a_controller_that_lost_the_lease_meanwhile_writes_nothing(tmp_path: Path) -> None:
    async with open_registry(sqlite_url(tmp_path)) as registry:
        told = await registry.join("barn", pre_approved=True)

        async def usurp(_: web.Request) -> web.StreamResponse:
            await registry.leadership.resign("ingress-check")
            registry.leadership._held["ingress-check"] = held
            assert await Leadership(registry.store, "another", ttl_s=60).lead("ingress-check")
            return web.Response(status=500)

        async with answering(usurp) as port:
            where = IngressOffer(port=port, advertise=f"127.0.0.1:{port}")
            await registry.register("barn", told.node_token, ingress=where)
            assert await registry.leadership.lead("ingress-check")
            held = registry.leadership._held["ingress-check"]
            with pytest.raises(Conflict, match="another controller"):
                await check_of(registry).run_once()
        assert await error_of(registry, told.id) == ""


async def test_a_loop_with_long_pauses_stays_with_one_controller(tmp_path: Path) -> None:
    async with open_registry(sqlite_url(tmp_path)) as registry:
        one = Leadership(registry.store, "one", ttl_s=0.01)
        other = Leadership(registry.store, "other", ttl_s=0.01)
        assert await one.lead("slow", every_s=60)
        assert await one.lead("quick")
        await until(lambda: other.lead("quick"), "a lease that ran out")
        assert not await other.lead("slow", every_s=60)
