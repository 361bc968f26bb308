"""Serves the app on a unix socket, on a port, or on both."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, cast

import uvicorn

from corral.controller.settings.serving import ListenSettings
from corral.kit.hosts import is_loopback
from corral.kit.log import get_log
from corral.kit.settings import BadSettings

log = get_log(__name__)

_TICK_S = 1.0
_START_S = 60.0  # a machine under load is slow, not broken


class _Server(uvicorn.Server):
    """Signals are main's business: it stops the parts in order."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        self.should_exit = True
        self._stopping.set()

    async def main_loop(self) -> None:
        """Once a second, for the Date header, and at once for a stop; uvicorn's own wakes ten times a second."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await self._stopping.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def serve_app(
    app: Any, settings: ListenSettings, upgrades: Callable[..., asyncio.Protocol] | None = None
) -> AsyncIterator[list[str]]:
    """Yields the addresses when all of them answer; leaving the block closes open streams within two seconds.
    `upgrades` serves WebSocket requests."""
    listeners: list[tuple[str, socket.socket, bool]] = []
    if settings.socket is not None:
        listeners.append((f"unix:{settings.socket}", _unix_socket(settings.socket), False))
    if settings.port:
        secure = settings.tls_cert is not None
        if not secure and not is_loopback(settings.host):
            log.warning("served without TLS beyond this machine: keys can be read on the network", host=settings.host)
        scheme = "https" if secure else "http"
        listeners.append(
            (f"{scheme}://{settings.host}:{settings.port}", _tcp_socket(settings.host, settings.port), secure)
        )
    if not listeners:
        raise BadSettings(["the controller needs somewhere to serve: --socket, or --port"])
    ours = _inode(settings.socket)
    servers = [
        (_server(app, settings, upgrades, secure=secure, local=sock.family is socket.AF_UNIX), sock)
        for _, sock, secure in listeners
    ]
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(server.serve(sockets=[sock]), name="http") for server, sock in servers]
        await _started([server for server, _ in servers], running)
        try:
            yield [place for place, _, _ in listeners]
        finally:
            for server, _ in servers:
                server.stop()
    if settings.socket is not None and _inode(settings.socket) == ours:  # else a successor has taken the place
        settings.socket.unlink(missing_ok=True)


def _inode(path: Path | None) -> int | None:
    try:
        return path.stat().st_ino if path is not None else None
    except OSError:
        return None


async def _started(servers: list[_Server], running: list[asyncio.Task[None]]) -> None:
    async with asyncio.timeout(_START_S):
        while not all(server.started for server in servers):
            for task in running:
                if task.done():
                    task.result()
            await asyncio.sleep(0.01)  # uvicorn offers no event to wait for


def _server(
    app: Any,
    settings: ListenSettings,
    upgrades: Callable[..., asyncio.Protocol] | None,
    *,
    secure: bool,
    local: bool,
) -> _Server:
    config = uvicorn.Config(
        app,
        ws=cast(type[asyncio.Protocol], upgrades) if upgrades is not None else "none",  # it only calls it
        # Behind the socket stands the gateway, which bounds heads itself; on a port h11 does, and httptools does not.
        http="auto" if local else "h11",
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        date_header=True,
        proxy_headers=False,  # only a gateway with a valid key may report the address of a client
        timeout_keep_alive=75,
        timeout_graceful_shutdown=2,
        ssl_certfile=str(settings.tls_cert) if secure and settings.tls_cert else None,
        ssl_keyfile=str(settings.tls_key) if secure and settings.tls_key else None,
    )
    return _Server(config)


def _unix_socket(path: Path) -> socket.socket:
    path.parent.mkdir(parents=True, exist_ok=True)
    if len(os.fsencode(path)) > 100:
        raise BadSettings([f"--socket: {path} is longer than 100 bytes; unix sockets need a short path"])
    # Bound under another name and then renamed: the path always leads to a socket that accepts connections.
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(aside))
        os.chmod(aside, 0o600)
        os.replace(aside, path)
    except OSError as error:
        listener.close()
        raise BadSettings([f"--socket: {path}: {error.strerror}"]) from error
    return listener


def _tcp_socket(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise BadSettings(
            [f"--port: {host}:{port} cannot be used: {error.strerror}; choose another with --port"]
        ) from error
    return listener
