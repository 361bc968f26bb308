"""Our own nats-server: find the binary, write its configuration, run it.

`prepare_server` only writes files and returns the command, for a supervisor (`corral up`). `EmbeddedServer` runs it as
a child that ends with this process. Keys come from `keys.py`; the account's revocations are pushed
later by `revocation.py` and live in the server's own folder, which is why an account file that exists is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import secrets
import signal
import socket
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from corral.bus.auth import BusKeys, account_jwt
from corral.bus.binary import die_with_parent, find_nats_server
from corral.bus.jwt import BadKey, decode_claims
from corral.kit.errors import Conflict, Failed
from corral.kit.files import make_private_folder, read_text, write_atomically
from corral.kit.log import get_log

log = get_log(__name__)

MAX_PAYLOAD_BYTES = 1024 * 1024


@dataclass(frozen=True)
class ServerTls:
    certificate: Path
    key: Path
    ca: Path | None = None  # set = clients must show a certificate signed by it


@dataclass(frozen=True)
class ServerSettings:
    folder: Path  # of this server alone: nats.conf, jwt/, the log
    host: str = "127.0.0.1"
    port: int = 4222
    tls: ServerTls | None = None
    log_file: Path | None = None  # None = the child's stdout
    ready_timeout_s: float = 15.0
    stop_timeout_s: float = 5.0


@dataclass(frozen=True)
class PreparedServer:
    """What a supervisor needs. `server_name` is new each time: it distinguishes our server from any other."""

    argv: tuple[str, ...]
    config: Path
    pid_file: Path
    host: str  # where to reach it from this machine
    port: int
    server_name: str

    @property
    def url(self) -> str:
        return f"nats://{self.host}:{self.port}"


def prepare_server(settings: ServerSettings, keys: BusKeys, *, now: datetime | None = None) -> PreparedServer:
    """Check the port, write the files, return the command. Blocking: a few milliseconds and one `--version`."""
    binary = find_nats_server()
    check_port_is_free(settings.host, settings.port)
    make_private_folder(settings.folder)
    tokens = settings.folder / "jwt"
    make_private_folder(tokens)
    _seed_accounts(tokens, keys, now or datetime.now(UTC))
    name = f"corral-{secrets.token_hex(6)}"
    config = settings.folder / "nats.conf"
    pid_file = settings.folder / "nats.pid"
    write_atomically(config, render_config(settings, keys, name, pid_file).encode(), mode=0o600)
    return PreparedServer(
        argv=(str(binary), "--config", str(config)),
        config=config,
        pid_file=pid_file,
        host=_reachable(settings.host),
        port=settings.port,
        server_name=name,
    )


def render_config(settings: ServerSettings, keys: BusKeys, server_name: str, pid_file: Path) -> str:
    """No JetStream, no monitoring port, no cluster. The `full` resolver takes accounts pushed at run time."""
    lines = [
        f"server_name: {_quoted(server_name)}",
        f"host: {_quoted(settings.host)}",
        f"port: {settings.port}",
        f"pid_file: {_quoted(str(pid_file))}",
        f"max_payload: {MAX_PAYLOAD_BYTES}",
        "max_connections: 65536",
        'ping_interval: "10s"',
        "ping_max: 2",
        'write_deadline: "5s"',
        "logtime: true",
        "connect_error_reports: 60",
        f"operator: {keys.operator_jwt}",
        f"system_account: {keys.system_account}",
        "resolver: {",
        "  type: full",
        f"  dir: {_quoted(str(settings.folder / 'jwt'))}",
        "  allow_delete: false",
        '  interval: "2m"',
        "  limit: 1000",
        "}",
    ]
    if settings.log_file is not None:
        lines.append(f"log_file: {_quoted(str(settings.log_file))}")
        lines.append("log_size_limit: 33554432")
    if settings.tls is not None:
        lines += _tls_block(settings.tls)
    return "\n".join(lines) + "\n"


def check_port_is_free(host: str, port: int) -> None:
    """Raise `Conflict` with a clear reason, instead of letting the server fail with a line in its log."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
            raise Conflict(f"port {port} on {host} {reason}; choose another one for the bus") from error


