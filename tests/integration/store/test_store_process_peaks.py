"""What processes of models were seen to hold: written once each, and gone with the model."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from corral.kit.errors import Conflict
from corral.store import Store
from corral.store.tables import models, process_peaks
from corral.store.tables.process_peaks import Peak
from tests.integration.store.rows import a_model

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
LATER = NOON + timedelta(hours=1)


async def test_each_process_has_its_own_and_all_go_with_their_model(store: Store) -> None:
    first, second = (
        Peak(model="a", revision="r1", process_id="p-1", seen_at=LATER, ram_bytes=2**40),
        Peak(model="a", revision="r1", process_id="p-2", seen_at=NOON, ram_bytes=0, device_bytes=7, devices=2),
    )
    other = Peak(model="b", revision="r1", process_id="p-3", seen_at=NOON, ram_bytes=5)
    async with store.write() as tx:
        for name in ("a", "b"):
            await models.put(tx, a_model(name))
        await process_peaks.put(tx, [other, first, second])
        assert await process_peaks.list_(tx) == [second, first, other], "the latest last"
        await process_peaks.put(
            tx,
            [Peak(model="a", revision="r1", process_id="p-2", seen_at=LATER, ram_bytes=0, device_bytes=9, devices=2)],
        )
    async with store.write() as tx:
        again = Peak(model="a", revision="r1", process_id="p-2", seen_at=NOON, ram_bytes=0, device_bytes=9, devices=2)
        assert await process_peaks.list_(tx) == [again, first, other], "seen first when it was seen first"
        await process_peaks.delete(tx, [first])
        assert await process_peaks.list_(tx) == [again, other]
        await models.delete(tx, "a")
        assert await process_peaks.list_(tx) == [other]


async def test_of_a_model_that_is_gone_nothing_is_kept(store: Store) -> None:
    with pytest.raises(Conflict):
        async with store.write() as tx:
            await process_peaks.put(
                tx, [Peak(model="nobody", revision="r1", process_id="p", seen_at=NOON, ram_bytes=5)]
            )
