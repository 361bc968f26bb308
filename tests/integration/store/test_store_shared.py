"""What controllers share: leases, secrets, presence, counters, small settings; and claims in general."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta

import msgspec
import pytest

from corral.kit.errors import Conflict
from corral.store import Store
from corral.store.engine import claims, leases
from corral.store.engine.leases import Lease
from corral.store.tables import cluster_secrets, controllers, nodes, revisions, settings_kv
from tests.integration.store.rows import a_node

LONG_S = 60.0


async def claim(store: Store, holder: str, ttl_s: float = LONG_S, name: str = "health") -> Lease | None:
    async with store.write() as tx:
        return await leases.claim_lease(tx, name, holder, ttl_s)


async def held(store: Store, holder: str, ttl_s: float = LONG_S) -> Lease:
    """Ask until it is ours, as a controller's loop does."""
    deadline = time.monotonic() + 30
    while (lease := await claim(store, holder, ttl_s)) is None:
        assert time.monotonic() < deadline, "the lease never came free"
        await asyncio.sleep(0.01)
    return lease


async def test_one_holder_at_a_time_and_renewals_keep_the_epoch(store: Store, other: Store) -> None:
    first = await held(store, "one")
    assert (first.name, first.holder, first.epoch) == ("health", "one", 1)
    assert await claim(other, "two") is None
    renewed = await held(store, "one")
    assert renewed.epoch == 1
    assert renewed.expires_at > first.expires_at
    async with store.read() as tx:
        assert await leases.find(tx, "health") == renewed
        assert await leases.find(tx, "nothing") is None
        assert await leases.list_(tx) == [renewed]


async def test_leases_of_other_names_are_free(store: Store) -> None:
    await held(store, "one")
    other_name = await claim(store, "two", name="ingress-check")
    assert other_name is not None
    assert other_name.epoch == 1


async def test_an_expired_lease_is_taken_over_with_a_new_epoch(store: Store, other: Store) -> None:
    first = await held(store, "one", ttl_s=0.1)
    second = await held(other, "two")
    assert second.epoch == first.epoch + 1
    async with store.write() as tx:
        assert not await leases.still_holds(tx, first)
        assert await leases.still_holds(tx, second)
    async with store.read() as tx:
        assert not await leases.still_holds(tx, first)
        assert await leases.still_holds(tx, second)
    assert await claim(store, "one") is None
    with pytest.raises(Conflict, match="health"):
        async with store.write() as tx:
            await leases.require(tx, first)


async def test_a_lease_from_tomorrow_does_not_bind_today(store: Store, other: Store) -> None:
    """The clock was ahead, and has been set right since."""
    first = await claim(store, "one", 60)
    assert first is not None
    async with store.write() as tx:
        await tx.execute("UPDATE leases SET expires_at = expires_at + 86400000000")
    second = await claim(other, "two", 60)
    assert second is not None
    assert second.epoch == first.epoch + 1
    assert await claim(store, "one", 60) is None


async def test_a_holder_that_slept_cannot_write(store: Store, other: Store) -> None:
    node = a_node()
    async with store.write() as tx:
        await nodes.insert(tx, node)
    slept = await held(store, "one", ttl_s=0.05)
    awake = await held(other, "two")

    async def mark(chosen: Store, lease: Lease, status: str) -> None:
        async with chosen.write() as tx:
            await leases.require(tx, lease)
            seen = await nodes.get(tx, node.id)
            await nodes.update(tx, node.id, {"status": status}, expected=seen.row_version)

    with pytest.raises(Conflict):
        await mark(store, slept, "offline")
    await mark(other, awake, "draining")
    async with store.read() as tx:
        assert (await nodes.get(tx, node.id)).status == "draining"


async def test_an_expired_lease_nobody_took_is_still_its_holders(store: Store) -> None:
    lease = await held(store, "one", ttl_s=0.0)
    async with store.write() as tx:
        await leases.require(tx, lease)
    assert (await held(store, "one")).epoch == 1


async def test_a_lease_cannot_change_hands_under_a_write(store: Store, other: Store) -> None:
    """Expired, required, and only then claimed by another: the claim waits until the write is done."""
    lease = await held(store, "one", ttl_s=0.0)
    async with store.write() as tx:
        await leases.require(tx, lease)
        taking = asyncio.create_task(claim(other, "two"))
        done, _ = await asyncio.wait({taking}, timeout=0.05)
        assert not done
        await settings_kv.put(tx, "written", True)
    taken = await taking
    assert taken is not None
    assert taken.epoch == 2


async def test_a_released_lease_is_free_at_once(store: Store, other: Store) -> None:
    lease = await held(store, "one")
    async with store.write() as tx:
        assert await leases.release(tx, lease)
        assert not await leases.release(tx, lease)
    taken = await claim(other, "two")
    assert taken is not None
    assert taken.epoch == 2
    async with store.write() as tx:
        assert not await leases.release(tx, lease), "what is no longer ours cannot be given back"


