"""An idle controller sleeps: what has nothing to do starts no timers."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from corral.bus.local import LocalHub
from corral.contract.messages.backends import InstallProgress
from corral.controller.api import server
from corral.controller.api.server import serve_app
from corral.controller.operations.progress import ProgressCollector
from corral.controller.runtime.change_feed import ChangeFeed
from corral.controller.runtime.leadership import Leadership
from corral.controller.settings.serving import ListenSettings
from corral.kit.clock import SystemClock
from corral.store import open_store
from tests.support.sqlite import sqlite_url
from tests.support.waiting import until


async def answer(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def test_the_server_wakes_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks: list[float] = []
    on_tick = server._Server.on_tick

    async def counted(self: server._Server, counter: int) -> bool:
        ticks.append(time.monotonic())
        return await on_tick(self, counter)

    monkeypatch.setattr(server._Server, "on_tick", counted)
    async with serve_app(answer, ListenSettings(socket=tmp_path / "s", port=0)):
        await until(lambda: len(ticks) >= 3)
        assert min(after - before for before, after in pairwise(ticks)) > 0.9


async def test_the_server_stops_without_waiting_for_its_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_TICK_S", 3600.0)
    async with asyncio.timeout(30), serve_app(answer, ListenSettings(socket=tmp_path / "s", port=0)):
        pass


async def test_progress_that_nobody_makes_is_not_looked_for(tmp_path: Path) -> None:
    class CountingClock(SystemClock):
        sleeps = 0

        async def sleep(self, seconds: float) -> None:
            self.sleeps += 1
            await super().sleep(seconds)

    clock = CountingClock()
    async with (
        open_store(sqlite_url(tmp_path)) as store,
        LocalHub(SystemClock()).join("controller") as bus,
    ):
        feed = ChangeFeed(store, bus, clock, interval_s=60)
        progress = ProgressCollector(
            store, bus, Leadership(store, "me", ttl_s=60), feed, clock, publish_s=0.01, write_s=0.01
        )
        running = asyncio.create_task(progress.run())
        try:
            await until(lambda: clock.sleeps == 2)  # each looked once, at the start
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await until(lambda: clock.sleeps > 2)
            await progress.on_progress(InstallProgress(op_id="op", percentage=1.0), {"node": "n"})
            await until(lambda: clock.sleeps == 4)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
