"""One yard, two kinds of bus: the same tests run on NATS and on its in-process twin."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

from corral.bus.api import Bus, FixedCredentials
from corral.bus.auth import MintedUser, user_jwt
from corral.bus.handler_queue import QueueLimits
from corral.bus.jwt import derive_seed, public_key
from corral.bus.local import LocalHub
from corral.bus.nats import NatsBus
from corral.bus.permissions import Permissions, inbox_prefix
from corral.kit.clock import SystemClock
from tests.support.nats import Cable, NatsServer, quick_settings, running_server

WAIT_S = 30.0


class Yard(ABC):
    """Where participants meet."""

    kind: str

    @abstractmethod
    async def join(
        self, name: str, *, permissions: Permissions | None = None, limits: QueueLimits | None = None
    ) -> Bus:
        """Connected. Without permissions it may do everything."""

    @abstractmethod
    async def cut(self, name: str) -> None:
        """Break its connection; it stays broken."""

    @abstractmethod
    def freeze(self, name: str) -> None:
        """Lose all it sends and receives without telling anybody."""

    @abstractmethod
    async def heal(self, name: str) -> None: ...


class LocalYard(Yard):
    kind = "local"

    def __init__(self, stack: contextlib.AsyncExitStack) -> None:
        self._stack = stack
        self._hub = LocalHub(SystemClock(), seed=1)

    async def join(
        self, name: str, *, permissions: Permissions | None = None, limits: QueueLimits | None = None
    ) -> Bus:
        return await self._stack.enter_async_context(self._hub.join(name, permissions=permissions, limits=limits))

    async def cut(self, name: str) -> None:
        self._hub.cut(name)

    def freeze(self, name: str) -> None:
        self._hub.freeze(name)

    async def heal(self, name: str) -> None:
        self._hub.heal(name)


class NatsYard(Yard):
    kind = "nats"

    def __init__(self, stack: contextlib.AsyncExitStack, server: NatsServer) -> None:
        self._stack = stack
        self._server = server
        self._cables: dict[str, Cable] = {}

    async def join(
        self, name: str, *, permissions: Permissions | None = None, limits: QueueLimits | None = None
    ) -> Bus:
        cable = Cable(urlsplit(self._server.url).port or 0)
        self._cables[name] = await self._stack.enter_async_context(cable)
        user = self._mint(name, permissions)
        bus = NatsBus(
            [cable.url],
            FixedCredentials(user.credentials()),
            inbox_prefix=user.inbox,
            settings=quick_settings(queues=limits, ping_interval_s=1.0, ping_timeout_s=2.0),
        )
        await self._stack.enter_async_context(bus)
        await bus.wait_connected(WAIT_S)
        return bus

    async def cut(self, name: str) -> None:
        await self._cables[name].cut()

    def freeze(self, name: str) -> None:
        self._cables[name].freeze()

    async def heal(self, name: str) -> None:
        await self._cables[name].heal()

    def _mint(self, name: str, permissions: Permissions | None) -> MintedUser:
        account_seed = self._server.keys.account_seed
        seed = derive_seed(account_seed, "test", name)
        key = public_key(seed)
        allowed = permissions or Permissions(publish=(">",), subscribe=(">",))
        token = user_jwt(account_seed, key, allowed, name=name, now=datetime.now(UTC), ttl_s=None)
        return MintedUser(token, seed, key, inbox_prefix(name), None)


@contextlib.asynccontextmanager
async def open_yard(kind: str, folder: Path) -> AsyncIterator[Yard]:
    async with contextlib.AsyncExitStack() as stack:
        if kind == "local":
            yield LocalYard(stack)
        else:
            yield NatsYard(stack, await stack.enter_async_context(running_server(folder)))
