"""Other doors to the bus: TLS, an external server with one shared user, and what must not be let through."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from corral.bus.api import BusCredentials, BusTls, FixedCredentials, Tokens
from corral.bus.binary import die_with_parent, find_nats_server
from corral.bus.embedded import ServerTls
from corral.bus.nats import NatsBus
from corral.contract.messages.backends import INSTALL_BACKEND, InstallBackend, InstallReply
from corral.kit.certificates import Ca, IssuedCertificate, make_ca
from corral.kit.errors import Invalid, Unreachable
from tests.integration.bus.refusals import refused_for
from tests.support.nats import NatsServer, quick_settings, running_server
from tests.support.processes import free_port
from tests.support.waiting import until

WAIT_S = 30.0


async def answer(request: InstallBackend, tokens: Tokens) -> InstallReply:
    return InstallReply(success=True)


@dataclass
class Papers:
    ca: Path
    server: ServerTls
    client: BusTls
    ca_pem: str


def write_papers(folder: Path, *names: str, mutual: bool = False) -> Papers:
    now = datetime.now(UTC)
    made = make_ca("test", now)
    ca = Ca(made.certificate_pem, made.key_pem)
    life = timedelta(days=1)

    def put(name: str, issued: IssuedCertificate) -> tuple[Path, Path]:
        certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
        certificate.write_text(issued.certificate_pem)
        key.write_text(issued.key_pem)
        return certificate, key

    ca_file = folder / "ca.crt"
    ca_file.write_text(made.certificate_pem)
    server = put("server", ca.issue_server(names, now, life=life))
    client = put("client", ca.issue_server(["client"], now, life=life)) if mutual else (None, None)
    return Papers(
        ca=ca_file,
        server=ServerTls(*server, ca=ca_file if mutual else None),
        client=BusTls(ca=ca_file, certificate=client[0], key=client[1]),
        ca_pem=made.certificate_pem,
    )


@contextlib.asynccontextmanager
async def tls_server(folder: Path, papers: Papers) -> AsyncIterator[NatsServer]:
    async with running_server(folder, tls=papers.server) as server:
        server.tls = papers.client
        yield server


async def test_with_a_ca_calls_go_over_tls_and_survive_renewal_and_revocation(tmp_path: Path) -> None:
    papers = write_papers(tmp_path, "127.0.0.1", "localhost")
    async with tls_server(tmp_path, papers) as server:
        assert server.url.startswith("tls://127.0.0.1:")
        async with server.bus(server.service()) as controller, server.bus(server.node("a")) as node:
            await controller.wait_connected(WAIT_S)
            await node.wait_connected(WAIT_S)
            await node.serve(INSTALL_BACKEND, answer, node="a")
            assert (await controller.call(INSTALL_BACKEND, InstallBackend(), timeout_s=WAIT_S, node="a")).success
            await server.revoke(server.node("a").public_key)
            await until(lambda: not node.connected, "the drop")


async def test_the_ca_may_come_as_text(tmp_path: Path) -> None:
    papers = write_papers(tmp_path, "127.0.0.1")
    async with tls_server(tmp_path, papers) as server:
        server.tls = BusTls(ca_pem=papers.ca_pem)
        async with server.bus(server.node("a")) as node:
            await node.wait_connected(WAIT_S)


async def test_a_client_certificate_is_shown_where_it_is_asked_for(tmp_path: Path) -> None:
    papers = write_papers(tmp_path, "127.0.0.1", mutual=True)
    async with tls_server(tmp_path, papers) as server:
        async with server.bus(server.node("a")) as node:
            await node.wait_connected(WAIT_S)
        server.tls = BusTls(ca=papers.ca)
        async with server.bus(server.node("a")) as node:
            await refused_for(node)  # in words or without: the server may be gone before its alert is read


@pytest.mark.parametrize("fault", ["system roots", "another ca", "another name"])
async def test_a_server_we_cannot_trust_gets_nothing(tmp_path: Path, fault: str) -> None:
    names = ("example.org",) if fault == "another name" else ("127.0.0.1",)
    papers = write_papers(tmp_path, *names)
    async with tls_server(tmp_path, papers) as server:
        if fault == "system roots":
            server.tls = None  # the URL alone says tls://
        elif fault == "another ca":
            (tmp_path / "other").mkdir()
            server.tls = write_papers(tmp_path / "other", "127.0.0.1").client
        async with server.bus(server.node("a")) as node:
            await refused_for(node, "its certificate is not trusted")


@contextlib.asynccontextmanager
async def shared_server(folder: Path) -> AsyncIterator[str]:
    """Somebody else's NATS: no accounts, one user for everybody."""
    port = free_port()
    config = folder / "shared.conf"
    config.write_text(f"host: 127.0.0.1\nport: {port}\nauthorization: {{ user: fleet, password: open-sesame-4711 }}\n")
    log = folder / "shared.log"
    with log.open("wb") as stream:
        process = await asyncio.create_subprocess_exec(
            str(find_nats_server()), "--config", str(config), stdout=stream, stderr=stream, preexec_fn=die_with_parent()
        )
    try:
        await until(lambda: "Server is ready" in log.read_text(), "the server")
        yield f"nats://127.0.0.1:{port}"
    finally:
        process.terminate()
        await process.wait()


