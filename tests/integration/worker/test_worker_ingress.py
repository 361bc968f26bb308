"""The ingress from outside: open probes, guarded routes, clocks that disagree, TLS that comes and is renewed."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import aiohttp
import pytest

from corral.inference.request_files import LocalFiles
from corral.kit.certificates import fingerprint
from corral.kit.clock import SystemClock
from corral.kit.hosts import HostPort
from corral.worker.agent.server_clock import ServerClock
from corral.worker.ingress.certificate import IngressCertificate
from corral.worker.ingress.routes import IngressRoutes
from corral.worker.ingress.server import Ingress
from corral.worker.ingress.tokens import TokenVerifier
from corral.worker.metrics import WorkerMetrics
from corral.worker.status import FatalError, WorkerStatus
from tests.support.certificates import TestCa
from tests.support.nats import NatsServer, nats_server
from tests.support.processes import free_port
from tests.support.running_worker import RunningWorker, running_worker
from tests.support.scripted_controller import ScriptedController
from tests.support.supervising import make_supervisor
from tests.support.waiting import DEADLINE_S, until

__all__ = ["nats_server"]


@pytest.fixture
async def controller(nats_server: NatsServer) -> AsyncIterator[ScriptedController]:
    async with ScriptedController(nats_server) as started:
        yield started


@pytest.fixture
async def worker(controller: ScriptedController, tmp_path: Path) -> AsyncIterator[RunningWorker]:
    async with running_worker(controller.url, tmp_path / "w", token=controller.token()) as started:
        await started.ready()
        yield started


async def test_probes_are_open(worker: RunningWorker) -> None:
    assert await worker.get("/healthz") == (200, "ok")
    assert await worker.get("/readyz") == (200, "ok")
    assert await worker.get("/healthz", method="HEAD") == (200, "")
    assert await worker.get("/readyz", method="HEAD") == (200, "")
    assert (await worker.get("/healthz", method="POST"))[0] == 405
    assert (await worker.get("/healthz", method="TRACE"))[0] == 501


async def test_everything_else_is_shut(worker: RunningWorker) -> None:
    for path in ("/", "/corral/hello", "/replicas/p1/v1/chat/completions", "/metrics", "/healthz/../x"):
        status, body = await worker.get(path)
        assert status == 401
        assert json.loads(body)["error"]["code"] == 401
        assert (await worker.get(path, "nonsense"))[0] == 401
    for path in ("/v1/files/x", "/v1/backend-logs"):  # the contract's own word
        assert await worker.get(path) == (401, "unauthorized\n")
        assert await worker.get(path, "nonsense") == (401, "unauthorized\n")


async def test_the_controllers_question(controller: ScriptedController, worker: RunningWorker) -> None:
    node = controller.named("w1")
    status, body = await worker.get("/corral/hello", controller.ingress_token(aud=node.id, scope="probe"))
    assert status == 200
    assert json.loads(body) == {"node_id": node.id, "name": "w1", "boot_id": node.boot_ids[0]}
    assert (await worker.get("/corral/hello", controller.ingress_token(aud="another-node")))[0] == 403
    assert (await worker.get("/corral/hello", controller.ingress_token(scope="replicas")))[0] == 403
    assert (await worker.get("/corral/hello", controller.ingress_token(life_s=-1)))[0] == 401


async def test_no_process_runs_yet(controller: ScriptedController, worker: RunningWorker) -> None:
    token = controller.ingress_token(scope="replicas")
    status, body = await worker.get("/replicas/p-1/v1/chat/completions", token, method="POST")
    assert status == 410
    assert "p-1" in json.loads(body)["error"]["message"]
    assert (await worker.get("/nowhere", token))[0] == 404


async def test_files_need_their_scope(controller: ScriptedController, worker: RunningWorker) -> None:
    """Without a LocalAI controller there is no shared token: the file server takes what our controllers sign."""
    token = controller.ingress_token(aud=controller.named("w1").id, scope="files")
    status, body = await worker.get("/v1/files/temp", token, method="POST")
    assert status == 200
    name = json.loads(body)["local_path"].rpartition("/")[2]
    assert await worker.get(f"/v1/files/{name}", token) == (200, "")
    for scope in ("logs", "replicas", "blobs"):
        assert (await worker.get(f"/v1/files/{name}", controller.ingress_token(scope=scope)))[0] == 403
    assert (await worker.get("/v1/files-list/models/", controller.ingress_token(scope="files", aud="other")))[0] == 403
    assert await worker.get(f"/v1/files/{name}", controller.ingress_token(scope="files", life_s=-1)) == (
        401,
        "unauthorized\n",
    )


async def test_metrics_need_their_scope(controller: ScriptedController, worker: RunningWorker) -> None:
    node = controller.named("w1")
    await until(
        lambda: node.beats and "bus" not in node.beats[-1]
    )  # it knows that the bus is up, and has said so there
    assert (await worker.get("/metrics", controller.ingress_token(scope="probe")))[0] == 403
    await worker.get("/corral/hello")
    status, body = await worker.get("/metrics", controller.ingress_token(scope="logs"))
    assert status == 200
    assert "corral_worker_bus_connected 1.0" in body
    assert 'corral_worker_heartbeats_total{outcome="sent",way="bus"}' in body
    assert 'corral_worker_registrations_total{outcome="accepted"} 1.0' in body
    assert 'corral_worker_ingress_requests_total{route="/corral/hello",status="401"} 1.0' in body


@pytest.mark.parametrize("skew_s", [-1800.0, 1800.0])
async def test_clocks_half_an_hour_apart(nats_server: NatsServer, tmp_path: Path, skew_s: float) -> None:
    controller = ScriptedController(nats_server)
    controller.skew_s = skew_s
    async with controller, running_worker(controller.url, tmp_path / "w", token=controller.token()) as worker:
        await worker.ready()
        assert (await worker.get("/corral/hello", controller.ingress_token(life_s=60)))[0] == 200
        assert (await worker.get("/corral/hello", controller.ingress_token(life_s=-60)))[0] == 401
        controller.skew_s = 0.0  # somebody mends the controller's clock
        before = len(controller.named("w1").beats)
        await until(lambda: len(controller.named("w1").beats) >= before + 2)  # so the first was answered and read
        assert (await worker.get("/corral/hello", controller.ingress_token(life_s=60)))[0] == 200


async def test_a_restarted_worker_knows_the_key_before_the_controller_is_back(
    controller: ScriptedController, tmp_path: Path
) -> None:
    async with running_worker(controller.url, tmp_path / "w", token=controller.token()) as worker:
        await worker.ready()
    await controller.stop()
    async with running_worker(controller.url, tmp_path / "w") as worker:
        await worker.ready(503)
        assert (await worker.get("/corral/hello", controller.ingress_token()))[0] == 200


async def test_a_port_that_is_taken(controller: ScriptedController, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with running_worker(controller.url, tmp_path / "w", token=controller.token(), port=str(port)) as worker:
            with pytest.raises(FatalError, match=f"^port {port} is in use by another program: stop it, or give"):
                await worker.ended()
    assert controller.calls == []  # it never got so far as to join


async def test_an_address_this_machine_does_not_have(controller: ScriptedController, tmp_path: Path) -> None:
    async with running_worker(controller.url, tmp_path / "w", token=controller.token(), host="192.0.2.1") as worker:
        with pytest.raises(FatalError, match=r"no address 192\.0\.2\.1"):
            await worker.ended()


async def test_the_ingress_speaks_tls_once_the_cluster_signs(nats_server: NatsServer, tmp_path: Path) -> None:
    ca = TestCa()
    controller = ScriptedController(nats_server, ca=ca)
    controller.use_tls(ca.server_context(tmp_path))
    trust = ssl.create_default_context(cadata=ca.pem)
    async with controller:
        pin = fingerprint(ca.pem)
        async with running_worker(controller.url, tmp_path / "w", token=controller.token(), ca=pin) as worker:
            secure = worker.ingress.replace("http:", "https:")
            await until(lambda: (tmp_path / "w" / "ingress.crt").exists())
            await _answers(worker, secure, trust)
            status, _ = await worker.get("/corral/hello", controller.ingress_token(), base=secure, tls=trust)
            assert status == 200
            assert controller.named("w1").registrations[0]["ingress"].get("tls", False) is False
            await worker.leave()
        # Known by now: TLS from the first moment, and neither pin nor URL is needed again.
        await controller.stop()
        async with running_worker("", tmp_path / "w") as worker:
            secure = worker.ingress.replace("http:", "https:")
            await _answers(worker, secure, trust, status=503)
            await controller.start()
            await _answers(worker, secure, trust)
            assert controller.named("w1").registrations[-1]["ingress"]["tls"] is True


async def test_a_certificate_is_renewed_while_it_serves(nats_server: NatsServer, tmp_path: Path) -> None:
    ca = TestCa()
    controller = ScriptedController(nats_server, ca=ca)
    controller.certificate_life = timedelta(seconds=20)  # it began a minute ago, so it is due at once
    async with controller, running_worker(controller.url, tmp_path / "w", token=controller.token()) as worker:
        secure = worker.ingress.replace("http:", "https:")
        trust = ssl.create_default_context(cadata=ca.pem)
        await _answers(worker, secure, trust)
        first = await _serial(worker, trust)
        reader, writer = await asyncio.open_connection("127.0.0.1", worker.settings.ingress.port, ssl=trust)
        await until(lambda: controller.credentials_given >= 2)
        controller.certificate_life = timedelta(days=30)
        given = controller.credentials_given
        await until(lambda: controller.credentials_given > given)
        async with asyncio.timeout(DEADLINE_S):
            while True:
                if await _serial(worker, trust) != first:
                    break
                await asyncio.sleep(0.01)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: w\r\n\r\n")  # a connection from before goes on
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()
        assert controller.calls.count("POST register") == 1


async def test_every_interface_means_both_protocols(tmp_path: Path) -> None:
    clock = ServerClock(SystemClock())
    tokens, metrics = TokenVerifier(clock.now), WorkerMetrics()
    files = LocalFiles(tmp_path / "requests")
    supervisor = make_supervisor(tmp_path)
    routes = IngressRoutes(WorkerStatus("b", "w1"), tokens, metrics, supervisor.find, supervisor.logs, files)
    certificate = IngressCertificate(tmp_path)
    hosts = ["127.0.0.1", "::1"] if socket.has_dualstack_ipv6() and _has_v6_loopback() else ["127.0.0.1"]
    async with Ingress(HostPort("", free_port()), routes, tokens, certificate, clock.now) as ingress:
        for host in hosts:
            reader, writer = await asyncio.open_connection(host, ingress.port)
            writer.write(b"GET /healthz HTTP/1.0\r\nHost: w\r\n\r\n")
            assert b"200" in await reader.readline()
            writer.close()


async def test_a_cluster_that_gives_up_its_ca(nats_server: NatsServer, tmp_path: Path) -> None:
    ca = TestCa()
    async with ScriptedController(nats_server, ca=ca) as controller:
        async with running_worker(controller.url, tmp_path / "w", token=controller.token()) as worker:
            trust = ssl.create_default_context(cadata=ca.pem)
            await _answers(worker, worker.ingress.replace("http:", "https:"), trust)
        controller.ca = None
        async with running_worker(controller.url, tmp_path / "w") as worker:
            await worker.ready()


async def test_the_wrong_pin(nats_server: NatsServer, tmp_path: Path) -> None:
    ca = TestCa()
    controller = ScriptedController(nats_server, ca=ca)
    controller.use_tls(ca.server_context(tmp_path))
    wrong = fingerprint(TestCa().pem)
    async with (
        controller,
        running_worker(controller.url, tmp_path / "w", token=controller.token(), ca=wrong) as worker,
    ):
        with pytest.raises(FatalError, match="not the pinned one"):
            await worker.ended()
    assert controller.calls == ["GET ca.pem"]  # the token was shown to nobody


async def test_https_without_a_pin_trusts_the_system_only(nats_server: NatsServer, tmp_path: Path) -> None:
    ca = TestCa()
    controller = ScriptedController(nats_server, ca=ca)
    controller.use_tls(ca.server_context(tmp_path))
    async with controller, running_worker(controller.url, tmp_path / "w", token=controller.token()) as worker:
        await worker.ready(503)
        await asyncio.sleep(0.2)  # several tries: none may get through
        assert controller.calls == []
        assert not worker.task.done()


async def test_a_pem_file_and_a_controller_that_comes_late(nats_server: NatsServer, tmp_path: Path) -> None:
    ca = TestCa()
    (tmp_path / "ca.pem").write_text(ca.pem)
    controller = ScriptedController(nats_server, ca=ca)
    controller.use_tls(ca.server_context(tmp_path))
    for given in (str(tmp_path / "ca.pem"), fingerprint(ca.pem)):
        name = "w-" + given[-4:]
        async with running_worker(
            controller.url, tmp_path / name, token=controller.token(), ca=given, name=name
        ) as worker:
            await worker.answer("/healthz")
            await controller.start()
            await until(lambda: controller.knows(name))  # noqa: B023 - awaited in the same round
            await controller.stop()


async def _answers(worker: RunningWorker, base: str, trust: ssl.SSLContext, *, status: int = 200) -> None:
    """Until `/readyz` says so over TLS."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                if (await worker.get("/readyz", base=base, tls=trust))[0] == status:
                    return
            except aiohttp.ClientError:
                if worker.task.done():
                    await worker.task
            await asyncio.sleep(0.01)


async def _serial(worker: RunningWorker, trust: ssl.SSLContext) -> str:
    """Of the certificate a new connection sees."""
    _, writer = await asyncio.open_connection("127.0.0.1", worker.settings.ingress.port, ssl=trust)
    serial: str = writer.get_extra_info("peercert")["serialNumber"]
    writer.close()
    return serial


def _has_v6_loopback() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True
