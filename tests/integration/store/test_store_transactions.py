"""Transactions: whole or not at all, nothing lost, whoever else writes and whenever somebody is cancelled."""

from __future__ import annotations

import asyncio
import random

import pytest

from corral.kit.errors import Conflict, CorralError, Invalid, Unavailable
from corral.store import Store, StoreOptions, Transaction, open_store
from corral.store.tables import node_labels, nodes, revisions, settings_kv
from tests.integration.store.rows import a_node


async def count_up(store: Store, key: str = "counter") -> None:
    async with store.write() as tx:
        value = await settings_kv.find(tx, key, int)
        await asyncio.sleep(0)  # let the others in, if they can
        await settings_kv.put(tx, key, (value or 0) + 1)


async def counted(store: Store, key: str = "counter") -> int:
    async with store.read() as tx:
        return await settings_kv.find(tx, key, int) or 0


async def start_counter(store: Store) -> None:
    async with store.write() as tx:
        await settings_kv.put(tx, "counter", 0)


async def test_what_a_block_wrote_is_there_for_others(store: Store, other: Store) -> None:
    node = a_node()
    async with store.write() as tx:
        await nodes.insert(tx, node)
    async with other.read() as tx:
        assert await nodes.get(tx, node.id) == node


async def test_an_exception_takes_everything_back(store: Store, other: Store) -> None:
    async def fail() -> None:
        async with store.write() as tx:
            await nodes.insert(tx, a_node())
            await revisions.bump(tx, "nodes")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    async with other.read() as tx:
        assert await nodes.list_(tx) == []
        assert await revisions.read_all(tx) == {}


async def test_twenty_read_modify_writes_lose_nothing(store: Store) -> None:
    await start_counter(store)
    await asyncio.gather(*(count_up(store) for _ in range(20)))
    assert await counted(store) == 20


async def test_twenty_read_modify_writes_through_two_stores_lose_nothing(store: Store, other: Store) -> None:
    await start_counter(store)
    await asyncio.gather(*(count_up(chosen) for chosen in (store, other) for _ in range(10)))
    assert await counted(store) == 20


async def test_twenty_compare_and_sets_lose_nothing(store: Store, other: Store) -> None:
    node = a_node(max_replicas_per_model=1)
    async with store.write() as tx:
        await nodes.insert(tx, node)

    async def raise_by_one(chosen: Store) -> None:
        while True:
            async with chosen.read() as tx:
                seen = await nodes.get(tx, node.id)
            async with chosen.write() as tx:
                more = {"max_replicas_per_model": seen.max_replicas_per_model + 1}
                if await nodes.update(tx, node.id, more, expected=seen.row_version):
                    return

    await asyncio.gather(*(raise_by_one(chosen) for chosen in (store, other) for _ in range(10)))
    async with store.read() as tx:
        after = await nodes.get(tx, node.id)
    assert (after.max_replicas_per_model, after.row_version) == (21, 21)


async def test_a_read_transaction_sees_one_moment(store: Store, other: Store) -> None:
    await start_counter(store)
    async with store.read() as tx:
        before = await settings_kv.find(tx, "counter", int)
        await count_up(other)
        assert await settings_kv.find(tx, "counter", int) == before
    assert await counted(store) == 1


async def test_readers_do_not_wait_for_a_writer(store: Store) -> None:
    await start_counter(store)
    async with store.write() as tx:
        await settings_kv.put(tx, "counter", 7)
        assert await counted(store) == 0
    assert await counted(store) == 7


async def test_a_cancelled_transaction_leaves_nothing_and_holds_nobody_up(store: Store, other: Store) -> None:
    await start_counter(store)
    inside = asyncio.Event()

    async def never_ends() -> None:
        async with store.write() as tx:
            await settings_kv.put(tx, "counter", 99)
            inside.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(never_ends())
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await count_up(other)  # waits at most for the rollback
    await count_up(store)
    assert await counted(store) == 2


async def test_cancelled_at_any_point_the_store_goes_on(store: Store) -> None:
    """A task may be cancelled while it begins, in a statement, while it commits. Each counts once or not at all."""
    await start_counter(store)
    roll = random.Random(7)
    finished = 0
    for _ in range(40):
        tasks = [asyncio.create_task(count_up(store)) for _ in range(4)]
        for _ in range(roll.randrange(40)):
            await asyncio.sleep(0)
        await asyncio.sleep(roll.random() * 0.003)
        unlucky = roll.sample(tasks, 2)
        for task in unlucky:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert not [one for one in outcomes if isinstance(one, Exception)]
        finished += sum(one is None for one in outcomes)
    # A commit that was under way when its task was cancelled may have happened.
    assert finished <= await counted(store) <= 160
    async with asyncio.timeout(30):
        await count_up(store)


async def test_a_timeout_around_a_statement_spoils_the_transaction(store: Store) -> None:
    async def swallow() -> None:
        async with store.write() as tx:
            await settings_kv.put(tx, "before", 1)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await settings_kv.put(tx, "during", 1)

    with pytest.raises(RuntimeError, match="cannot be committed"):
        await swallow()
    assert await counted(store, "before") == 0


