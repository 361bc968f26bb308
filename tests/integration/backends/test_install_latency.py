"""An install timeout of 5 s against a worker that does not accept first: in progress, not failed (seed 002)."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from tests.support.backend_fleet import open_fleet, quick
from tests.support.sqlite import sqlite_url

LIMIT_S = 5.0


async def test_a_worker_that_does_not_accept_first_and_takes_longer_than_5_s(tmp_path: Path) -> None:
    async with open_fleet(sqlite_url(tmp_path), start=False) as fleet:
        settings = quick(backend_install_timeout_s=LIMIT_S)
        fleet.controllers.insert(0, await fleet.controller("c2", settings=settings))
        old = await fleet.localai("old-hand")
        old.script.hold = asyncio.Event()
        began = time.monotonic()
        operation = await fleet.install()
        assert (await fleet.until_row(operation, "old-hand", "downloading")).failures == 0, "called, and awaited"
        row = await fleet.until_row(operation, "old-hand", "running_on_worker")
        assert time.monotonic() - began >= LIMIT_S, "it had its time"
        assert (row.failures, row.next_retry_at) == (0, "")
        view = await fleet.view(operation)
        assert (view.state, view.processed, view.error) == ("under_way", True, "")
        assert view.message == "worker still installing in background: old-hand"
        await fleet.quiet()
        assert len(old.orders()) == 1, "no second call while it may be at it"
        old.script.hold.set()  # it finishes; nobody waits for its answer any more, its next list shows it
        await fleet.until(operation, "done")
        assert len(old.orders()) == 1
        intent = await fleet.intent("old-hand")
        assert (intent.failures, intent.attempt) == (0, 1)
