"""A second process on the same database: `python other_process.py <deed> <url> …`, run by the tests beside it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine

from corral.store import StoreOptions, open_store
from corral.store.tables import settings_kv

PATIENT = StoreOptions(busy_timeout_s=30.0, turn_wait_s=30.0, lock_timeout_s=30.0)  # SQLite keeps no order of turns


async def count(url: str, times: str) -> None:
    async with open_store(url, options=PATIENT) as store:
        for _ in range(int(times)):
            async with store.write() as tx:
                value = await settings_kv.find(tx, "counter", int)
                await settings_kv.put(tx, "counter", (value or 0) + 1)


async def stay_inside(url: str) -> None:
    """Amid a transaction until killed."""
    async with open_store(url) as store, store.write() as tx:
        await settings_kv.put(tx, "counter", 99)
        print("inside", flush=True)
        await asyncio.Event().wait()


async def open_only(url: str) -> None:
    """Says which of the slow imports it took."""
    async with open_store(url) as store:
        await store.ping()
    print(" ".join(name for name in ("alembic", "greenlet") if name in sys.modules), flush=True)


DEEDS: dict[str, Callable[..., Coroutine[None, None, None]]] = {
    "count": count,
    "stay_inside": stay_inside,
    "open_only": open_only,
}

if __name__ == "__main__":
    asyncio.run(DEEDS[sys.argv[1]](*sys.argv[2:]))
