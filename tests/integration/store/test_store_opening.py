"""Opening: what a store insists on, and what it refuses with one line."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from corral.kit.errors import Invalid, Unavailable
from corral.store import Store, StoreOptions, open_store
from tests.support.postgres import Postgres


async def asked(store: Store, sql: str) -> object:
    async with store.write() as tx:
        row = await tx.fetch_one(sql)
    assert row is not None
    return row[0]


async def test_sqlite_is_set_up_as_we_rely_on(sqlite_url: str) -> None:
    async with open_store(sqlite_url) as store:
        assert await asked(store, "PRAGMA journal_mode") == "wal"
        assert await asked(store, "PRAGMA synchronous") == 2  # FULL
        assert await asked(store, "PRAGMA foreign_keys") == 1
        assert await asked(store, "PRAGMA busy_timeout") == 5000
        async with store.read() as tx:
            assert await tx.fetch_one("PRAGMA query_only") == (1,)


async def test_postgresql_is_set_up_as_we_rely_on(postgres_url: str) -> None:
    options = StoreOptions(statement_timeout_s=7, lock_timeout_s=3, idle_in_transaction_s=20)
    async with open_store(postgres_url, options=options) as store:
        assert await asked(store, "SHOW statement_timeout") == "7s"
        assert await asked(store, "SHOW lock_timeout") == "3s"
        assert await asked(store, "SHOW idle_in_transaction_session_timeout") == "20s"
        assert await asked(store, "SHOW transaction_isolation") == "read committed"
        async with store.read() as tx:
            assert await tx.fetch_one("SHOW transaction_isolation") == ("repeatable read",)
            assert await tx.fetch_one("SHOW transaction_read_only") == ("on",)


async def test_a_database_file_is_the_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder with %20 and #" / "corral.db"
    async with open_store(f"sqlite:///{path}") as store:
        await store.ping()
        modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in _listed(path.parent)}
    assert modes == {"corral.db": 0o600, "corral.db-shm": 0o600, "corral.db-wal": 0o600}
    assert stat.S_IMODE(_mode(path.parent)) == 0o700


def _listed(folder: Path) -> list[Path]:
    return list(folder.iterdir())


def _mode(path: Path) -> int:
    return path.stat().st_mode


@pytest.mark.parametrize("place", ["a file/corral.db", "a folder"])
async def test_a_place_no_file_can_be(tmp_path: Path, place: str) -> None:
    (tmp_path / "a file").touch()
    (tmp_path / "a folder").mkdir()
    with pytest.raises(Invalid, match="cannot be opened for writing: "):
        async with open_store(f"sqlite:///{tmp_path}/{place}"):
            pass


async def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    path = tmp_path / "poem.txt"
    path.write_text("Shall I compare thee to a summer's day? " * 100)
    with pytest.raises(Invalid, match="is not a SQLite database"):
        async with open_store(f"sqlite:///{path}"):
            pass


async def test_a_database_postgresql_does_not_have(postgres: Postgres) -> None:
    with pytest.raises(Unavailable, match="does not exist"):
        async with open_store(postgres.url("nowhere")):
            pass


async def test_a_server_that_is_not_there() -> None:
    with pytest.raises(Unavailable, match=r"postgresql://127\.0\.0\.1:1/corral cannot be reached") as caught:
        async with open_store("postgresql://me:secret@127.0.0.1:1/corral"):
            pass
    assert "secret" not in str(caught.value)


async def test_a_url_with_nonsense_in_it() -> None:
    with pytest.raises(Invalid, match="URL cannot be used"):
        async with open_store("postgresql://me@127.0.0.1:1/corral?sslmode=perhaps"):
            pass


async def test_the_names_other_tools_use_for_postgresql(postgres_url: str) -> None:
    for scheme in ("postgres", "postgresql+asyncpg"):
        async with open_store(postgres_url.replace("postgresql", scheme, 1)) as store:
            assert store.kind == "postgresql"
