"""`dump_store` and `load_store`: one snapshot of a store that is in use, and what a dump leaves out."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from corral.kit.errors import Conflict, Invalid, NotFound
from corral.store import Store, open_store
from corral.store.backup import BackupMark, check_schema, dump_store, find_mark, load_store, require_empty
from corral.store.engine.migrate import VERSION_TABLE, head_of
from corral.store.tables import all_tables, cluster_secrets, controllers, models, nodes
from tests.integration.store.rows import NOON, a_model, a_node
from tests.integration.store.test_store_copying import fill
from tests.support.postgres import Postgres

MARK = BackupMark(id="backup-1", created_at=NOON)
LEFT_OUT = {"controllers", "join_tokens", "web_sessions"}
LOGIN = "https://anna:s3cret@models.example/x.gguf"


@pytest.fixture(params=["sqlite", "postgresql"])
def target_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/target.db"
        return
    server: Postgres = request.getfixturevalue("postgres")
    url = server.new_database()
    yield url
    server.drop(url)


@pytest.fixture
async def filled(url: str) -> AsyncIterator[Store]:
    async with open_store(url) as store:
        await fill(store)
        async with store.write() as tx:
            await models.put(tx, a_model("guarded", definition={"name": "guarded", "download_files": [{"uri": LOGIN}]}))
        yield store


async def contents(url: str) -> dict[str, set[Any]]:
    async with open_store(url) as store, store.read() as tx:
        return {table.name: set(await tx.fetch_all(f"SELECT * FROM {table.name}")) for table in all_tables()}


async def test_everything_but_presence_and_tokens_comes_back(
    url: str, filled: Store, target_url: str, tmp_path: Path
) -> None:
    dump = tmp_path / "dump.db"
    copied = await dump_store(url, dump, MARK, with_secrets=True)
    assert {each.table for each in copied} == {table.name for table in all_tables()} - LEFT_OUT
    await load_store(dump, target_url)
    before, after = await contents(url), await contents(target_url)
    for table in before:
        if table in LEFT_OUT:
            assert before[table]
            assert not after[table]
        elif table != "settings_kv":
            assert after[table] == before[table], table
    assert await find_mark(target_url) == MARK
    assert await find_mark(url) is None


async def test_a_dump_without_secrets_has_no_keys_and_no_logins(url: str, filled: Store, tmp_path: Path) -> None:
    dump = tmp_path / "dump.db"
    await dump_store(url, dump, MARK, with_secrets=False)
    whole = dump.read_bytes()
    assert b"s3cret" not in whole
    assert b"https://***@models.example/x.gguf" in whole
    with closing(sqlite3.connect(dump)) as found:
        assert found.execute(f"SELECT count(*) FROM {cluster_secrets.table.name}").fetchone() == (0,)
        assert found.execute("SELECT count(*) FROM nodes").fetchone()[0] > 1


async def test_a_dump_is_one_file(url: str, filled: Store, tmp_path: Path) -> None:
    folder = tmp_path / "dumps"
    folder.mkdir()
    await dump_store(url, folder / "dump.db", MARK, with_secrets=True)
    assert [each.name for each in folder.iterdir()] == ["dump.db"]
    assert (folder / "dump.db").stat().st_mode & 0o777 == 0o600
    with closing(sqlite3.connect(folder / "dump.db")) as found:
        assert found.execute("PRAGMA journal_mode").fetchone() == ("delete",)
        assert found.execute("PRAGMA integrity_check").fetchone() == ("ok",)


async def test_the_dump_is_one_moment_of_a_store_that_is_written(url: str, filled: Store, tmp_path: Path) -> None:
    """A model and a node are always written together: the dump must have both or neither."""
    stop = asyncio.Event()
    written = 0

    async def write() -> None:
        nonlocal written
        while not stop.is_set():
            async with filled.write() as tx:
                await models.put(tx, a_model(f"pair-{written}"))
                await nodes.insert(tx, a_node(name=f"pair-{written}"))
            written += 1

    def on_progress(_: object) -> None:
        progress.set()

    progress = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(write())
        for number in range(3):
            await dump_store(url, tmp_path / f"{number}.db", MARK, with_secrets=True, on_progress=on_progress)
        stop.set()
    assert written > 3
    assert progress.is_set()
    for number in range(3):
        with closing(sqlite3.connect(tmp_path / f"{number}.db")) as found:
            pairs = [
                {name for (name,) in found.execute(f"SELECT {column} FROM {table}") if name.startswith("pair-")}
                for table, column in (("models", "id"), ("nodes", "name"))
            ]
        assert pairs[0] == pairs[1]


async def test_a_store_with_rows_is_refused_and_unchanged(
    url: str, filled: Store, target_url: str, tmp_path: Path
) -> None:
    await dump_store(url, tmp_path / "dump.db", MARK, with_secrets=True)
    await require_empty(target_url)  # absent, or without tables
    async with open_store(target_url) as target:
        await require_empty(target_url)  # tables without rows
        async with target.write() as tx:
            await controllers.seen(tx, "c", host="h", version="1")
        with pytest.raises(Conflict, match="controllers has 1 row"):
            await require_empty(target_url)
        with pytest.raises(Conflict, match="not empty"):
            await load_store(tmp_path / "dump.db", target_url)
    after = await contents(target_url)
    assert {table for table, rows in after.items() if rows} == {"controllers"}


async def test_looking_creates_nothing(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/none.db"
    await require_empty(url)
    assert await find_mark(url) is None
    with pytest.raises(NotFound, match="there is no database"):
        await dump_store(url, tmp_path / "dump.db", MARK, with_secrets=True)
    assert os.listdir(tmp_path) == []


async def test_a_failed_dump_leaves_the_earlier_one(url: str, filled: Store, tmp_path: Path) -> None:
    dump = tmp_path / "dump.db"
    dump.write_text("earlier")

    def on_progress(_: object) -> None:
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        await dump_store(url, dump, MARK, with_secrets=True, on_progress=on_progress)
    assert dump.read_text() == "earlier"
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


async def test_a_source_of_another_schema_is_not_migrated(url: str, filled: Store, tmp_path: Path) -> None:
    async with filled.write() as tx:
        await tx.execute(f"UPDATE {VERSION_TABLE} SET version_num = '0001'")
    with pytest.raises(Invalid, match="schema 0001"):
        await dump_store(url, tmp_path / "dump.db", MARK, with_secrets=True)
    async with filled.read() as tx:
        assert (await tx.fetch_one(f"SELECT version_num FROM {VERSION_TABLE}")) == ("0001",)


def test_schemas() -> None:
    check_schema(head_of())
    check_schema("0001")
    with pytest.raises(Invalid, match="upgrade corral first"):
        check_schema("9999")
