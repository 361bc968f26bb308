"""The sockets of the controller, its start without a database and its stop: each within bounds."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from corral.controller.api.server import serve_app
from corral.controller.runtime.database import open_store_when_there
from corral.controller.settings import ControllerSettings
from corral.controller.settings.serving import ListenSettings
from corral.kit.errors import Invalid
from corral.kit.settings import BadSettings, read_settings
from tests.support.cluster import Cluster
from tests.support.fleet import http
from tests.support.postgres import Postgres, postgres
from tests.support.processes import free_port
from tests.support.waiting import promised, wait_for

__all__ = ["postgres"]


async def nothing(scope: object, receive: object, send: object) -> None:
    """An app that is never asked."""


async def test_leaving_does_not_take_the_successors_place_away(tmp_path: Path) -> None:
    path = tmp_path / "c.sock"
    settings = ListenSettings(socket=path)
    old, new = serve_app(nothing, settings), serve_app(nothing, settings)
    await old.__aenter__()
    await new.__aenter__()
    await old.__aexit__(None, None, None)
    assert path.exists(), "the successor still serves there"
    await new.__aexit__(None, None, None)
    assert not path.exists()


async def test_a_head_without_end_is_cut_off_on_a_port(tmp_path: Path) -> None:
    """Nobody stands before a port of ours; before the socket there is the gateway."""
    port = free_port()
    async with serve_app(nothing, ListenSettings(host="127.0.0.1", port=port)):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(10):
            assert await talk_without_end(reader, writer) < 4 * 2**20
        writer.close()


async def talk_without_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
    """How many bytes of a head it took until the server hung up."""
    said = 0
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n")
    while not reader.at_eof():
        try:
            writer.write(b"X-Long: " + b"y" * 65536 + b"\r\n")
            await writer.drain()
            async with asyncio.timeout(0.01):
                await reader.read(4096)
        except TimeoutError:
            pass  # it says nothing yet
        except ConnectionError:
            return said
        said += 65536
    return said


async def test_told_to_stop_it_waits_no_longer() -> None:
    stopped = asyncio.Event()
    url = f"postgresql://nobody@127.0.0.1:{free_port()}/none"

    async with asyncio.timeout(10):
        asyncio.get_running_loop().call_later(0.1, stopped.set)
        async with open_store_when_there(url, stopped, first_s=0.02) as store:
            assert store is None


async def test_what_waiting_cannot_cure_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "corral.db").write_text("this is not a database, it is a sentence of some length")
    with pytest.raises(Invalid, match="not a SQLite database"):
        async with open_store_when_there(f"sqlite:///{tmp_path}/corral.db", asyncio.Event()):
            pass


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"compat_localai": True}, "--registration-token"),
        ({"tls_cert": "x.pem"}, "given together"),
        ({"guard_share": 200}, "between 0 and 100"),
        ({"port": 70000}, "65535"),
        ({"pending_limit": 0}, "less than 1"),
        ({"log_level": "loud"}, "one of"),
    ],
)
def test_settings_that_cannot_be_meant(flags: dict[str, object], sentence: str) -> None:
    with pytest.raises(BadSettings, match=sentence):
        read_settings(ControllerSettings, flags=flags, env={})


@pytest.fixture
def postgres_cluster(tmp_path: Path, postgres: Postgres) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, postgres.new_database(), members=1)
    try:
        yield cluster
    finally:
        cluster.close()


def test_a_controller_starts_before_its_database_and_stops_without_it(
    postgres_cluster: Cluster, postgres: Postgres
) -> None:
    cluster, member = postgres_cluster, postgres_cluster.members[0]
    postgres.stop(signal.SIGQUIT)
    try:
        cluster.start_bus()
        cluster.start_controller(member)
        assert member.controller is not None
        controller = member.controller
        wait_for(lambda: "waiting for the database" in controller.output(), "word that it waits")
        assert controller.running
    finally:
        postgres.start()
    cluster.wait_ready(member)
    cluster.start_gateway(member)
    wait_for(lambda: http("GET", member.url + "/controller/readyz").status == 200, "ready through the gateway")

    postgres.stop(signal.SIGQUIT)
    try:
        wait_for(lambda: http("GET", member.url + "/controller/readyz").status == 503, "not ready")
        told = http("GET", member.url + "/controller/readyz").body.decode()
        assert told == "not ready: the database does not answer\n"
        assert controller.stop(promised(15)) == 0, controller.output()
    finally:
        postgres.start()


def test_ports_in_use_are_told_in_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = ListenSettings(host="127.0.0.1", port=taken.getsockname()[1])

        async def serve() -> None:
            async with serve_app(nothing, settings):
                pass

        with pytest.raises(BadSettings, match="choose another with --port"):
            asyncio.run(serve())