class EmbeddedServer:
    """`async with EmbeddedServer(settings, keys) as server`: the server runs inside the block."""

    def __init__(self, settings: ServerSettings, keys: BusKeys) -> None:
        self._settings = settings
        self._keys = keys
        self._process: Process | None = None
        self._prepared: PreparedServer | None = None

    @property
    def url(self) -> str:
        scheme = "tls" if self._settings.tls is not None else "nats"
        return f"{scheme}://{_reachable(self._settings.host)}:{self._settings.port}"

    @property
    def pid(self) -> int | None:
        return None if self._process is None or self._process.returncode is not None else self._process.pid

    async def __aenter__(self) -> EmbeddedServer:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        prepared = await asyncio.to_thread(prepare_server, self._settings, self._keys)
        output = self._settings.folder / "nats.out"
        with output.open("wb") as stream:
            self._process = await asyncio.create_subprocess_exec(
                *prepared.argv,
                stdin=DEVNULL,
                stdout=stream,
                stderr=STDOUT,
                preexec_fn=die_with_parent(),
            )
        self._prepared = prepared
        try:
            await self._wait_ready(prepared, output)
        except BaseException:
            await self.stop()
            raise
        log.info("bus server ready", url=self.url, pid=self._process.pid)

    async def stop(self) -> None:
        """Terminate, then kill after the timeout. Does nothing when the server has ended."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            async with asyncio.timeout(self._settings.stop_timeout_s):
                await self._process.wait()
        except TimeoutError:
            await self.kill()
        self._process = None

    async def kill(self) -> None:
        """Send SIGKILL."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGKILL)
            await self._process.wait()

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    async def _wait_ready(self, prepared: PreparedServer, output: Path) -> None:
        process = self._process
        assert process is not None
        try:
            async with asyncio.timeout(self._settings.ready_timeout_s):
                while not await _is_ready(prepared):
                    if process.returncode is not None:
                        raise Failed(f"nats-server ended with {process.returncode}: {_last_line(output)}")
                    await asyncio.sleep(0.02)
        except TimeoutError as error:
            waited = self._settings.ready_timeout_s
            raise Failed(f"nats-server was not ready within {waited:g} s: {_last_line(output)}") from error


async def _is_ready(prepared: PreparedServer) -> bool:
    """Whether the server that was just started, and no other, sends its INFO on the port."""
    try:
        reader, writer = await asyncio.open_connection(prepared.host, prepared.port)
    except OSError:
        return False
    try:
        info_line = await reader.readline()
        info = json.loads(info_line.removeprefix(b"INFO "))
        return bool(info.get("server_name") == prepared.server_name)
    except (OSError, ValueError):
        return False
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def _seed_accounts(folder: Path, keys: BusKeys, now: datetime) -> None:
    """Write the accounts that a server needs at its start. An existing file holds revocations and is kept."""
    for name, key in (("corral", keys.account), ("system", keys.system_account)):
        file = folder / f"{key}.jwt"
        if _is_account(read_text(file), key):
            continue
        token = account_jwt(keys.operator_seed, key, name=name, now=now)
        write_atomically(file, token.encode(), mode=0o600)


def _is_account(token: str | None, key: str) -> bool:
    # The server writes these files in place, so a power cut may leave half a token: that is as good as none.
    try:
        return token is not None and decode_claims(token).get("sub") == key
    except BadKey:
        return False


def _tls_block(tls: ServerTls) -> Sequence[str]:
    lines = [
        "tls: {",
        f"  cert_file: {_quoted(str(tls.certificate))}",
        f"  key_file: {_quoted(str(tls.key))}",
    ]
    if tls.ca is not None:
        lines += [f"  ca_file: {_quoted(str(tls.ca))}", "  verify: true"]
    return [*lines, "  timeout: 5", "}"]


def _reachable(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)


def _quoted(text: str) -> str:
    return json.dumps(text)


def _last_line(output: Path) -> str:
    with contextlib.suppress(OSError):
        lines = output.read_text(errors="replace").strip().splitlines()
        if lines:
            return lines[-1]
    return f"see {output.name}" if os.path.exists(output) else "no output"
