"""The database is locked, gone, silent or slow for a while: a clear error now, and later calls just work."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from corral.kit.errors import Conflict, OutcomeUnknown, Unavailable
from corral.store import Store, StoreOptions, open_store
from corral.store.tables import nodes, revisions, settings_kv
from tests.integration.store import processes
from tests.integration.store.rows import a_node
from tests.support.postgres import Postgres

# Each test is impatient in the one respect it is about: a busy machine needs its time for everything else.
PATIENT = StoreOptions(
    turn_wait_s=30.0,
    busy_timeout_s=30.0,
    connect_timeout_s=30.0,
    statement_timeout_s=30.0,
    lock_timeout_s=30.0,
    idle_in_transaction_s=30.0,
)


async def count_up(store: Store) -> None:
    async with store.write() as tx:
        value = await settings_kv.find(tx, "counter", int)
        await settings_kv.put(tx, "counter", (value or 0) + 1)


async def counted(store: Store) -> int:
    async with store.read() as tx:
        return await settings_kv.find(tx, "counter", int) or 0


@pytest.fixture
def outage(postgres: Postgres) -> Iterator[Postgres]:
    """The server, which is up again afterwards whatever the test did."""
    yield postgres
    postgres.stop()
    postgres.start()


@contextmanager
def silenced(server: Postgres) -> Iterator[None]:
    """The server's processes do not run, but their sockets stay open."""
    main = psutil.Process(server.pid)
    main.send_signal(signal.SIGSTOP)  # first: it starts no more children
    family = [main, *main.children(recursive=True)]
    try:
        tell_all(family, signal.SIGSTOP)
        yield
    finally:
        tell_all(family, signal.SIGCONT)


def tell_all(family: list[psutil.Process], number: signal.Signals) -> None:
    for process in family:
        with suppress(psutil.NoSuchProcess):  # one that was just ending
            process.send_signal(number)


async def test_postgresql_gone_and_back(postgres_url: str, outage: Postgres) -> None:
    async with open_store(postgres_url, options=PATIENT) as store:
        await count_up(store)
        await asyncio.gather(*(count_up(store) for _ in range(4)))  # several connections, all to be found dead
        outage.stop()
        for _ in range(3):
            with pytest.raises(Unavailable):
                await count_up(store)
            with pytest.raises(Unavailable):
                await store.ping()
        outage.start()
        await store.ping()
        await asyncio.gather(*(count_up(store) for _ in range(5)))
        assert await counted(store) == 10


async def test_postgresql_gone_amid_a_transaction(postgres_url: str, outage: Postgres) -> None:
    async with open_store(postgres_url, options=PATIENT) as store:
        await count_up(store)

        async def overtaken() -> None:
            async with store.write() as tx:
                await settings_kv.put(tx, "counter", 99)
                outage.stop()
                await settings_kv.put(tx, "counter", 100)

        with pytest.raises(Unavailable):
            await overtaken()
        outage.start()
        assert await counted(store) == 1


async def test_postgresql_gone_while_committing(postgres_url: str, outage: Postgres) -> None:
    async with open_store(postgres_url, options=PATIENT) as store:
        await count_up(store)

        async def overtaken() -> None:
            async with store.write() as tx:
                await settings_kv.put(tx, "counter", 99)
                outage.stop()

        with pytest.raises(OutcomeUnknown):  # it was not, but nobody here can know
            await overtaken()
        outage.start()
        assert await counted(store) == 1


async def test_postgresql_gone_at_the_end_of_a_read(postgres_url: str, outage: Postgres) -> None:
    async with open_store(postgres_url, options=PATIENT) as store:
        async with store.read() as tx:
            assert await settings_kv.find(tx, "counter", int) is None
            outage.stop()  # everything was read: nothing is left to fail
        with pytest.raises(Unavailable):
            await store.ping()


async def test_postgresql_gone_at_the_start(postgres_url: str, outage: Postgres) -> None:
    outage.stop()
    with pytest.raises(Unavailable, match="cannot be reached"):
        async with open_store(postgres_url, options=PATIENT):
            pass
    outage.start()
    async with open_store(postgres_url, options=PATIENT) as store:
        await store.ping()


async def test_postgresql_silent(postgres_url: str, postgres: Postgres) -> None:
    impatient = replace(PATIENT, connect_timeout_s=2.0, statement_timeout_s=1.0)
    async with open_store(postgres_url, options=impatient) as store:
        await count_up(store)
        with silenced(postgres):
            for _ in range(2):
                with pytest.raises(Unavailable):
                    await count_up(store)
        await count_up(store)
        assert await counted(store) == 2