async def test_twenty_who_want_a_lease_make_one_holder(store: Store, other: Store) -> None:
    got = await asyncio.gather(*(claim((store, other)[n % 2], f"holder-{n}") for n in range(20)))
    assert sum(lease is not None for lease in got) == 1


async def test_racing_controllers_agree_on_one_secret(store: Store, other: Store) -> None:
    made = iter(range(100))

    async def ask(chosen: Store) -> str:
        async with chosen.write() as tx:
            return await cluster_secrets.get_or_create(tx, "signing", lambda: f"secret-{next(made)}")

    answers = await asyncio.gather(*(ask(chosen) for chosen in (store, other) for _ in range(10)))
    assert len(set(answers)) == 1
    async with store.read() as tx:
        assert await cluster_secrets.find(tx, "signing") == answers[0]
        assert await cluster_secrets.find(tx, "nothing") is None


async def test_a_secret_that_is_there_is_not_made_again(store: Store) -> None:
    def fails() -> str:
        raise AssertionError("made again")

    async with store.write() as tx:
        assert await cluster_secrets.get_or_create(tx, "signing", lambda: "first") == "first"
    async with store.write() as tx:
        assert await cluster_secrets.get_or_create(tx, "signing", fails) == "first"


async def test_controllers_come_are_seen_and_go(store: Store) -> None:
    async with store.write() as tx:
        await controllers.seen(tx, "one", host="a", version="1")
        await controllers.seen(tx, "two", host="b", version="1")
        first = {row.id: row for row in await controllers.list_(tx)}
    async with store.write() as tx:
        await controllers.seen(tx, "one", host="a2", version="2")
        again = {row.id: row for row in await controllers.list_(tx)}
        assert again["two"] == first["two"]
        assert (again["one"].host, again["one"].version) == ("a2", "2")
        assert again["one"].started_at == first["one"].started_at
        assert again["one"].seen_at > first["one"].seen_at
        assert [row.id for row in await controllers.list_live(tx, within_s=60)] == ["one", "two"]
        assert await controllers.list_live(tx, within_s=-1) == []
        assert await controllers.prune(tx, first["two"].seen_at + timedelta(microseconds=1)) == 1
        assert [row.id for row in await controllers.list_(tx)] == ["one"]
        assert await controllers.delete(tx, "one")
        assert not await controllers.delete(tx, "one")


async def test_counters_rise_once_per_change(store: Store, other: Store) -> None:
    async def change(chosen: Store) -> None:
        async with chosen.write() as tx:
            await revisions.bump(tx, "nodes")

    await asyncio.gather(*(change(chosen) for chosen in (store, other) for _ in range(10)))
    async with store.write() as tx:
        assert await revisions.bump(tx, "keys") == 1
        assert await revisions.bump(tx, "nodes") == 21
        assert await revisions.read_all(tx) == {"keys": 1, "nodes": 21}


class Guard(msgspec.Struct, frozen=True):
    held: int
    names: tuple[str, ...] = ()


async def test_small_settings_of_any_type(store: Store) -> None:
    async with store.write() as tx:
        assert await settings_kv.find(tx, "guard", Guard) is None
        await settings_kv.put(tx, "guard", Guard(2, ("a", "b")))
        await settings_kv.put(tx, "guard", Guard(3, ("a",)))
        await settings_kv.put(tx, "flag", False)
    async with store.write() as tx:
        assert await settings_kv.find(tx, "guard", Guard) == Guard(3, ("a",))
        assert await settings_kv.find(tx, "flag", bool) is False
        with pytest.raises(msgspec.ValidationError):
            await settings_kv.find(tx, "flag", Guard)
        with pytest.raises(ValueError, match="None"):
            await settings_kv.put(tx, "flag", None)
        assert await settings_kv.delete(tx, "flag")
        assert not await settings_kv.delete(tx, "flag")


async def test_claiming_a_row_that_fits(store: Store) -> None:
    node = a_node(available_vram=10)
    async with store.write() as tx:
        await nodes.insert(tx, node)
        await nodes.insert(tx, a_node())
    table = nodes.table

    async def reserve(need: int) -> bool:
        async with store.write() as tx:
            fits = (table.c.id == node.id) & (table.c.available_vram - table.c.reserved_vram >= need)
            return await claims.claim_row(tx, table, fits, {"reserved_vram": table.c.reserved_vram + need})

    assert sorted(await asyncio.gather(*(reserve(4) for _ in range(5)))) == [False, False, False, True, True]
    with pytest.raises(RuntimeError, match="touched 2 rows"):
        async with store.write() as tx:
            await claims.claim_row(tx, table, table.c.status == "healthy", {"status": "offline"})


async def test_claiming_by_insert(store: Store, other: Store) -> None:
    async def first(chosen: Store, who: str) -> bool:
        async with chosen.write() as tx:
            now = await tx.now()
            row = {"name": "job", "holder": who, "epoch": 1, "expires_at": now}
            return await claims.claim_insert(tx, leases.table, row)

    won = await asyncio.gather(*(first((store, other)[n % 2], f"h{n}") for n in range(10)))
    assert sum(won) == 1
