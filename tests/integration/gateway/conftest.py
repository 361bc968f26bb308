"""A gateway in this process, before a scripted controller on a unix socket."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from socket import socket as Socket
from typing import Any

import aiohttp
import pytest

from corral.gateway.main import Gateway, open_gateway
from corral.gateway.routing.request import Router
from corral.kit.clock import SystemClock
from tests.integration.gateway.scripted_controller import (
    GATEWAY_KEY,
    ScriptedController,
    key,
    running_controller,
    settings_with,
)
from tests.support.relay import HeldClock, hold_clock

ADMIN, VIEWER, USER, LIMITED = "ck_admin", "ck_viewer", "ck_user", "ck_limited"
KEYS = [
    key(ADMIN, "admin"),
    key(VIEWER, "viewer"),
    key(USER, "inference"),
    key(LIMITED, "inference", models=["small"]),
]
MODELS = [{"id": "small", "created": 5}, {"id": "org/large", "created": 6}]

OpenGateway = Callable[..., AbstractAsyncContextManager[Gateway]]


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


@pytest.fixture
def socket() -> Iterator[Path]:
    """In a folder of its own with a short name: paths of unix sockets end at about 100 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="cg-"))
    yield folder / "c.sock"
    shutil.rmtree(folder)


@pytest.fixture
async def controller(socket: Path) -> AsyncIterator[ScriptedController]:
    async with running_controller(socket, keys=list(KEYS), models=list(MODELS)) as controller:
        yield controller


@pytest.fixture
def open_one(socket: Path) -> OpenGateway:
    """Opens gateways with settings of a test's choice."""

    @contextlib.asynccontextmanager
    async def opened(
        *, router: Router | None = None, listeners: Sequence[Socket] = (), **more: Any
    ) -> AsyncIterator[Gateway]:
        settings = {
            "controller": f"unix:{socket}",
            "gateway_key": GATEWAY_KEY,
            "port": 0,
            "view_check_interval_s": 0.05,
            "view_gap_s": 0.005,
            "hints": False,
            "receipts_interval_s": 60.0,
            "drain_timeout_s": 10.0,
            **more,
        }
        async with open_gateway(settings_with(settings), SystemClock(), router=router, listeners=listeners) as gateway:
            yield gateway

    return opened


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> HeldClock:
    return hold_clock(monkeypatch)


@pytest.fixture
async def gateway(controller: ScriptedController, open_one: OpenGateway) -> AsyncIterator[Gateway]:
    """The usual one, with its first view read."""
    async with open_one() as gateway:
        await gateway.views.run_once()
        yield gateway


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
        yield session
