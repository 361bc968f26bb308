"""What processes of models were seen to hold: raised, never lowered, gone with the model."""

from __future__ import annotations

import pytest

from corral.kit.errors import Conflict
from corral.store import Store, model_peaks, models
from corral.store.model_peaks import Peak
from tests.integration.store.rows import a_model


async def test_they_rise_and_go_with_their_model(store: Store) -> None:
    async with store.write() as tx:
        for name in ("a", "b"):
            await models.put(tx, a_model(name))
        await model_peaks.raise_(tx, [Peak("b", "r1", 5), Peak("a", "r1", 2**40)])
        await model_peaks.raise_(tx, [Peak("a", "r1", 7), Peak("a", "r2", 7), Peak("b", "r1", 6)])
    async with store.write() as tx:
        assert await model_peaks.list_(tx) == [Peak("a", "r1", 2**40), Peak("a", "r2", 7), Peak("b", "r1", 6)]
        await models.delete(tx, "a")
        assert await model_peaks.list_(tx) == [Peak("b", "r1", 6)]


async def test_of_a_model_that_is_gone_nothing_is_kept(store: Store) -> None:
    with pytest.raises(Conflict):
        async with store.write() as tx:
            await model_peaks.raise_(tx, [Peak("nobody", "r1", 5)])
