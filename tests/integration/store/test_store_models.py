"""Models and their schedules."""

from __future__ import annotations

from datetime import timedelta

import msgspec
import pytest

from corral.kit.errors import NotFound
from corral.store import Store
from corral.store.tables import model_schedules, models
from tests.integration.store.rows import NOON, a_model, a_schedule


async def test_a_model_comes_back_whole_with_the_databases_own_moments(store: Store) -> None:
    wanted = a_model("org/smol", source="corral@smol", created_by="ann", definition={"name": "x", "a": [1, {"b": 0.5}]})
    async with store.write() as tx:
        written = await models.put(tx, wanted)
        assert written == msgspec.structs.replace(
            wanted, created_at=written.created_at, updated_at=written.updated_at, row_version=1
        )
        assert written.created_at > NOON
    async with store.read() as tx:
        assert await models.get(tx, "org/smol") == written
        assert await models.find(tx, "smol") is None
        with pytest.raises(NotFound):
            await models.get(tx, "smol")


async def test_a_model_is_replaced_and_stays_who_it_is(store: Store) -> None:
    async with store.write() as tx:
        first = await models.put(tx, a_model(created_by="ann"))
    async with store.write() as tx:
        again = await models.put(
            tx, a_model(revision="r2", definition={"name": "smol"}, created_by="bob", origin="file")
        )
    assert (again.created_at, again.created_by, again.row_version) == (first.created_at, "ann", 2)
    assert (again.revision, again.definition, again.origin) == ("r2", {"name": "smol"}, "file")
    assert again.updated_at >= first.updated_at


async def test_revisions_before_are_forgotten_when_the_present_one_is_ready(store: Store) -> None:
    async with store.write() as tx:
        await models.put(tx, a_model(revision="r3", previous_revisions=("r2", "r1")))
        assert not await models.forget_previous_revisions(tx, "smol", "r2")
        assert (await models.get(tx, "smol")).previous_revisions == ("r2", "r1")
        assert await models.forget_previous_revisions(tx, "smol", "r3")
        assert not await models.forget_previous_revisions(tx, "smol", "r3")
        assert (await models.get(tx, "smol")).previous_revisions == ()


async def test_models_are_listed_by_name_and_deleted_once(store: Store) -> None:
    async with store.write() as tx:
        for name, origin in (("b", "file"), ("B", "person"), ("a", "file"), ("ä", "gallery")):
            await models.put(tx, a_model(name, origin=origin))
    async with store.write() as tx:
        assert [model.id for model in await models.list_(tx)] == ["B", "a", "b", "ä"]
        assert [model.id for model in await models.list_(tx, ["b", "B", "nobody"])] == ["B", "b"]
        assert [model.id for model in await models.list_of_origin(tx, "file")] == ["a", "b"]
        assert await models.delete(tx, "b")
        assert not await models.delete(tx, "b")
        assert [model.id for model in await models.list_of_origin(tx, "file")] == ["a"]


async def test_a_schedule_is_replaced_whole_but_keeps_its_id(store: Store) -> None:
    full = a_schedule(
        node_selector={"tier": "fast", "ä": "ö"},
        min_replicas=1,
        max_replicas=3,
        route_policy="prefix_cache",
        balance_abs_threshold=4,
        balance_rel_threshold=1.25,
        min_prefix_match=0.3,
        unsatisfiable_ticks=2,
        unsatisfiable_until=NOON,
    )
    async with store.write() as tx:
        first = await model_schedules.put(tx, full)
        assert first == msgspec.structs.replace(full, created_at=first.created_at, updated_at=first.updated_at)
        second = await model_schedules.put(tx, a_schedule(spread_all=True))
        assert (second.id, second.created_at) == (first.id, first.created_at)
        assert (second.spread_all, second.min_replicas, second.node_selector) == (True, 0, {})
        assert (second.unsatisfiable_ticks, second.unsatisfiable_until) == (0, None)
    async with store.read() as tx:
        assert await model_schedules.list_(tx) == [second] == [await model_schedules.get(tx, "smol")]
    async with store.write() as tx:
        assert await model_schedules.delete(tx, "smol")
        assert not await model_schedules.delete(tx, "smol")
        with pytest.raises(NotFound):
            await model_schedules.get(tx, "smol")


async def test_what_cannot_be_had_is_remembered_until_room_comes(store: Store) -> None:
    until = NOON + timedelta(minutes=5)
    async with store.write() as tx:
        before = [await model_schedules.put(tx, a_schedule(name)) for name in ("a", "b")]
        await model_schedules.mark_unsatisfiable(tx, "a", 3, until)
        marked, other = await model_schedules.list_(tx)
        assert (marked.unsatisfiable_ticks, marked.unsatisfiable_until) == (3, until)
        assert marked.updated_at == before[0].updated_at
        assert other == before[1]
        assert await model_schedules.clear_unsatisfiable(tx) == 1
        assert await model_schedules.list_(tx) == before
