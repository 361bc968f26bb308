"""A real nats-server for tests, on a free port, with keys of its own, and what is needed to treat it badly.

Use the fixture by importing it: `from tests.support.nats import nats_server`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pytest

from corral.bus.api import BusCredentials, BusTls, CredentialSource, FixedCredentials
from corral.bus.auth import (
    BusKeys,
    MintedUser,
    account_jwt,
    mint_gateway_credentials,
    mint_node_credentials,
    mint_service_credentials,
    mint_system_credentials,
)
from corral.bus.connection import ConnectionTimeouts
from corral.bus.embedded import EmbeddedServer, ServerSettings, ServerTls
from corral.bus.handler_queue import QueueLimits
from corral.bus.keys import load_or_create_keys
from corral.bus.nats import NatsBus, NatsSettings
from corral.bus.revocation import push_account
from tests.support.processes import free_port, kept_port

REPLY_TTL_S = 60.0


def quick_settings(
    *,
    ping_interval_s: float = 5.0,
    ping_timeout_s: float = 5.0,
    connect_timeout_s: float = 5.0,
    queues: QueueLimits | None = None,
) -> NatsSettings:
    """As in production, with short retries."""
    return NatsSettings(
        connection=ConnectionTimeouts(
            connect_timeout_s=connect_timeout_s,
            ping_interval_s=ping_interval_s,
            ping_timeout_s=ping_timeout_s,
            close_timeout_s=1.0,
        ),
        queues=queues or QueueLimits(),
        retry_first_s=0.02,
        retry_cap_s=0.2,
        close_grace_s=1.0,
    )


@dataclass
class Minting:
    """A source that mints afresh each time it is asked, and counts."""

    mint: Callable[[], MintedUser]
    asked: int = 0

    async def current(self) -> BusCredentials:
        self.asked += 1
        return self.mint().credentials()


@dataclass
class NatsServer:
    """The embedded server with everything one needs to join it as anybody."""

    keys: BusKeys
    server: EmbeddedServer
    tls: BusTls | None = None
    revoked: dict[str, int] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return self.server.url

    def service(self, *, ttl_s: float | None = None) -> MintedUser:
        seeds = self.keys.account_seed, self.keys.service_user_seed
        return mint_service_credentials(*seeds, now=datetime.now(UTC), ttl_s=ttl_s, reply_ttl_s=REPLY_TTL_S)

    def node(self, node_id: str, *, ttl_s: float = 3600, localai: bool = False) -> MintedUser:
        return mint_node_credentials(
            self.keys.account_seed,
            node_id,
            now=datetime.now(UTC),
            ttl_s=ttl_s,
            reply_ttl_s=REPLY_TTL_S,
            localai=localai,
        )

    def gateway(self, name: str, *, ttl_s: float = 3600) -> MintedUser:
        return mint_gateway_credentials(self.keys.account_seed, name, now=datetime.now(UTC), ttl_s=ttl_s)

    def system(self) -> MintedUser:
        return mint_system_credentials(self.keys, now=datetime.now(UTC), ttl_s=60)

    def bus(
        self,
        user: MintedUser,
        *,
        source: CredentialSource | None = None,
        settings: NatsSettings | None = None,
        url: str = "",
    ) -> NatsBus:
        """Not started yet: `async with` it."""
        return NatsBus(
            [url or self.url],
            source or FixedCredentials(user.credentials()),
            tls=self.tls,
            inbox_prefix=user.inbox or "_INBOX",
            settings=settings or quick_settings(),
        )

    async def revoke(self, user_key: str) -> None:
        self.revoked[user_key] = int(time.time()) + 3600
        token = account_jwt(
            self.keys.operator_seed,
            self.keys.account,
            name="corral",
            now=datetime.now(UTC),
            revocations=self.revoked,
        )
        await push_account([self.url], self.system().credentials(), token, tls=self.tls)


@contextlib.asynccontextmanager
async def running_server(folder: Path, *, tls: ServerTls | None = None) -> AsyncIterator[NatsServer]:
    keys = load_or_create_keys(folder / "secrets" / "bus", datetime.now(UTC))
    settings = ServerSettings(folder=folder / "bus", port=free_port(), tls=tls)
    async with EmbeddedServer(settings, keys) as server:
        yield NatsServer(keys, server)


@pytest.fixture
async def nats_server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    async with running_server(tmp_path) as server:
        yield server


class Cable:
    """A TCP relay before a server, that can be cut, or go silent without anybody being told."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._server: asyncio.Server | None = None
        self._place: socket.socket | None = None  # keeps the port while nobody listens there
        self._port = 0
        self._passing = asyncio.Event()
        self._passing.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self._port}"

    async def __aenter__(self) -> Cable:
        self._place = kept_port()
        self._port = self._place.getsockname()[1]
        await self.heal()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._passing.set()
        await self.cut()
        for task in tuple(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(tuple(self._tasks))
        if self._place is not None:
            self._place.close()

    async def cut(self) -> None:
        """Every connection breaks, and no new one comes about."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in tuple(self._writers):
            writer.transport.abort()

    def freeze(self) -> None:
        self._passing.clear()

    async def heal(self) -> None:
        """What went silent is lost: its connections break now."""
        if not self._passing.is_set():
            for writer in tuple(self._writers):
                writer.transport.abort()
            self._passing.set()
        if self._server is None:
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """No coroutine: asyncio logs one that is cancelled, and nobody knows of the line until it runs."""
        task = asyncio.get_running_loop().create_task(self._relay(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = [writer]
        self._writers.add(writer)
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
            ends.append(far_writer)
            self._writers.add(far_writer)
            await asyncio.gather(self._pass_on(reader, far_writer), self._pass_on(far_reader, writer))
        except OSError:
            pass  # the server is away: so is the line to it
        finally:
            for each in ends:
                each.transport.abort()
                self._writers.discard(each)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                await self._passing.wait()
                writer.write(data)
                await writer.drain()
        writer.transport.abort()