async def test_postgresql_ends_one_connection(postgres_url: str, postgres: Postgres) -> None:
    async with open_store(postgres_url, options=PATIENT) as store:
        await count_up(store)
        postgres.sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'corral'")
        await count_up(store)
        assert await counted(store) == 2


@pytest.mark.parametrize("turns", range(4))
async def test_a_server_that_has_just_taken_its_leave(postgres_url: str, postgres: Postgres, turns: int) -> None:
    """Its last word is read before the end of the line is: who asks between the two finds it gone all the same."""
    async with open_store(postgres_url, options=PATIENT) as store:
        await count_up(store)

        async def overtaken() -> None:
            async with store.write() as tx:
                await settings_kv.put(tx, "counter", 99)
                postgres.sql(
                    "SELECT pg_terminate_backend(pid, 30000) FROM pg_stat_activity WHERE application_name = 'corral'"
                )
                for _ in range(turns):
                    await asyncio.sleep(0)

        with pytest.raises(OutcomeUnknown):
            await overtaken()
        await count_up(store)
        assert await counted(store) == 2


async def test_a_slow_statement_is_stopped(postgres_url: str) -> None:
    async with open_store(postgres_url, options=replace(PATIENT, statement_timeout_s=1.0)) as store:
        with pytest.raises(Unavailable, match="statement timeout"):
            async with store.read() as tx:
                await tx.fetch_one("SELECT pg_sleep(30)")
        await store.ping()


async def test_a_row_held_too_long_is_not_waited_for(postgres_url: str) -> None:
    impatient = replace(PATIENT, lock_timeout_s=1.0)
    async with open_store(postgres_url, options=PATIENT) as one, open_store(postgres_url, options=impatient) as two:
        await count_up(one)
        async with one.write() as tx:
            await settings_kv.put(tx, "counter", 5)
            with pytest.raises(Unavailable, match="lock timeout"):
                await count_up(two)
        await count_up(two)
        assert await counted(one) == 6


async def test_who_stops_amid_a_transaction_is_thrown_out(postgres_url: str) -> None:
    async with (
        open_store(postgres_url, options=replace(PATIENT, idle_in_transaction_s=2.0)) as stopped,
        open_store(postgres_url, options=PATIENT) as other,
    ):
        await count_up(other)

        async def stopped_amid() -> None:
            async with stopped.write() as tx:
                await settings_kv.put(tx, "counter", 99)
                await count_up(other)  # waits for the row until the server ends the one who holds it

        with pytest.raises((Unavailable, OutcomeUnknown)):
            await stopped_amid()
        assert await counted(other) == 2
        await count_up(stopped)


async def test_two_who_lock_each_other_out_end_in_a_conflict(postgres_url: str) -> None:
    async with open_store(postgres_url) as store:
        first, second = a_node(), a_node()
        async with store.write() as tx:
            await nodes.insert(tx, first)
            await nodes.insert(tx, second)
        meet = asyncio.Barrier(2)

        async def lock_both(one: str, two: str) -> None:
            async with store.write() as tx:
                await nodes.get(tx, one)
                await meet.wait()
                await nodes.get(tx, two)

        outcomes = await asyncio.gather(
            lock_both(first.id, second.id), lock_both(second.id, first.id), return_exceptions=True
        )
        assert [type(outcome) for outcome in outcomes if outcome] == [Conflict]


async def test_sqlite_locked_by_another_process_for_longer_than_we_wait(sqlite_url: str, tmp_path: Path) -> None:
    async with open_store(sqlite_url, options=replace(PATIENT, busy_timeout_s=0.5)) as store:
        await count_up(store)
        with processes.locked(tmp_path / "corral.db"):
            for _ in range(2):
                with pytest.raises(Unavailable, match="locked by another process"):
                    await count_up(store)
            assert await counted(store) == 1, "readers are not held up"
            await store.ping()
        await count_up(store)
        assert await counted(store) == 2


