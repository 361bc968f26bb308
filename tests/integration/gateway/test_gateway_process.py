"""The process as a supervisor sees it: exit codes, signals, one line when a person must mend something."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket as sockets
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from tests.integration.gateway.conftest import USER, bearer
from tests.integration.gateway.raw_client import connected
from tests.integration.gateway.scripted_controller import GATEWAY_KEY, ScriptedController
from tests.integration.gateway.scripted_ingress import running_ingress
from tests.support.processes import free_port
from tests.support.waiting import until

RUN = """
import os, sys
from corral.gateway.main import run
from corral.gateway.settings import GatewaySettings
from corral.kit.settings import read_settings
sys.exit(run(read_settings(GatewaySettings, flags={}, env=os.environ)))
"""


@contextlib.asynccontextmanager
async def process(**settings: str) -> AsyncIterator[asyncio.subprocess.Process]:
    env = {**os.environ, **{f"CORRAL_{name.upper()}": value for name, value in settings.items()}}
    started = await asyncio.create_subprocess_exec(sys.executable, "-c", RUN, stderr=asyncio.subprocess.PIPE, env=env)
    try:
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            started.kill()
        await started.wait()


async def until_ready(http: aiohttp.ClientSession, port: int) -> None:
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(aiohttp.ClientConnectionError):
                async with http.get(f"http://127.0.0.1:{port}/readyz") as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.02)


def key_file(folder: Path) -> str:
    file = folder / "gateway.key"
    file.write_text(GATEWAY_KEY + "\n")
    return str(file)


async def test_a_stream_outlives_sigterm_and_the_exit_is_clean(
    controller: ScriptedController, http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    port = free_port()
    settings = {"controller": f"unix:{controller.socket}", "gateway_key_file": key_file(tmp_path), "port": str(port)}
    async with process(**settings, log_json="true", hints="false") as gateway:
        await until_ready(http, port)
        async with http.get(f"http://127.0.0.1:{port}/v1/models", headers=bearer(USER)) as answer:
            assert answer.status == 200
        async with connected(port) as (reader, writer):
            writer.write(b"GET /api/events HTTP/1.1\r\nHost: h\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            gateway.send_signal(signal.SIGTERM)
            async with asyncio.timeout(30):
                while True:  # until nobody new is let in
                    try:
                        async with connected(port) as (late, _):
                            await late.read()
                    except ConnectionRefusedError:
                        break
                    except ConnectionResetError:
                        pass  # it stood in the line of those to be let in when that line was closed
            controller.stream.put_nowait(b"data: last words\n\n")
            controller.stream.put_nowait(None)
            assert b"last words" in await asyncio.wait_for(reader.read(), 20)
        assert await asyncio.wait_for(gateway.wait(), 20) == 0
        assert gateway.stderr is not None
        log = (await gateway.stderr.read()).decode()
    assert "gateway serves" in log
    assert GATEWAY_KEY not in log
    assert "Traceback" not in log


async def test_killed_with_500_streams_it_leaves_nothing_behind_and_the_next_one_serves(
    controller: ScriptedController, tmp_path: Path
) -> None:
    """The streams are lost, and nothing else: processes hear at once that nobody listens any more."""
    port = free_port()
    settings = {"controller": f"unix:{controller.socket}", "gateway_key_file": key_file(tmp_path), "port": str(port)}
    many = aiohttp.TCPConnector(limit=600)
    async with (
        running_ingress("n1") as ingress,
        aiohttp.ClientSession(connector=many, timeout=aiohttp.ClientTimeout(total=40)) as http,
    ):
        ingress.paused = asyncio.Event()
        replica = ingress.replica("p1", slots=600)
        controller.change(models=[{"id": "small", "revision": "r1"}], nodes=[ingress.view], replicas=[replica])
        url, body = f"http://127.0.0.1:{port}/v1/chat/completions", {"model": "small", "stream": True}
        async with process(**settings, hints="false") as gateway:
            await until_ready(http, port)
            asked = [http.post(url, headers=bearer(USER), json=body) for _ in range(500)]
            streams = await asyncio.gather(*asked)
            assert {stream.status for stream in streams} == {200}
            assert ingress.running["p1"] == 500
            gateway.kill()
            for stream in streams:
                with pytest.raises(aiohttp.ClientError):
                    await stream.read()
            await until(lambda: ingress.running["p1"] == 0, "every process to be told")
        ingress.paused.set()
        async with process(**settings, hints="false"):
            await until_ready(http, port)
            async with http.post(url, headers=bearer(USER), json=body) as answer:
                assert (await answer.read()).endswith(b"data: [DONE]\n\n")


async def test_a_second_signal_does_not_wait(controller: ScriptedController, http: aiohttp.ClientSession) -> None:
    port = free_port()
    settings = {"controller": f"unix:{controller.socket}", "gateway_key": GATEWAY_KEY, "port": str(port)}
    async with (
        process(**settings, hints="false", drain_timeout="10m") as gateway,
        connected_when_ready(http, port) as (
            reader,
            writer,
        ),
    ):
        writer.write(b"GET /api/events HTTP/1.1\r\nHost: h\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        assert gateway.stderr is not None
        gateway.send_signal(signal.SIGTERM)
        async with asyncio.timeout(30):
            while b"gateway stops" not in await gateway.stderr.readline():
                pass
            gateway.send_signal(signal.SIGTERM)
            assert await gateway.wait() == 0


@contextlib.asynccontextmanager
async def connected_when_ready(
    http: aiohttp.ClientSession, port: int
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    await until_ready(http, port)
    async with connected(port) as both:
        yield both


async def test_a_port_in_use_is_one_clear_line() -> None:
    with sockets.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        async with process(
            controller="unix:/nowhere.sock", gateway_key=GATEWAY_KEY, port=port, log_level="error"
        ) as gateway:
            _, errors = await asyncio.wait_for(gateway.communicate(), 20)
    assert gateway.returncode == 1
    assert errors.decode().splitlines() == [
        f"corral gateway: 127.0.0.1:{port} is in use by another program; choose another with --port"
    ]


async def test_a_missing_key_file_is_one_clear_line(tmp_path: Path) -> None:
    missing = tmp_path / "gateway.key"
    async with process(
        controller="unix:/nowhere.sock", gateway_key_file=str(missing), port="0", log_level="error"
    ) as gateway:
        _, errors = await asyncio.wait_for(gateway.communicate(), 20)
    assert gateway.returncode == 1
    assert errors.decode().splitlines() == [f"corral gateway: there is no gateway key: {missing} is absent"]


async def test_plain_http_beyond_this_machine_is_warned_about(tmp_path: Path) -> None:
    where = {"controller": "http://192.0.2.9:1", "host": "0.0.0.0", "port": str(free_port())}
    async with process(**where, gateway_key_file=key_file(tmp_path)) as gateway, asyncio.timeout(30):
        assert gateway.stderr is not None
        warned: set[str] = set()
        while len(warned) < 2:
            line = (await gateway.stderr.readline()).decode()
            assert line, "it ended without the warnings"
            if "plain http beyond this machine" in line:
                warned.add(line.partition("url=")[2].split()[0])
    assert "http://192.0.2.9:1" in warned
    assert any(url.startswith("http://0.0.0.0:") for url in warned)


async def test_it_accepts_on_the_socket_it_was_handed_and_a_killed_one_refuses_nobody(
    controller: ScriptedController, http: aiohttp.ClientSession
) -> None:
    """As systemd hands it over: LISTEN_PID, LISTEN_FDS, and the descriptor 3. Its own --port counts for nothing."""
    settings = {"controller": f"unix:{controller.socket}", "gateway_key": GATEWAY_KEY, "port": str(free_port())}
    with sockets.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        async with process_with(listener, **settings, hints="false") as gateway:
            await until_ready(http, port)
            gateway.kill()
            await gateway.wait()
        waiting = asyncio.ensure_future(http.get(f"http://127.0.0.1:{port}/healthz"))
        async with process_with(listener, **settings, hints="false") as gateway:
            async with await asyncio.wait_for(waiting, 60) as answer:
                assert await answer.read() == b"ok\n"
            gateway.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(gateway.wait(), 60) == 0


@contextlib.asynccontextmanager
async def process_with(listener: sockets.socket, **settings: str) -> AsyncIterator[asyncio.subprocess.Process]:
    hand_over = f"""
import os
os.dup2({listener.fileno()}, 3)
os.environ |= {{"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1", "LISTEN_FDNAMES": "gateway"}}
"""
    env = {**os.environ, **{f"CORRAL_{name.upper()}": value for name, value in settings.items()}}
    started = await asyncio.create_subprocess_exec(
        sys.executable, "-c", hand_over + RUN, env=env, pass_fds=(listener.fileno(),)
    )
    try:
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            started.kill()
        await started.wait()
