"""A controller that comes back is the same controller: in the table, in `GET /api/cluster` and in the page's header."""

from __future__ import annotations

from pathlib import Path

import pytest

from corral.controller.runtime.presence import Presence, hold_instance_id
from corral.kit.clock import SystemClock
from corral.store import Store, open_store
from corral.store.tables import controllers
from tests.support.sqlite import sqlite_url


async def start(store: Store, folder: Path) -> Presence:
    with hold_instance_id(folder) as instance:
        presence = Presence(store, instance, SystemClock(), interval_s=5)
        await presence.tell()
    return presence


@pytest.mark.parametrize("orderly", [True, False], ids=["stopped", "killed"])
async def test_a_restart_leaves_one_row(tmp_path: Path, orderly: bool) -> None:
    async with open_store(sqlite_url(tmp_path)) as store:
        before = await start(store, tmp_path)
        async with store.read() as tx:
            (first,) = await controllers.list_(tx)
        if orderly:
            await before.leave()
        after = await start(store, tmp_path)
        async with store.read() as tx:
            (second,) = await controllers.list_(tx)
        assert second.id == first.id
        assert second.started_at > first.started_at
        await after.tell()
        async with store.read() as tx:
            (third,) = await controllers.list_(tx)
        assert third.started_at == second.started_at