async def test_however_many_wait_for_a_lock_all_are_told_in_time(sqlite_url: str, tmp_path: Path) -> None:
    options = replace(PATIENT, busy_timeout_s=1.0)
    async with open_store(sqlite_url, options=options) as store:
        with processes.locked(tmp_path / "corral.db"):
            writers = [asyncio.create_task(count_up(store)) for _ in range(20)]
            # One after the other it would be twenty times as long.
            done, waiting = await asyncio.wait(writers, timeout=5 * options.busy_timeout_s)
            assert not waiting, f"{len(waiting)} of 20 still wait"
            assert {type(writer.exception()) for writer in done} == {Unavailable}
        await count_up(store)
        assert await counted(store) == 1


async def test_however_many_wait_for_a_row_all_are_told_in_time(postgres_url: str) -> None:
    options = replace(PATIENT, pool_size=4, lock_timeout_s=1.5)
    async with open_store(postgres_url, options=PATIENT) as one, open_store(postgres_url, options=options) as two:
        await count_up(one)
        await asyncio.gather(*(count_up(two) for _ in range(4)))  # the connections are there
        async with one.write() as tx:
            await settings_kv.put(tx, "counter", 5)
            writers = [asyncio.create_task(count_up(two)) for _ in range(20)]
            # Four at a time, one four after the other, it would be five times as long.
            done, waiting = await asyncio.wait(writers, timeout=4 * options.lock_timeout_s)
            assert not waiting, f"{len(waiting)} of 20 still wait"
            assert {type(writer.exception()) for writer in done} == {Unavailable}
        await asyncio.gather(*(count_up(two) for _ in range(4)))  # patient again
        assert await counted(one) == 9


async def test_sqlite_waits_for_a_short_lock(sqlite_url: str, tmp_path: Path) -> None:
    async with open_store(sqlite_url, options=PATIENT) as store:
        with processes.locked(tmp_path / "corral.db"):
            counting = asyncio.create_task(count_up(store))
            done, _ = await asyncio.wait({counting}, timeout=0.1)
            assert not done
        await counting
        assert await counted(store) == 1


async def test_a_writer_cancelled_while_it_waits_for_the_lock(sqlite_url: str, tmp_path: Path) -> None:
    """It leaves at once, though its thread is still waiting inside SQLite; the next one stands in line behind that."""
    async with open_store(sqlite_url, options=PATIENT) as store:
        with processes.locked(tmp_path / "corral.db"):
            counting = asyncio.create_task(count_up(store))
            await asyncio.wait({counting}, timeout=0.1)
            counting.cancel()
            await asyncio.wait({counting}, timeout=PATIENT.busy_timeout_s / 3)
            assert counting.cancelled()
        await count_up(store)
        assert await counted(store) == 1


async def test_a_disk_without_room(sqlite_url: str, tmp_path: Path) -> None:
    async with open_store(sqlite_url) as store:
        await count_up(store)

        async def too_much() -> None:
            async with store.write() as tx:
                await tx.fetch_one("PRAGMA max_page_count = 1")  # the same error as a full disk gives
                await settings_kv.put(tx, "large", "x" * 10_000_000)

        with pytest.raises(Unavailable, match="full"):
            await too_much()
        await count_up(store)  # on a fresh connection
        assert await counted(store) == 2


async def test_a_process_killed_amid_a_transaction_leaves_nothing_behind(url: str) -> None:
    async with open_store(url) as store:
        await count_up(store)
        process = processes.start("stay_inside", url)
        try:
            assert process.stdout is not None
            assert await asyncio.to_thread(process.stdout.readline) == "inside\n"
        finally:
            processes.kill(process)
        await count_up(store)
        assert await counted(store) == 2


async def test_two_processes_and_this_one_lose_nothing(url: str) -> None:
    async with open_store(url, options=PATIENT) as store:
        await count_up(store)
        others = [processes.start("count", url, "30") for _ in range(2)]
        try:
            for _ in range(29):
                await count_up(store)
        finally:
            for process in others:
                await asyncio.to_thread(processes.finish, process)
        assert await counted(store) == 90


async def test_closing_waits_for_nobody_for_long(url: str) -> None:
    """A task that is still inside when the store closes finds it closed."""
    inside, go_on = asyncio.Event(), asyncio.Event()

    async def late(store: Store) -> None:
        async with store.write() as tx:
            await revisions.bump(tx, "nodes")
            inside.set()
            await go_on.wait()
            await revisions.bump(tx, "nodes")

    async with open_store(url, options=replace(PATIENT, turn_wait_s=2.0)) as store:
        task = asyncio.create_task(late(store))
        await inside.wait()
    go_on.set()
    with pytest.raises((Unavailable, RuntimeError, OutcomeUnknown)):
        await task
