"""What a public port meets: nobody behind it, revoked keys, slow and idle and broken clients, being told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from socket import create_server
from typing import Any

import aiohttp
import pytest
from structlog.testing import capture_logs

from corral.bus.embedded import ServerTls
from corral.contract.messages.hints import VIEW_CHANGED, ViewChanged
from corral.contract.messages.replicas import NODE_LOAD, NodeLoad
from corral.gateway.main import Gateway
from corral.kit.certificates import Ca, make_ca
from corral.kit.errors import Invalid
from corral.kit.log import configure_logging
from tests.integration.gateway.certificates import self_signed
from tests.integration.gateway.conftest import ADMIN, KEYS, USER, OpenGateway, bearer
from tests.integration.gateway.raw_client import connected, exchange, status_of
from tests.integration.gateway.scripted_controller import GATEWAY_KEY, ScriptedController, key
from tests.integration.gateway.scripted_ingress import running_ingress
from tests.support.nats import NatsServer, nats_server, running_server
from tests.support.relay import HeldClock
from tests.support.waiting import promised, until

__all__ = ["nats_server"]
NEVER = 3600.0


async def status(http: aiohttp.ClientSession, url: str, secret: str = "") -> int:
    async with http.get(url, headers=bearer(secret) if secret else {}) as answer:
        return answer.status


async def until_refused(http: aiohttp.ClientSession, gateway: Gateway, secret: str, timeout_s: float) -> None:
    async with asyncio.timeout(timeout_s):
        while await status(http, f"{gateway.url}/v1/models", secret) != 401:
            pass  # each look is a request, which takes its time


async def test_without_a_first_view_it_says_so_and_recovers(
    socket: Path, open_one: OpenGateway, http: aiohttp.ClientSession
) -> None:
    controller = ScriptedController(socket, keys=list(KEYS))
    async with open_one() as gateway:
        assert await status(http, f"{gateway.url}/healthz") == 200
        async with http.get(f"{gateway.url}/readyz") as answer:
            assert answer.status == 503
            assert (await answer.text()).startswith("not ready: no view of the fleet yet")
        async with http.get(f"{gateway.url}/v1/models", headers=bearer(USER)) as answer:
            assert answer.status == 503
            assert answer.headers["Retry-After"] == "2"
            assert (await answer.json())["error"]["code"] == "not_ready"
        assert await status(http, f"{gateway.url}/metrics", ADMIN) == 503
        assert await status(http, f"{gateway.url}/api/nodes", ADMIN) == 503
        async with http.get(f"{gateway.url}/", headers={"Accept": "text/html,*/*"}) as answer:
            assert answer.status == 503
            assert answer.headers["Refresh"] == "3", "a person with a browser need not press reload"
            assert "cannot be reached right now" in await answer.text()
        await controller.start()
        try:
            await until(lambda: gateway.views.fleet, "the first view is read")
            assert await status(http, f"{gateway.url}/readyz") == 200
            assert await status(http, f"{gateway.url}/v1/models", USER) == 200
        finally:
            await controller.stop()


async def test_a_gateway_with_a_wrong_key_is_told_apart_from_a_controller_that_is_down(
    controller: ScriptedController, open_one: OpenGateway
) -> None:
    async with open_one(gateway_key="ck_wrong") as gateway:
        await gateway.views.run_once()
        assert gateway.views.fleet is None
        assert "refuses the gateway key" in (gateway.views.last_error or "")


@pytest.mark.parametrize("body", [b"{}", b"null", b"", b"<html>", b'{"revision":"x"}', b'{"revision":3,"keys":7}'])
async def test_a_stranger_in_the_controllers_place_locks_nobody_out(
    socket: Path, open_one: OpenGateway, http: aiohttp.ClientSession, body: bytes
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        writer.close()

    controller = ScriptedController(socket, keys=list(KEYS))
    await controller.start()
    async with open_one(view_check_interval_s=NEVER) as gateway:
        await gateway.views.run_once()
        await controller.stop()
        server = await asyncio.start_unix_server(answer, socket)
        await gateway.views.run_once()
        assert gateway.views.last_error
        assert await status(http, f"{gateway.url}/v1/models", USER) == 200
        server.close()
        await server.wait_closed()


async def test_a_revoked_key_is_refused_without_any_bus(
    controller: ScriptedController, open_one: OpenGateway, http: aiohttp.ClientSession
) -> None:
    async with open_one(view_check_interval_s=1.0) as gateway:  # as in production
        await gateway.views.run_once()
        assert await status(http, f"{gateway.url}/v1/models", USER) == 200
        controller.change(keys=[key for key in KEYS if key["id"] != f"id-{USER}"])
        await until_refused(http, gateway, USER, timeout_s=promised(2))
        assert await status(http, f"{gateway.url}/v1/models", ADMIN) == 200
        assert controller.view_reads.count(None) <= 2  # its first look and ours; the rest of the looks cost a 304
        assert controller.view_reads[-1] is not None


async def test_a_fresh_key_is_known_at_once_and_a_guess_is_not_looked_for(
    controller: ScriptedController, open_one: OpenGateway, http: aiohttp.ClientSession
) -> None:
    async with open_one(view_check_interval_s=NEVER, view_interval_s=NEVER) as gateway:
        await until(lambda: gateway.views.fleet, "the first view is read")
        controller.change(keys=[*KEYS, key("ck_fresh", "admin")])
        for path in ("/v1/models", "/metrics"):
            assert await status(http, f"{gateway.url}{path}", "ck_fresh") == 200
        reads = len(controller.view_reads)
        assert await status(http, f"{gateway.url}/v1/models", "sk-somebody-elses") == 401
        assert len(controller.view_reads) == reads
        # Any number of strangers at once cause a look or two.
        strangers = [status(http, f"{gateway.url}/v1/models", f"ck_{number}") for number in range(50)]
        assert set(await asyncio.gather(*strangers)) == {401}
        assert len(controller.view_reads) - reads <= 10
        await controller.stop()
        assert await status(http, f"{gateway.url}/v1/models", "ck_fresher") == 401


def bus_grant(server: NatsServer, url: str = "") -> dict[str, object]:
    user = server.gateway("g1")
    return {
        "bus": {"urls": [url or server.url], "inbox": user.inbox},
        "nats_jwt": user.jwt,
        "nats_user_seed": user.seed,
        "expires_in_s": 3600.0,
    }


async def test_a_revoked_key_is_refused_at_a_hint(
    controller: ScriptedController, open_one: OpenGateway, http: aiohttp.ClientSession, nats_server: NatsServer
) -> None:
    controller.grant = bus_grant(nats_server)
    settings = {"hints": True, "view_check_interval_s": NEVER, "view_interval_s": NEVER}
    async with open_one(**settings) as gateway, nats_server.bus(nats_server.service()) as bus:
        await bus.wait_connected(10)
        await until(lambda: gateway.metrics.view.bus_connected, "the gateway hears the bus")
        await until(lambda: gateway.views.fleet, "the first view is read")

        async def hints_arrive() -> bool:
            await bus.publish(VIEW_CHANGED, ViewChanged(kind="nodes", id="n", row_version=1))
            return gateway.metrics.view.hints > 0

        await until(hints_arrive, "the gateway has subscribed")
        assert await status(http, f"{gateway.url}/v1/models", USER) == 200
        controller.change(keys=[])
        await bus.publish(VIEW_CHANGED, ViewChanged(kind="keys", id="x", row_version=1))
        await until_refused(http, gateway, USER, timeout_s=promised(2))
        # The bus goes and comes back: what was missed meanwhile is looked up.
        await nats_server.server.stop()
        await until(lambda: not gateway.metrics.view.bus_connected, "the loss is seen")
        controller.change(keys=list(KEYS))
        await nats_server.server.start()
        await until(lambda: gateway.metrics.view.bus_connected, "the gateway hears the bus again")
        await until(lambda: gateway.views.fleet and gateway.views.fleet.clients, "the missed change is seen")
        assert await status(http, f"{gateway.url}/v1/models", USER) == 200


async def test_what_other_gateways_send_to_a_replica_counts(
    controller: ScriptedController, open_one: OpenGateway, http: aiohttp.ClientSession, nats_server: NatsServer
) -> None:
    controller.grant = bus_grant(nats_server)
    async with (
        running_ingress("n1") as one,
        running_ingress("n2") as two,
        open_one(hints=True) as gateway,
        nats_server.bus(nats_server.service()) as bus,
    ):
        controller.change(
            models=[{"id": "small", "revision": "r1"}],
            nodes=[one.view, two.view],
            replicas=[one.replica("p1", slots=4), two.replica("p2", slots=4)],
        )
        await bus.wait_connected(10)
        await until(lambda: gateway.metrics.view.bus_connected, "the gateway hears the bus")
        await gateway.views.run_once()
        reports = itertools.count(1)

        async def ask() -> None:
            async with http.post(
                f"{gateway.url}/v1/chat/completions", headers=bearer(USER), json={"model": "small"}
            ) as answer:
                assert answer.status == 200

        async def all_by_the_idle_one() -> bool:
            report = NodeLoad(boot_id="b", seq=next(reports), in_flight={"p1": 2})
            await bus.publish(NODE_LOAD, report, node="n1")  # as nodes do, again and again: it may be early for one
            before = len(one.came)
            for _ in range(4):
                await ask()
            return len(one.came) == before

        await until(all_by_the_idle_one, "the report is heard")
        # Without the bus nobody tells when they have ended: our own count is all there is.
        await nats_server.server.stop()
        await until(lambda: not gateway.metrics.view.bus_connected, "the loss is seen")
        before = len(one.came)
        for _ in range(4):
            await ask()
        assert len(one.came) == before + 2


async def test_the_gateway_follows_a_bus_that_moves(
    controller: ScriptedController, open_one: OpenGateway, nats_server: NatsServer, tmp_path: Path
) -> None:
    controller.grant = bus_grant(nats_server)
    async with open_one(hints=True, hints_retry_s=0.05) as gateway:
        await until(lambda: gateway.metrics.view.bus_connected, "the gateway hears the first bus")
        async with running_server(tmp_path / "other") as other:
            controller.grant = bus_grant(other)
            await nats_server.server.stop()
            await until(lambda: not gateway.metrics.view.bus_connected, "the loss is seen")
            await until(lambda: gateway.metrics.view.bus_connected, "the gateway hears the second bus")


async def test_a_bus_that_wants_a_certificate_is_shown_one(
    controller: ScriptedController, open_one: OpenGateway, tmp_path: Path
) -> None:
    now = datetime.now(UTC)
    made = make_ca("test", now)
    ca = Ca(made.certificate_pem, made.key_pem)
    for name in ("127.0.0.1", "gateway"):
        issued = ca.issue_server([name], now, life=timedelta(days=1))
        (tmp_path / f"{name}.crt").write_text(issued.certificate_pem)
        (tmp_path / f"{name}.key").write_text(issued.key_pem)
    (tmp_path / "ca.crt").write_text(made.certificate_pem)
    server_tls = ServerTls(tmp_path / "127.0.0.1.crt", tmp_path / "127.0.0.1.key", ca=tmp_path / "ca.crt")
    certificate = {"bus_cert": tmp_path / "gateway.crt", "bus_key": tmp_path / "gateway.key"}
    async with running_server(tmp_path, tls=server_tls) as server:
        grant: dict[str, Any] = bus_grant(server)
        access = {**grant["bus"], "ca": made.certificate_pem}
        for bus, own in ((access, certificate), (grant["bus"], {**certificate, "bus_ca": tmp_path / "ca.crt"})):
            controller.grant = {**grant, "bus": bus}
            async with open_one(hints=True, hints_retry_s=0.05, **own) as gateway:
                view = gateway.metrics.view
                await until(lambda view=view: view.bus_connected, "the gateway hears the bus")  # type: ignore[misc]
        controller.grant = {**grant, "bus": access}
        with capture_logs() as logs:
            async with open_one(hints=True, hints_retry_s=0.05) as gateway:
                await until(lambda: [line for line in logs if "bus" in str(line)], "it says that it cannot")
                assert not gateway.metrics.view.bus_connected


async def test_slow_heads_are_cut_off(controller: ScriptedController, open_one: OpenGateway, clock: HeldClock) -> None:
    async with open_one(client_head_s=0.3) as gateway, connected(gateway.port) as (reader, writer):
        first, *rest = b"GET /healthz HTTP/1.1\r\nHost: h\r\nX-Padding: 0123456789\r\n"
        writer.write(bytes([first]))
        await until(lambda: any(conn._buffer for conn in gateway.server._connections), "it has begun")
        clock.let_go()
        async with asyncio.timeout(10):
            for letter in rest:
                writer.write(bytes([letter]))
                await asyncio.sleep(0.02)  # the pace of the client is what is tested
                if reader.at_eof() or gateway.metrics.relay.client_timeouts:
                    break
            answer = await reader.read()
        assert answer == b"" or status_of(answer) == 408
        assert gateway.metrics.relay.client_timeouts == 1


async def test_a_thousand_idle_connections_disturb_nobody(gateway: Gateway, http: aiohttp.ClientSession) -> None:
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(1000):
            await stack.enter_async_context(connected(gateway.port))
        await until(lambda: gateway.metrics.relay.connections_open >= 1000, "all are connected")
        assert await status(http, f"{gateway.url}/v1/models", USER) == 200
        assert await status(http, f"{gateway.url}/api/nodes", ADMIN) == 200
    await until(lambda: gateway.metrics.relay.connections_open <= 1, "all have left")


async def test_connections_over_the_limit_are_told(controller: ScriptedController, open_one: OpenGateway) -> None:
    async with open_one(max_connections=2) as gateway, connected(gateway.port), connected(gateway.port):
        await until(lambda: gateway.metrics.relay.connections_open == 2, "both are connected")
        assert status_of(await exchange(gateway.port, b"GET /healthz HTTP/1.1\r\nHost: h\r\n\r\n")) == 503


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS to a plain port
        b"GET /v1/models\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET /v1/models HTTP/1.1\nHost: a\n\n",
        b"GET /v1/models HTTP/1.1\r\nHost: a\r\n folded: x\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: a\r\nX-Corral-Gateway : x\r\n\r\n",
        b"POST /api/x HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"POST /api/x HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /api/x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"POST /api/x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /api/\x00x HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nX-Large: " + b"x" * 70_000 + b"\r\n\r\n",
    ],
)
async def test_malformed_requests_are_refused_and_forgotten(
    gateway: Gateway, http: aiohttp.ClientSession, request_bytes: bytes
) -> None:
    answer = await exchange(gateway.port, request_bytes)
    assert status_of(answer) in (400, 431)
    assert await status(http, f"{gateway.url}/v1/models", USER) == 200


async def test_tls(
    controller: ScriptedController, open_one: OpenGateway, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    cert, key = self_signed(tmp_path)
    trusting = ssl.create_default_context(cafile=str(cert))
    async with open_one(tls_cert=cert, tls_key=key) as gateway:
        await gateway.views.run_once()
        assert gateway.url.startswith("https://")
        async with http.get(f"{gateway.url}/v1/models", headers=bearer(USER), ssl=trusting) as answer:
            assert answer.status == 200
        async with http.get(f"{gateway.url}/api/x", ssl=trusting) as answer:
            assert answer.status == 200
        assert controller.seen[-1].values("X-Forwarded-Proto") == ["https"]
        with contextlib.suppress(ConnectionError):  # a plain request is not answered
            assert await exchange(gateway.port, b"GET /healthz HTTP/1.1\r\nHost: h\r\n\r\n") == b""
        async with http.get(f"{gateway.url}/healthz", ssl=trusting) as answer:
            assert answer.status == 200


async def test_a_changed_certificate_is_used_without_a_restart_and_a_broken_one_is_not(
    open_one: OpenGateway, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    cert, key = self_signed(tmp_path)
    first = ssl.create_default_context(cafile=str(cert))

    async def answers(trust: ssl.SSLContext) -> bool:
        headers = {"Connection": "close"}
        try:
            async with http.get(f"{gateway.url}/healthz", ssl=trust, headers=headers) as answer:
                return answer.status == 200
        except aiohttp.ClientSSLError:
            return False

    async with open_one(tls_cert=cert, tls_key=key, tls_check_s=0.02) as gateway:
        assert await answers(first)
        whole = cert.read_bytes()
        with capture_logs() as logged:
            cert.write_bytes(whole[: len(whole) // 2])
            await until(lambda: any("the old one stays" in each["event"] for each in logged), "look at the files")
        assert await answers(first), "the old one stays"
        self_signed(tmp_path)
        second = ssl.create_default_context(cafile=str(cert))

        async def is_second() -> bool:
            return await answers(second)

        await until(is_second, "new certificate")
        assert not await answers(first)


async def test_a_controller_on_another_machine_is_reached_by_tls(
    controller: ScriptedController, open_one: OpenGateway, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    cert, key = self_signed(tmp_path)
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    serving.load_cert_chain(cert, key)
    url = await controller.listen(serving)
    async with open_one(controller=url, controller_ca=cert) as gateway:
        await until(lambda: gateway.views.fleet, "the first view is read")
        async with http.get(f"{gateway.url}/api/x") as answer:
            assert answer.status == 200
        assert controller.seen[-1].values("X-Corral-Gateway") == [GATEWAY_KEY]
    async with open_one(controller=url) as doubting:  # the machine's own list does not know that certificate
        await doubting.views.run_once()
        assert "certificate" in (doubting.views.last_error or "").lower()
        async with http.get(f"{doubting.url}/api/x") as answer:
            assert answer.status == 503


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tls_cert": Path("only.crt")}, "both --tls-cert and --tls-key"),
        ({"tls_cert": Path("absent.crt"), "tls_key": Path("absent.key")}, "cannot be used"),
        ({"gateway_key": ""}, "needs a key"),
        ({"gateway_key_file": Path("absent.key")}, "absent.key is absent"),
        ({"controller": "https://127.0.0.1:1", "controller_ca": Path("absent.crt")}, "CA cannot be used"),
        ({"host": "192.0.2.1", "port": 1}, "cannot listen on 192.0.2.1:1"),
    ],
)
async def test_what_a_person_must_mend_is_one_line(
    open_one: OpenGateway, settings: dict[str, object], words: str
) -> None:
    with pytest.raises(Invalid) as caught:
        await open_one(**settings).__aenter__()
    assert words in caught.value.message
    assert "\n" not in caught.value.message


async def test_stopping_lets_an_open_stream_end(
    controller: ScriptedController, open_one: OpenGateway, http: aiohttp.ClientSession
) -> None:
    async with (
        open_one(drain_timeout_s=NEVER) as gateway,
        connected(gateway.port) as (reader, writer),
        connected(gateway.port) as idle,
    ):
        writer.write(b"GET /api/events HTTP/1.1\r\nHost: h\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        draining = asyncio.create_task(gateway.drain())
        assert await asyncio.wait_for(idle[0].read(), 10) == b""  # idle connections are closed at once
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", gateway.port)
        controller.stream.put_nowait(b"data: last words\n\n")
        await asyncio.wait_for(reader.readuntil(b"data: last words\n\n"), 10)
        assert not draining.done()
        controller.stream.put_nowait(None)
        assert b"0\r\n\r\n" in await asyncio.wait_for(reader.read(), 10)
        await asyncio.wait_for(draining, 10)


async def test_stopping_does_not_wait_for_ever(controller: ScriptedController, open_one: OpenGateway) -> None:
    async with open_one(drain_timeout_s=0.2) as gateway, connected(gateway.port) as (reader, writer):
        writer.write(b"GET /api/events HTTP/1.1\r\nHost: h\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.wait_for(gateway.drain(), 10)
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 10) == b""
        await until(lambda: controller.streams_open == 0, "the controller's stream ended")


async def test_no_log_line_holds_a_secret_or_a_body(
    controller: ScriptedController,
    open_one: OpenGateway,
    http: aiohttp.ClientSession,
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logging(role="gateway", level="debug", json=True)
    try:
        async with open_one() as gateway:
            await gateway.views.run_once()
            url = f"{gateway.url}/v1/chat/completions?api_key={USER}"
            body = {"model": "none", "messages": [{"role": "user", "content": "the prompt"}]}
            async with http.post(url, headers={**bearer(USER), "X-Request-Id": "r-1"}, json=body) as answer:
                assert answer.status == 404
            assert await status(http, f"{gateway.url}/v1/models", USER) == 200
            assert await status(http, f"{gateway.url}/v1/models", "ck_wrongwrongwrong") == 401
    finally:
        logging.getLogger().handlers.clear()
        logging.getLogger().setLevel(logging.WARNING)
    lines = capsys.readouterr().err.splitlines()
    requests = [line for line in lines if '"event": "request"' in line]
    assert len(requests) == 3
    assert '"request_id": "r-1"' in requests[0]
    assert '"status": 404' in requests[0]
    assert f'"key": "id-{USER}"' in requests[0]
    for secret in (f'"{USER}', "ck_wrongwrongwrong", GATEWAY_KEY, "the prompt", f"api_key={USER}"):
        assert not [line for line in lines if secret in line]


async def test_a_gateway_that_is_started_again_knows_the_keys_at_its_first_request(
    controller: ScriptedController, open_one: OpenGateway, http: aiohttp.ClientSession
) -> None:
    """Who restarts it keeps the listening socket open: clients connect before it is there."""
    with create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/models"
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {USER}\r\n\r\n".encode())
        await writer.drain()
        async with open_one(listeners=(listener,)):
            assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
            async with http.get(url, headers=bearer(USER)) as answer:
                assert answer.status == 200
        writer.close()
        await writer.wait_closed()
