"""`corral doctor` as a whole, and the bus's door with servers that let strangers in or not."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from corral.cli.doctor.bus_check import check_bus_access
from corral.client import LocalFleet, local_file, write_local
from corral.kit.certificates import Ca, make_ca
from tests.integration.cli.conftest import Corral
from tests.support.scripted_fleet import KEY

INFO = b'INFO {"version":"2.15.1","auth_required":true%s}\r\n'
REFUSAL = b"-ERR 'Authorization Violation'\r\n"


@asynccontextmanager
async def bus(hello: bytes, answer: bytes, tls: ssl.SSLContext | None = None, *, port: int = 0) -> AsyncIterator[str]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(hello)
        await writer.drain()
        if tls is not None:
            await writer.start_tls(tls)
        await reader.readline()
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", port)
    async with server:
        yield f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize(
    ("hello", "answer", "level", "words"),
    [
        (INFO % b"", REFUSAL, "ok", "refuses clients without credentials"),
        (INFO % b"", b"INFO {}\r\n" + REFUSAL, "ok", "refuses clients without credentials"),
        (INFO % b"", b"", "ok", "refuses clients without credentials"),
        (INFO % b"", b"PONG\r\n", "fail", "accepts clients without credentials"),
        (INFO % b"", b"-ERR 'Parser Error'\r\n", "fail", "Parser Error"),
        (b"HTTP/1.1 400 Bad Request\r\n", b"", "fail", "not a NATS server"),
        (b"INFO nonsense\r\n", b"", "fail", "nats://"),
    ],
)
async def test_the_door(hello: bytes, answer: bytes, level: str, words: str) -> None:
    async with bus(hello, answer) as url:
        found = await check_bus_access(url)
    assert (found.level.value, words in found.seen) == (level, True), found


async def test_the_door_behind_tls(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    made = make_ca("bus", now)
    issued = Ca(made.certificate_pem, made.key_pem).issue_server(["127.0.0.1"], now, life=timedelta(days=1))
    (tmp_path / "pem").write_text(issued.certificate_pem + issued.key_pem)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "pem")
    async with bus(INFO % b',"tls_required":true', REFUSAL, context) as url:
        assert (await check_bus_access(url.replace("nats:", "tls:"))).level.value == "ok"
    async with bus(INFO % b"", REFUSAL) as url:
        assert "does not use TLS" in (await check_bus_access(url.replace("nats:", "tls:"))).seen


async def test_nobody_at_the_door_or_somebody_silent() -> None:
    async with bus(b"", b"") as url:
        assert "does not answer" in (await check_bus_access(url, timeout_s=0.1)).seen
    assert (await check_bus_access(url)).level.value == "fail"


def test_doctor_asks_the_fleet_and_ends_with_1_when_something_must_be_mended(corral: Corral, tmp_path: Path) -> None:
    data = str(tmp_path / "data")
    ran = corral("doctor", "--data", data, "--json")
    found = {each["about"]: each for each in ran.json()}
    assert found["gateway"]["level"] == "ok"
    assert found["clock"]["level"] == "ok"
    assert found["node"]["mend"] == "corral nodes approve cellar"
    corral.fleet.controller_ready = False
    ran = corral("doctor", "--data", data)
    assert ran.code == 1
    assert any(line.startswith("fail  controller") for line in ran.out.splitlines())
    assert ran.err.endswith("found. The text after → shows how to fix each.\n")


def test_doctor_without_a_fleet_looks_at_the_machine(
    no_fleet: None, corral: Corral, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CORRAL_URL")
    ran = corral("doctor", "--data", str(tmp_path / "data"), "--json")
    found = {each["about"]: each for each in ran.json()}
    assert found["fleet"]["level"] == "warn"
    assert "corral up" in found["fleet"]["mend"]
    assert found["nats-server"]["level"] == "ok"


def test_doctor_finds_folder_and_bus_of_the_local_fleet(
    corral: Corral, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CORRAL_URL")
    monkeypatch.delenv("CORRAL_KEY")
    (tmp_path / "admin.key").write_text(KEY)
    write_local(
        local_file(os.environ),
        LocalFleet(
            url=corral.fleet.url,
            data=str(tmp_path / "data"),
            admin_key_file=str(tmp_path / "admin.key"),
            bus_url="nats://127.0.0.1:1",
        ),
    )
    found = {each["about"]: each for each in corral("doctor", "--json").json()}
    assert str(tmp_path / "data") in found["data folder"]["seen"]
    assert found["bus access"]["level"] == "fail"
