"""TLS on both sides, with names verified; unix sockets on both sides."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import stat
from pathlib import Path

import pytest

from corral.contract.http import Target
from corral.relay import Limits, PoolLimits, UpstreamPool
from tests.support.certificates import TestCa
from tests.support.processes import free_port
from tests.support.relay import Client, answering, quick, rig

GET = b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.fixture(scope="module")
def ca() -> TestCa:
    return TestCa()


def has_socket(folder: Path, name: str = "s") -> bool:
    return (folder / name).is_socket()


def trusting(ca: TestCa) -> ssl.SSLContext:
    return ssl.create_default_context(cadata=ca.pem)


async def test_tls_to_clients(ca: TestCa, tmp_path: Path) -> None:
    async with rig(server_tls=ca.server_context(tmp_path)) as r:
        client = await r.client(ssl=trusting(ca), server_hostname="localhost")
        for _ in range(2):
            assert (await client.ask(GET)).body == b"GET /x HTTP/1.1"
        assert r.handler.requests[0].secure
        await client.send(b"bad\n")
        assert (await client.answer()).status == 400
        await client.closed()


async def test_large_bodies_over_tls(ca: TestCa, tmp_path: Path) -> None:
    body = os.urandom(3_000_000)
    script = answering(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    context = ca.server_context(tmp_path)
    async with rig(script, server_tls=context, upstream_tls=context, client_tls=trusting(ca)) as r:
        client = await r.client(ssl=trusting(ca), server_hostname="localhost")
        client.writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        assert (await client.answer()).body == body
        assert r.upstream.connections[0].requests[0].body == body


async def test_tls_to_upstreams_is_verified_and_kept(ca: TestCa, tmp_path: Path) -> None:
    async with rig(upstream_tls=ca.server_context(tmp_path), client_tls=trusting(ca)) as r:
        client = await r.client()
        for _ in range(2):
            assert (await client.ask(GET)).status == 200
        assert len(r.upstream.connections) == 1
        assert not r.handler.requests[0].secure


async def test_the_name_to_verify_may_differ_from_the_host(ca: TestCa, tmp_path: Path) -> None:
    context = ca.server_context(tmp_path)
    async with rig(upstream_tls=context, client_tls=trusting(ca), server_name="localhost") as r:
        assert (await (await r.client()).ask(GET)).status == 200
    async with rig(upstream_tls=context, client_tls=trusting(ca), server_name="elsewhere.example") as r:
        assert (await (await r.client()).ask(GET)).status == 502
        assert not r.upstream.connections


async def test_an_unknown_authority_is_refused(ca: TestCa, tmp_path: Path) -> None:
    async with rig(upstream_tls=ca.server_context(tmp_path), client_tls=trusting(TestCa())) as r:
        assert (await (await r.client()).ask(GET)).status == 502
        assert not r.upstream.connections


async def test_the_systems_trust_is_the_default(ca: TestCa, tmp_path: Path) -> None:
    async with rig(upstream_tls=ca.server_context(tmp_path)) as r:
        assert (await (await r.client()).ask(GET)).status == 502


async def test_contexts_may_be_chosen_per_target(ca: TestCa, tmp_path: Path) -> None:
    asked: list[Target] = []

    def choose(target: Target) -> ssl.SSLContext:
        asked.append(target)
        return trusting(ca)

    async with rig(upstream_tls=ca.server_context(tmp_path)) as r:
        r.server.pool = pool = UpstreamPool(tls=choose)
        assert (await (await r.client()).ask(GET)).status == 200
        assert asked == [r.upstream.target]
        await pool.close()


async def test_plain_text_to_a_tls_port_gets_nothing(ca: TestCa, tmp_path: Path) -> None:
    async with rig(server_tls=ca.server_context(tmp_path)) as r:
        client = await r.client()
        await client.send(GET)
        assert not (await client.rest()).startswith(b"HTTP/")
        assert not r.handler.requests


async def test_a_tls_handshake_has_a_deadline(ca: TestCa, tmp_path: Path) -> None:
    limits = Limits(timeouts=quick(handshake_s=0.2))
    async with rig(server_tls=ca.server_context(tmp_path), limits=limits) as r:
        await (await r.client()).closed()


async def test_a_tls_upstream_that_never_shakes_hands_has_a_deadline(ca: TestCa) -> None:
    async with rig(answering(b""), client_tls=trusting(ca), pool_limits=PoolLimits(connect_s=0.2)) as r:
        r.handler.target = r.upstream.target._replace(tls=True)
        assert (await (await r.client()).ask(GET)).status == 504


async def test_upstream_on_a_unix_socket(short_folder: Path) -> None:
    async with rig(upstream_path=str(short_folder / "u")) as r:
        client = await r.client()
        for _ in range(2):
            assert (await client.ask(GET)).status == 200
        assert len(r.upstream.connections) == 1
        assert (await client.ask(b"GET / HTTP/1.0\r\n\r\n")).status == 200
        assert r.upstream.connections[0].requests[-1].get(b"host") == b"localhost"


async def test_a_unix_socket_that_is_not_there_is_502(short_folder: Path) -> None:
    async with rig() as r:
        r.handler.target = Target(unix_path=str(short_folder / "nobody"))
        assert (await (await r.client()).ask(GET)).status == 502


async def test_clients_on_a_unix_socket(short_folder: Path) -> None:
    path = str(short_folder / "s")
    async with rig() as r:
        await r.server.listen_unix(path)
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        client = Client(*await asyncio.open_unix_connection(path))
        assert (await client.ask(GET)).status == 200
        assert r.handler.requests[0].peer is None
        client.close()
        await r.server.drain(1)
        with pytest.raises(FileNotFoundError):
            os.stat(path)


async def test_a_socket_file_left_by_a_dead_process_is_replaced(short_folder: Path) -> None:
    path = str(short_folder / "s")
    async with rig() as first:
        await first.server.listen_unix(path)
        os.link(path, path + ".old")
    os.rename(path + ".old", path)
    async with rig() as r:
        await r.server.listen_unix(path)
        client = Client(*await asyncio.open_unix_connection(path))
        assert (await client.ask(GET)).status == 200
        client.close()


async def test_a_target_with_both_is_reached_through_its_socket(short_folder: Path, ca: TestCa, tmp_path: Path) -> None:
    """Without TLS there, also where the address has it."""
    path = str(short_folder / "u")
    async with rig() as r, rig(upstream_path=path) as local:
        r.handler.target = r.upstream.target._replace(unix_path=path, tls=True)
        client = await r.client()
        for _ in range(2):
            assert (await client.ask(GET)).status == 200
        assert len(local.upstream.connections) == 1
        assert not r.upstream.connections
        assert (r.server.pool.counters.upstream_connects, r.server.pool.counters.upstream_local_connects) == (1, 1)


@pytest.mark.parametrize("left", ["nothing", "a stale file", "a file of another kind"])
async def test_a_target_with_both_is_reached_by_its_address_where_the_socket_does_not_accept(
    short_folder: Path, left: str
) -> None:
    path = short_folder / "u"
    if left == "a stale file":
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))
    elif left == "a file of another kind":
        path.write_text("")
    async with rig() as r:
        r.handler.target = r.upstream.target._replace(unix_path=str(path))
        assert (await (await r.client()).ask(GET)).status == 200
        assert len(r.upstream.connections) == 1
        counters = r.server.pool.counters
        assert (counters.upstream_local_connects, counters.upstream_retries, counters.upstream_connect_failures) == (
            0,
            0,
            0,
        )


async def test_a_socket_that_appears_is_used_by_the_next_connection(short_folder: Path) -> None:
    path = str(short_folder / "u")
    async with rig(answering(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")) as r:
        r.handler.target = r.upstream.target._replace(unix_path=path)
        client = await r.client()
        assert (await client.ask(GET)).status == 200
        async with rig(upstream_path=path) as local:
            assert (await client.ask(GET)).status == 200
            assert len(local.upstream.connections) == 1
        assert len(r.upstream.connections) == 1


async def test_a_target_that_neither_accepts_is_refused(short_folder: Path) -> None:
    async with rig() as r:
        r.handler.target = Target("127.0.0.1", free_port(), unix_path=str(short_folder / "u"))
        assert (await (await r.client()).ask(GET)).status == 502


async def test_a_unix_socket_is_handed_over_with_its_file(short_folder: Path) -> None:
    path = str(short_folder / "s")
    async with rig() as old, rig() as new:
        await old.server.listen_unix(path)
        handed_over = socket.socket(fileno=os.dup(old.server.descriptors()[-1]))
        waiting = [Client(*await asyncio.open_unix_connection(path)) for _ in range(8)]
        await new.server.listen_on_unix(handed_over)
        retiring = asyncio.create_task(old.server.retire(20))
        for client in waiting:  # whichever of the two has accepted them
            assert (await client.ask(GET)).status == 200
            client.close()
        after = Client(*await asyncio.open_unix_connection(path))
        assert (await after.ask(GET)).status == 200
        after.close()
        await retiring
        assert has_socket(short_folder)
        await new.server.drain(1)
        assert not has_socket(short_folder)


async def test_one_unix_socket_is_closed_and_the_rest_serve_on(short_folder: Path) -> None:
    first, second = str(short_folder / "1"), str(short_folder / "2")
    async with rig() as r:
        await r.server.listen_unix(first)
        before = Client(*await asyncio.open_unix_connection(first))
        assert (await before.ask(GET)).status == 200
        await r.server.listen_unix(second)
        r.server.close_unix(first)
        assert not has_socket(short_folder, "1")
        for client in (before, Client(*await asyncio.open_unix_connection(second)), await r.client()):
            assert (await client.ask(GET)).status == 200
            client.close()


async def test_the_file_of_another_process_is_left_alone(short_folder: Path) -> None:
    path = str(short_folder / "s")
    async with rig() as first, rig() as second:
        await first.server.listen_unix(path)
        os.rename(path, path + ".old")  # so that the new file cannot get the inode of the old one
        await second.server.listen_unix(path)
        await first.server.drain(1)
        client = Client(*await asyncio.open_unix_connection(path))
        assert (await client.ask(GET)).status == 200
        client.close()


async def test_a_file_that_is_no_socket_is_not_replaced(short_folder: Path) -> None:
    path = short_folder / "s"
    path.write_text("precious")
    async with rig() as r:
        with pytest.raises(OSError, match="in use"):
            await r.server.listen_unix(str(path))
    assert path.read_text() == "precious"


async def test_a_handshake_under_way_when_the_server_retires_is_finished_and_served(ca: TestCa, tmp_path: Path) -> None:
    async with rig(server_tls=ca.server_context(tmp_path)) as r:
        reader, writer = await asyncio.open_connection("127.0.0.1", r.port)
        await r.until(lambda: len(r.server._arriving) == 1)
        retiring = asyncio.create_task(r.server.retire(20))
        await asyncio.sleep(0)
        assert not retiring.done()
        await writer.start_tls(trusting(ca), server_hostname="localhost")
        writer.write(b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert b"connection: close" in head.lower()
        await retiring
        writer.close()
