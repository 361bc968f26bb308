"""A worker inside the test's own loop, with short durations, and what a test asks of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

from corral.kit.settings import read_settings
from corral.worker.main import serve
from corral.worker.settings import WorkerSettings
from tests.support.processes import free_port
from tests.support.waiting import DEADLINE_S

# What only bounds a wait is generous: whoever stands still for a second has not hung.
QUICK = {
    "heartbeat_interval": "100ms",
    "retry_first": "20ms",
    "retry_cap": "100ms",
    "approval_poll": "30ms",
    "http_timeout": "20s",
    "drain_timeout": "2s",
    "leave_timeout": "30s",
}


def worker_env(controller: str, data: Path, **more: str) -> dict[str, str]:
    """As for `corral worker`; every key is a setting without its prefix."""
    given = {"controller": controller, "data": str(data), "name": "w1", "host": "127.0.0.1", **QUICK, **more}
    return {f"CORRAL_{key.upper()}": value for key, value in given.items() if value}


def worker_settings(controller: str, data: Path, **more: str) -> WorkerSettings:
    return read_settings(WorkerSettings, flags={}, env=worker_env(controller, data, **more))


class RunningWorker:
    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self.stopped = asyncio.Event()
        self.hurry = asyncio.Event()
        self.task = asyncio.ensure_future(serve(settings, stopped=self.stopped, hurry=self.hurry))

    @property
    def ingress(self) -> str:
        return f"http://127.0.0.1:{self.settings.ingress.port}"

    @property
    def identity(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.settings.node.data / "identity.json").read_bytes())
        return found

    async def ended(self, timeout_s: float = DEADLINE_S) -> None:
        """Raises what ended it."""
        async with asyncio.timeout(timeout_s):
            await self.task

    async def leave(self, timeout_s: float = DEADLINE_S) -> None:
        self.stopped.set()
        await self.ended(timeout_s)

    async def get(
        self, path: str, token: str = "", *, method: str = "GET", base: str = "", tls: ssl.SSLContext | None = None
    ) -> tuple[int, str]:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        async with (
            aiohttp.ClientSession() as session,
            session.request(
                method, (base or self.ingress) + path, headers=headers, ssl=tls if tls is not None else True
            ) as answer,
        ):
            return answer.status, await answer.text()

    async def answer(self, path: str) -> tuple[int, str]:
        """The first answer once the ingress listens."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                try:
                    return await self.get(path)
                except aiohttp.ClientError:
                    if self.task.done():
                        await self.task
                    await asyncio.sleep(0.01)

    async def ready(self, status: int = 200) -> None:
        """Until `/readyz` says so; or, with 503, until it says no."""
        async with asyncio.timeout(DEADLINE_S):
            while (await self.answer("/readyz"))[0] != status:  # noqa: ASYNC110 - another process decides
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def running_worker(controller: str, data: Path, **more: str) -> AsyncIterator[RunningWorker]:
    """Gone when the block is left, in whatever way."""
    worker = RunningWorker(worker_settings(controller, data, **{"port": str(free_port()), **more}))
    try:
        yield worker
    finally:
        worker.stopped.set()
        worker.hurry.set()
        if not worker.task.done():
            with contextlib.suppress(Exception):
                await worker.ended()
        if not worker.task.done():
            worker.task.cancel()
            await asyncio.wait((worker.task,))