async def test_an_external_server_with_shared_credentials(tmp_path: Path) -> None:
    async with shared_server(tmp_path) as url:
        shared = FixedCredentials(BusCredentials(user="fleet", password="open-sesame-4711"))
        async with (
            NatsBus([url], shared, settings=quick_settings()) as controller,
            NatsBus([url], shared, settings=quick_settings()) as node,
        ):
            await controller.wait_connected(WAIT_S)
            await node.wait_connected(WAIT_S)
            await node.serve(INSTALL_BACKEND, answer, node="a")
            assert (await controller.call(INSTALL_BACKEND, InstallBackend(), timeout_s=WAIT_S, node="a")).success
            with pytest.raises(Unreachable):
                await controller.call(INSTALL_BACKEND, InstallBackend(), timeout_s=WAIT_S, node="b")


async def test_a_password_in_the_url_works_and_is_never_logged(tmp_path: Path) -> None:
    async with shared_server(tmp_path) as url:
        with_password = url.replace("://", "://fleet:open-sesame-4711@")
        wrong = url.replace("://", "://fleet:wrong-sesame-4711@")
        with capture_logs() as logs:
            async with NatsBus([with_password], FixedCredentials(), settings=quick_settings()) as bus:
                await bus.wait_connected(WAIT_S)
            async with NatsBus([wrong], FixedCredentials(), settings=quick_settings()) as bus:
                refusal = await refused_for(bus, "refuses our credentials")
        assert any(entry["event"] == "bus connected" for entry in logs)
        assert "sesame" not in str(logs) + refusal


async def test_a_bus_without_a_url_is_refused() -> None:
    with pytest.raises(Invalid):
        NatsBus([], FixedCredentials())


async def test_told_to_use_tls_we_never_speak_in_clear(nats_server: NatsServer, tmp_path: Path) -> None:
    """A man in the middle could take `tls_required` out of the server's hello; nats-py would go on in clear."""
    some_ca = BusTls(ca_pem=make_ca("test", datetime.now(UTC)).certificate_pem)
    node = nats_server.node("a").credentials()
    shared = BusCredentials(user="fleet", password="open-sesame-4711")
    async with shared_server(tmp_path) as url:
        in_clear = [
            (nats_server.url, some_ca, node),
            (nats_server.url.replace("nats://", "tls://"), None, node),
            (url, some_ca, shared),
            (url.replace("nats://", "tls://fleet:open-sesame-4711@"), None, BusCredentials()),
        ]
        for address, tls, credentials in in_clear:
            async with NatsBus([address], FixedCredentials(credentials), tls=tls, settings=quick_settings()) as bus:
                await refused_for(bus, "does not offer TLS")