async def test_a_failed_statement_spoils_the_transaction_on_both(store: Store) -> None:
    node = a_node()

    async def swallow() -> None:
        async with store.write() as tx:
            await nodes.insert(tx, node)
            with pytest.raises(Conflict):
                await nodes.insert(tx, node)

    with pytest.raises(RuntimeError, match="cannot be committed"):
        await swallow()
    async with store.read() as tx:
        assert await nodes.find(tx, node.id) is None


async def test_a_name_taken_is_a_conflict(store: Store) -> None:
    async with store.write() as tx:
        await nodes.insert(tx, a_node(name="barn"))
    with pytest.raises(Conflict):
        async with store.write() as tx:
            await nodes.insert(tx, a_node(name="barn"))


async def test_a_label_of_no_node_is_a_conflict(store: Store) -> None:
    with pytest.raises(Conflict):
        async with store.write() as tx:
            await node_labels.merge(tx, "nobody", {"a": "b"}, origin="admin")


@pytest.mark.parametrize(
    "known",
    [
        {"name": "bar\0n"},
        {"address": "\0"},
        {"name": "half a pair \ud83d"},
        {"total_vram": 2**63},
        {"total_vram": -(2**63) - 1},
    ],
    ids=["nul in a name", "only nul", "surrogate", "too large", "too small"],
)
async def test_what_cannot_be_stored_is_invalid(store: Store, known: dict[str, object]) -> None:
    with pytest.raises(Invalid):
        async with store.write() as tx:
            await nodes.insert(tx, a_node(**known))


async def test_nul_in_a_question_or_a_list_is_invalid_too(store: Store) -> None:
    async with store.read() as tx:
        with pytest.raises(Invalid):
            await nodes.find_by_name(tx, "a\0b")
        with pytest.raises(Invalid):
            await tx.fetch_one("SELECT :value", {"value": "a\0b"})


async def test_nul_inside_json_is_kept(store: Store) -> None:
    async with store.write() as tx:
        await settings_kv.put(tx, "odd", {"text": "a\0b \u2028"})
    async with store.read() as tx:
        assert await settings_kv.find(tx, "odd", dict) == {"text": "a\0b \u2028"}


async def test_any_other_text_comes_back_as_it_was(store: Store) -> None:
    odd = "%s ? $1 :name '\" \\ \x01 ümläut 🐎 \u202e"
    node = a_node(name=odd, status_reason=odd * 1000)
    async with store.write() as tx:
        await nodes.insert(tx, node)
    async with store.read() as tx:
        assert await nodes.find_by_name(tx, odd) == node


async def test_a_read_transaction_cannot_write(store: Store) -> None:
    async with store.read() as tx:
        with pytest.raises(RuntimeError, match="only reads"):
            await tx.execute("DELETE FROM nodes")
        with pytest.raises(RuntimeError, match="only reads"):
            await revisions.bump(tx, "nodes")
    with pytest.raises(Unavailable):
        async with store.read() as tx:
            await tx.fetch_all("DELETE FROM nodes")


async def test_a_transaction_ends_with_its_block(store: Store) -> None:
    async with store.read() as tx:
        pass
    with pytest.raises(RuntimeError, match="has ended"):
        await tx.now()


async def test_database_time_moves_and_is_aware(store: Store, other: Store) -> None:
    async with store.read() as tx:
        first = await tx.now()
    async with other.write() as tx:
        second = await tx.now()
    assert first.utcoffset() is not None
    assert first <= second


async def test_a_mistake_in_sql_is_not_called_an_outage(store: Store) -> None:
    with pytest.raises(Exception, match="syntax") as caught:
        async with store.read() as tx:
            await tx.fetch_all("SELEKT 1")
    assert not isinstance(caught.value, CorralError)


async def test_statements_with_in_lists_and_many_values(store: Store) -> None:
    rows = [a_node(name=f"n{number:03}") for number in range(50)]
    async with store.write() as tx:
        for node in rows:
            await nodes.insert(tx, node)
    from sqlalchemy import select

    async with store.read() as tx:
        wanted = select(nodes.table.c.name).where(nodes.table.c.name.in_(["n003", "n007", "none"]))
        assert sorted(await tx.fetch_all(wanted)) == [("n003",), ("n007",)]
        assert await tx.fetch_all(select(nodes.table.c.name).where(nodes.table.c.name.in_([]))) == []
        none = await node_labels.list_for(tx, [node.id for node in rows] * 500)  # 25,000: far beyond bind limits
        assert none == {}


async def test_nobody_waits_for_a_turn_without_end(url: str) -> None:
    short = StoreOptions(turn_wait_s=1.0, readers=1, pool_size=1)  # the first turn includes connecting
    async with open_store(url, options=short) as store, store.write() as tx:
        await revisions.bump(tx, "nodes")
        with pytest.raises(Unavailable):
            async with store.write():
                pass
    async with open_store(url, options=short) as store, store.read() as tx:
        await tx.now()
        with pytest.raises(Unavailable):
            await store.ping()


async def test_waiting_for_a_turn_can_be_cancelled(url: str) -> None:
    async with open_store(url, options=StoreOptions(pool_size=1)) as store:
        async with store.write() as tx:
            waiting = asyncio.create_task(count_up(store))
            await revisions.bump(tx, "nodes")
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        await count_up(store)
        assert await counted(store) == 1


async def test_what_kind_it_is(store: Store, kind: str) -> None:
    assert store.kind == kind
    await store.ping()
    async with store.read() as tx:
        assert isinstance(tx, Transaction)
        assert tx.kind == kind
