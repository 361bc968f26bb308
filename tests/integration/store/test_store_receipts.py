"""Receipts: stored once, found by what people ask for, forgotten in time."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from msgspec import structs
from sqlalchemy import Insert, bindparam

from corral.contract.receipts import is_failure
from corral.store import Store
from corral.store.tables import api_keys, nodes, receipts
from corral.store.tables.api_keys import ApiKey
from tests.integration.store.rows import NOON, a_node, a_receipt, row_of


async def ids(store: Store, limit: int = 10, **wanted: Any) -> list[str]:
    async with store.read() as tx:
        return [each.receipt.id for each in await receipts.list_(tx, limit=limit, **wanted)]


async def test_a_receipt_comes_back_whole_and_with_names(store: Store) -> None:
    node = a_node(name="barn")
    told = a_receipt(node_id=node.id, key_id="k1", replica=2, digest="sha256:a", queue_us=7, ending="client_left")
    told = structs.replace(told, error="upstream_failed", error_text="it answered 502")
    async with store.write() as tx:
        await nodes.insert(tx, node)
        await api_keys.insert(tx, ApiKey(id="k1", name="notebook", secret_hash="h", role="inference", created_at=NOON))
        await receipts.insert(tx, [row_of(told)])
        orphan = a_receipt(id="orphan", at=NOON - timedelta(seconds=1))
        await receipts.insert(tx, [row_of(told), row_of(orphan)])  # a batch told twice
    async with store.read() as tx:
        first, second = await receipts.list_(tx, limit=10)
    assert (first.receipt, first.node, first.key) == (told, "barn", "notebook")
    assert (second.receipt.id, second.node, second.key) == ("orphan", "", "")


async def test_they_are_found_by_model_key_node_status_and_time(store: Store) -> None:
    node = a_node(name="barn")
    rows = [
        a_receipt(id="a", at=NOON, model="smol", node_id=node.id),
        a_receipt(id="b", at=NOON + timedelta(seconds=1), model="alias", served_by="smol", status=503),
        a_receipt(id="c", at=NOON + timedelta(seconds=2), model="other", key_id="k2"),
        a_receipt(id="d", at=NOON + timedelta(seconds=2), model="other"),
    ]
    async with store.write() as tx:
        await nodes.insert(tx, node)
        await api_keys.insert(tx, ApiKey(id="k2", name="guests", secret_hash="h", role="inference", created_at=NOON))
        await receipts.insert(tx, [row_of(row) for row in rows])
    assert await ids(store) == ["c", "d", "b", "a"]
    assert await ids(store, limit=2) == ["c", "d"]
    assert await ids(store, before=NOON + timedelta(seconds=2), before_id="c") == ["d", "b", "a"]
    assert await ids(store, model="smol") == ["b", "a"]
    assert await ids(store, node="barn") == await ids(store, node=node.id) == ["a"]
    assert await ids(store, key="guests") == await ids(store, key="k2") == ["c"]
    assert await ids(store, failed=True) == await ids(store, status=500, status_end=600) == ["b"]
    assert await ids(store, status=200, status_end=201) == ["c", "d", "a"]
    assert await ids(store, since=NOON + timedelta(seconds=1), model="other") == ["c", "d"]


async def test_failures_in_sql_are_those_of_the_contract(store: Store) -> None:
    """A client that left has not been failed by the fleet."""
    cases = {"left": (499, "client_left"), "broke": (200, "upstream_broke"), "refused": (429, ""), "fine": (200, "")}
    rows = [a_receipt(id=id, at=NOON, status=status, ending=ending) for id, (status, ending) in cases.items()]
    async with store.write() as tx:
        await receipts.insert(tx, [row_of(row) for row in rows])
    expected = sorted(id for id, (status, ending) in cases.items() if is_failure(status, ending))
    assert sorted(await ids(store, failed=True)) == expected == ["broke", "refused"]


async def test_a_controller_that_knows_no_errors_writes_beside_one_that_does(store: Store) -> None:
    """Controllers are replaced one by one, and the first one migrates."""
    row = structs.asdict(a_receipt(id="a"))
    del row["error"], row["error_text"]
    insert = Insert(receipts.table).values({name: bindparam(name) for name in row})
    async with store.write() as tx:
        await tx.execute(insert, row)
    async with store.read() as tx:
        [found] = await receipts.list_(tx, limit=10)
    assert found.receipt == a_receipt(id="a")


async def test_old_ones_are_forgotten(store: Store) -> None:
    async with store.write() as tx:
        old, new = a_receipt(id="old"), a_receipt(id="new", at=NOON + timedelta(days=1))
        await receipts.insert(tx, [row_of(old), row_of(new)])
        assert await receipts.prune(tx, NOON + timedelta(hours=1)) == 1
    assert await ids(store) == ["new"]
